"""vLLM as the engine: construction, weights, requests and outputs."""

import copy
import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.config.model import ModelConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.generation import Generation
from pipeline.models.architecture import longer_positions
from pipeline.models.weight_files import alone, read_config
from pipeline.rollout.engines.vllm import lora
from pipeline.rollout.engines.vllm.tensor_parallel import engine_args
from pipeline.rollout.engines.vllm.transfer import BACKEND, accept, confirm, register
from pipeline.sampling import Sampling
from pipeline.upstream.vllm import steps_begun
from pipeline.weights.load import Shard


def build(model: ModelConfig, rollout: RolloutConfig, max_model_len: int, seed: int) -> Any:
    """Build an in-process `LLMEngine` that returns log-probs of the distribution from which it samples.

    Weights are random until the first policy version is loaded from the trainer. An evaluation's engines read them from
    the disk (`engine_kwargs.load_format`), and so do engines that get only adapters.
    """
    # In-process: the loop steps the engine itself, and weights reach it without another process in between.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(rollout.cpu_kvcache_space_gb))
    from vllm import EngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    register()
    args: dict[str, Any] = {
        "tokenizer": model.tokenizer_path or model.path,
        "trust_remote_code": model.trust_remote_code,
        "dtype": rollout.dtype,
        "load_format": "dummy",
        # By default vLLM prefers files in Mistral's own form to the files that the trainer reads.
        "config_format": "hf",
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
        # On CPUs vLLM's blocks have 128 tokens, and a shorter prefix is never found again.
        **({} if rollout.num_gpus else {"block_size": 32}),
        **engine_args(rollout.tensor_parallel_size),
        **lora.engine_args(model.lora),
    }
    args |= rollout.engine_kwargs
    if args["load_format"] == "auto":
        args["load_format"] = "hf"
    args["hf_overrides"] = longer_positions(read_config(model.path)) | args.get("hf_overrides", {})
    # The folder is read while the engine is built, and not later.
    with alone(model.path or "") as path:
        chosen = EngineArgs(**(args | {"model": path}))
        if not chosen.enable_chunked_prefill and chosen.create_model_config().has_inner_state:
            # Without chunks vLLM cannot keep the states of recurrent layers between requests, and does not start.
            chosen.enable_prefix_caching = False
        engine = LLMEngine.from_engine_args(chosen)
    if model.lora.alone:
        lora.use_adapter(engine)
    return engine


def load(engine: Any, shards: Sequence[Shard], timeout: float, version: int) -> None:
    """Replace the engine's weights, or its adapter, in place, and label its tokens with `version` from now on.

    No request may be running.

    Raises:
        FinalError: the engine does not read all that is published, or needs more (`engines/vllm/confirm.py`).
    """
    if any(shard.adapter for shard in shards):
        lora.load(engine, shards, timeout)
        engine.set_weight_version(str(version))
        return
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": {"shards": list(shards), "timeout": timeout}})
    engine.collective_rpc("finish_weight_update")
    from pipeline.rollout.engines.vllm.confirm import check

    found = [confirmation for confirmation in engine.collective_rpc(confirm) if confirmation is not None]
    if found:
        check(found, f"{engine.model_config.hf_config.model_type} ({engine.model_config.model})")
        engine.collective_rpc(accept)
    engine.set_weight_version(str(version))


def drain(engine: Any) -> list[Any]:
    """Finish the steps that the engine has begun ahead, and return their outputs.

    A GPU engine computes one step ahead: without this, tokens of the old weights would be labelled with the new
    version.
    """
    begun = steps_begun(engine)
    if not begun:
        return []
    from vllm.v1.core.sched.interface import PauseState

    outputs: list[Any] = []
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        while begun:
            outputs += engine.step()
    finally:
        scheduler.set_pause_state(PauseState.UNPAUSED)
    return outputs


def update(engine: Any, shards: Sequence[Shard], timeout: float, version: int, recompute: bool) -> None:
    """Replace a drained engine's weights while requests run, between two of their tokens.

    With `recompute` the KV cache is dropped and computed again with the new weights, also for running requests. Without
    it, running requests keep the KV that the old weights computed; later requests have another cache salt and never
    read it.
    """
    load(engine, shards, timeout, version)
    if recompute:
        # By default vLLM resets nothing while requests run, and only logs it.
        engine.reset_prefix_cache(reset_running_requests=True)


def sleep(engine: Any, keep_base: bool = False) -> None:
    """Free the GPU memory of weights and KV cache; both are lost. No request may be running.

    Args:
        engine: the engine.
        keep_base: true to keep the weights in host memory, if they are a base that is not sent again.
    """
    # Level 1 would copy the weights to the host, and the next ones replace them.
    engine.sleep(level=1 if keep_base else 2)


def wake(engine: Any, shards: Sequence[Shard], timeout: float, version: int) -> None:
    """Allocate the GPU memory again after `sleep`, and load weights into it."""
    engine.wake_up(tags=["weights"])
    load(engine, shards, timeout, version)
    # The KV cache comes last: while weights arrive they need room twice.
    engine.wake_up(tags=["kv_cache"])


def requests(
    prompts: Sequence[list[int]],
    uids: Sequence[str],
    settings: Sequence[Sampling],
    n: int,
    *,
    seed: int | None,
    ends: Sequence[int] = (),
    ignore_eos: bool = False,
    greedy: bool = False,
) -> list[tuple[Any, Any]]:
    """Make `n` requests for each prompt, prompt by prompt; with `greedy`, followed by one of greedy decoding.

    With a `seed`, every request has its own seed, made from the run's seed, the prompt's uid and the sample's number,
    so that the greedy request changes no sample.

    Args:
        prompts: token ids; vLLM keeps these lists, so they must not be changed.
        uids: identifiers of the prompts.
        settings: sampling settings of each prompt.
        n: number of samples of a prompt.
        seed: seed of the run; None leaves requests without seeds.
        ends: ids of tokens that end a response, in addition to those that vLLM finds in the model's files.
        ignore_eos: true to go on generating past all of them.
        greedy: true if each prompt has a greedy request.
    """
    pairs = []
    for ids, uid, chosen in zip(prompts, uids, settings, strict=True):
        for sample, sampling in enumerate([chosen] * n + [chosen.greedy()] * greedy):
            own = copy.copy(_params(sampling, tuple(ends), ignore_eos))
            drawn = seed is not None and sampling.temperature > 0
            own.seed = seed_of(f"{seed}/{uid}/{sample}") if drawn else None
            pairs.append((prompt_of(ids), own))
    return pairs


def prompt_of(ids: list[int]) -> dict[str, Any]:
    """Make vLLM's prompt from token ids. vLLM keeps the list, so it must not be changed."""
    return {"type": "token", "prompt_token_ids": ids}


def salt(engine: Any, prompt: dict[str, Any]) -> None:
    """Set a prompt's cache salt to the engine's policy version, so that no version reads KV of another."""
    prompt["cache_salt"] = f"v{engine.get_weight_version()}"


def turn(ids: list[int], sampling: Sampling, seed: int | None, ends: Sequence[int] = ()) -> tuple[Any, Any]:
    """Make the request for one turn of an episode.

    Args:
        ids: token ids of the conversation so far; vLLM keeps this list.
        sampling: sampling settings of the turn; `max_tokens` is its maximum length.
        seed: seed of the request; None leaves it without a seed.
        ends: ids of tokens that end the turn, in addition to those that vLLM finds in the model's files.
    """
    own = copy.copy(_params(sampling, tuple(ends), False))
    own.seed = seed if sampling.temperature > 0 else None
    return prompt_of(ids), own


# Most turns are sampled alike: making and checking parameters costs more than the rest of a request.
@functools.lru_cache(maxsize=1024)
def _params(chosen: Sampling, ends: tuple[int, ...], ignore_eos: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=chosen.max_tokens,
        min_tokens=chosen.min_tokens,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        stop=list(chosen.stop),
        ignore_eos=ignore_eos,
        stop_token_ids=[] if ignore_eos else list(ends),
        logprobs=0,
        flat_logprobs=True,
        # Without stop strings, text is decoded outside the engine.
        detokenize=bool(chosen.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        # vLLM would copy them deeply for each request; each has its own copy already.
        skip_clone=True,
    )


def read(output: Any, version: int) -> Generation:
    """Convert the one completion of a finished request; `version` labels the tokens if the engine does not."""
    completion = output.outputs[0]
    # Weights that the engine read from the disk have no number.
    spans = [span for span in completion.weight_versions or () if span.version.isdigit()]
    runs = tuple((int(span.version), span.end - span.start) for span in spans)
    return Generation(
        np.asarray(completion.token_ids, dtype=np.int32),
        np.asarray(completion.logprobs.logprobs, dtype=np.float32),
        completion.finish_reason or "abort",
        runs or ((version, len(completion.token_ids)),),
    )


def seed_of(text: str) -> int:
    """Derive a seed from the text that identifies a request: a non-negative integer below 2^63."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
