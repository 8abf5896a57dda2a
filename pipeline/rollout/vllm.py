"""vLLM as the engine: how it is built, asked and read."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.rollout.config import RolloutConfig, SamplingConfig
from pipeline.rollout.weights import BACKEND, Shard, register
from pipeline.train.config import ModelConfig

GREEDY = SamplingConfig(n=1, temperature=0.0, top_p=1.0, top_k=-1)
"""The likeliest token each time, whatever the run samples with."""


@dataclass(frozen=True)
class Generation:
    """One response: token ids `[T]` int32, their log-probs `[T]` float32, and why it ended."""

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str


def build(model: ModelConfig, rollout: RolloutConfig, max_model_len: int, seed: int) -> Any:
    """An in-process `LLMEngine` whose log-probs are those of the distribution it samples from.

    Weights are random until the first policy version is loaded: they come from the trainer. An evaluation's engines
    read them from the disk (`engine_kwargs.load_format`).
    """
    # In-process: the loop steps the engine itself, and weights reach it without another process in between.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(rollout.cpu_kvcache_space_gb))
    from vllm import EngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    register()
    args: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer_path or model.path,
        "trust_remote_code": model.trust_remote_code,
        "dtype": rollout.dtype,
        "load_format": "dummy",
        "max_model_len": max_model_len,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, max_model_len),
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "seed": seed,
        "disable_log_stats": True,
        # vLLM rewinds the generator of a request whose prompt takes two steps, which CPU generators refuse.
        "enable_chunked_prefill": rollout.num_gpus > 0,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "enable_sleep_mode": rollout.sleep,
    }
    return LLMEngine.from_engine_args(EngineArgs(**(args | rollout.engine_kwargs)))


def load(engine: Any, shards: Sequence[Shard], timeout: float) -> None:
    """Replace the engine's weights in place. No request may be running."""
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": {"shards": list(shards), "timeout": timeout}})
    engine.collective_rpc("finish_weight_update")


def sleep(engine: Any) -> None:
    """Give back the GPU memory of weights and KV cache; both are lost. No request may be running."""
    # Level 2: the next weights replace all of these, so level 1 would copy them to the host for nothing.
    engine.sleep(level=2)


def wake(engine: Any, shards: Sequence[Shard], timeout: float) -> None:
    """Take the memory again and load weights into it, without which the engine cannot generate."""
    engine.wake_up(tags=["weights"])
    load(engine, shards, timeout)
    # The KV cache comes last: while weights arrive there is room for them twice.
    engine.wake_up(tags=["kv_cache"])


def requests(
    prompts: Sequence[Sequence[int]],
    uids: Sequence[str],
    sampling: SamplingConfig | RolloutConfig,
    *,
    max_tokens: int,
    version: int,
    seed: int | None,
    ignore_eos: bool = False,
    greedy: bool = False,
) -> list[tuple[Any, Any]]:
    """`n` requests for each prompt, samples of one prompt next to each other; with `greedy` one more, the likeliest
    token each time, behind them.

    Tokens go in and tokens come out: nothing is decoded and encoded again on the way. With a `seed`, every request has
    its own, made from the run's seed, the prompt's uid and the sample's number, so that the greedy request changes no
    sample.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = [sampling] * sampling.n + [GREEDY] * greedy
    pairs = []
    for prompt, uid in zip(prompts, uids, strict=True):
        for sample, chosen in enumerate(settings):
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=chosen.temperature,
                top_p=chosen.top_p,
                top_k=chosen.top_k,
                seed=_seed(seed, uid, sample) if seed is not None and chosen.temperature > 0 else None,
                ignore_eos=ignore_eos,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            # The salt keeps a newer policy from reading prompt KV that an older one cached.
            pairs.append(({"prompt_token_ids": list(prompt), "cache_salt": f"v{version}"}, params))
    return pairs


def read(output: Any) -> Generation:
    """The one completion of a finished request."""
    completion = output.outputs[0]
    return Generation(
        np.asarray(completion.token_ids, dtype=np.int32),
        np.asarray(completion.logprobs.logprobs, dtype=np.float32),
        completion.finish_reason or "abort",
    )


def _seed(seed: int, uid: str, sample: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{uid}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
