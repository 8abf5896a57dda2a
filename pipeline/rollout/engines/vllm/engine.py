"""vLLM as the engine: construction, weights, requests and outputs."""

import copy
import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.config.model import ModelConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.generation import EngineOutput, EngineRequest, Generation
from pipeline.models.architecture import longer_positions
from pipeline.models.lora import policy_class
from pipeline.models.weight_files import alone, read_config
from pipeline.rollout.engines.vllm import images, lora
from pipeline.rollout.engines.vllm.support import SupportReader, listed
from pipeline.rollout.engines.vllm.tensor_parallel import engine_args
from pipeline.rollout.engines.vllm.transfer import BACKEND, accept, confirm, register
from pipeline.rows import UNROUTED
from pipeline.sampling import Sampling
from pipeline.upstream.vllm import steps_begun, take_log_probs
from pipeline.weights.load import Shard


class VLLM:
    """vLLM's `LLMEngine` in this process, with the protocol `Engine`.

    The loop steps the engine itself, and weights reach it without another process in between.
    """

    def __init__(self, model: ModelConfig, rollout: RolloutConfig, max_model_len: int, seed: int) -> None:
        self.llm = build(model, rollout, max_model_len, seed)
        self._vocabulary, self._most_support = self.llm.model_config.get_vocab_size(), rollout.max_support
        self._keeps_base = model.lora.alone
        self._tower_changes = model.vision == "trained"
        self._version = -1
        self._replays_routes, self._routed = rollout.replay_routes, set[str]()
        """`rollout.replay_routes`, and the requests whose experts are wanted."""

    def add(self, request_id: str, request: EngineRequest) -> None:
        """Add a request. Its cache salt is the version, so that no version reads KV of another."""
        sampling, most = request.sampling, self._most_support
        wanted = listed(sampling, self._vocabulary, most) if request.for_training else 0
        own = copy.copy(params(sampling, request.ends, request.ignore_eos, wanted))
        own.seed = request.seed
        salt = f"v{self._version}"
        if request.images is None:
            prompt = {"type": "token", "prompt_token_ids": request.prompt_ids, "cache_salt": salt}
        else:
            prompt = images.prompt_of(self.llm, request, salt)
        if request.for_training and self._replays_routes:
            self._routed.add(request_id)
        added = self.llm.add_request(request_id, prompt, own)
        if request.for_training and (sampling.truncated or sampling.min_tokens):
            forbidden = own.all_stop_token_ids
            take_log_probs(self.llm, added, SupportReader(sampling, forbidden, self._vocabulary, most))

    def step(self) -> list[EngineOutput]:
        """Take one step."""
        return self._read(self.llm.step())

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests."""
        self._routed.difference_update(request_ids)
        self.llm.abort_request(request_ids)

    def drain(self) -> list[EngineOutput]:
        """Finish the steps that the engine has begun ahead: a GPU engine computes one step ahead."""
        begun = steps_begun(self.llm)
        if not begun:
            return []
        from vllm.v1.core.sched.interface import PauseState

        outputs: list[Any] = []
        scheduler = self.llm.engine_core.engine_core.scheduler
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while begun:
                outputs += self.llm.step()
        finally:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        return self._read(outputs)

    def load(self, shards: Sequence[Shard], timeout: float, version: int) -> None:
        """Replace the weights, or the adapter, in place; see `Engine.load`."""
        llm = self.llm
        if any(shard.adapter for shard in shards):
            lora.load(llm, shards, timeout)
        else:
            llm.collective_rpc("start_weight_update")
            llm.collective_rpc("update_weights", kwargs={"update_info": {"shards": list(shards), "timeout": timeout}})
            llm.collective_rpc("finish_weight_update")
            self._confirm()
        if self._tower_changes:
            # Features of images are kept by the names of the images, for any version.
            llm.reset_encoder_cache()
        llm.set_weight_version(str(version))
        self._version = version

    def update(self, shards: Sequence[Shard], timeout: float, version: int, recompute: bool) -> None:
        """Replace the weights while requests run; see `Engine.update`.

        Later requests have another cache salt, and so never read KV of old weights.
        """
        self.load(shards, timeout, version)
        if recompute:
            # By default vLLM resets nothing while requests run, and only logs it.
            self.llm.reset_prefix_cache(reset_running_requests=True)

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache; a base that is not sent again stays in host memory."""
        # Level 1 copies the weights to the host; if the next ones replace them, that is of no use.
        self.llm.sleep(level=1 if self._keeps_base else 2)

    def wake(self, shards: Sequence[Shard], timeout: float, version: int) -> None:
        """Allocate the GPU memory again, and load weights into it."""
        self.llm.wake_up(tags=["weights"])
        self.load(shards, timeout, version)
        # The KV cache comes last: while weights arrive they need room twice.
        self.llm.wake_up(tags=["kv_cache"])

    def close(self) -> None:
        """Do nothing: the engine ends with its process."""

    def _confirm(self) -> None:
        """Check the version that was loaded (`weights/confirm.py`)."""
        from pipeline.weights.confirm import check

        found = [confirmation for confirmation in self.llm.collective_rpc(confirm) if confirmation is not None]
        if found:
            check(found, f"{self.llm.model_config.hf_config.model_type} ({self.llm.model_config.model})")
            self.llm.collective_rpc(accept)

    def _read(self, outputs: Sequence[Any]) -> list[EngineOutput]:
        made = []
        for output in (output for output in outputs if output.finished):
            generation = read(output, self._version)
            if output.request_id in self._routed:
                self._routed.remove(output.request_id)
                generation = replace(generation, routes=routes_of(output.outputs[0].routed_experts))
            made.append(EngineOutput(output.request_id, generation))
        return made


def build(model: ModelConfig, rollout: RolloutConfig, max_model_len: int, seed: int) -> Any:
    """Build an in-process `LLMEngine` that returns log-probs of the distribution from which it samples.

    Weights are read from the disk if the run has only adapters to send.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(rollout.cpu_kvcache_space_gb))
    if rollout.replay_routes:
        # Only vLLM's second runner returns experts.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
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
        # Requests ask for the log-probs that name the tokens' supports.
        "max_logprobs": -1,
        "seed": seed,
        "disable_log_stats": True,
        # vLLM rewinds the generator of a request whose prompt takes two steps, which CPU generators refuse.
        "enable_chunked_prefill": rollout.num_gpus > 0,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "enable_sleep_mode": rollout.sleep,
        "enable_return_routed_experts": rollout.replay_routes,
        # On CPUs vLLM's blocks have 128 tokens, and a shorter prefix is never found again.
        **({} if rollout.num_gpus else {"block_size": 32}),
        **engine_args(rollout.tensor_parallel_size),
        **lora.engine_args(model.lora),
        **images.engine_args(model),
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
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"made_by": policy_class(model)}})
    if model.lora.alone:
        lora.use_adapter(engine)
    return engine


# Most requests are sampled alike: making and checking parameters costs more than the rest of a request.
@functools.lru_cache(maxsize=1024)
def params(chosen: Sampling, ends: tuple[int, ...], ignore_eos: bool, log_probs: int = 0) -> Any:
    """Make vLLM's `SamplingParams`, without a seed.

    Args:
        chosen: settings of the request.
        ends: ids of tokens that end the response, in addition to the end tokens in the model's files.
        ignore_eos: true to go on generating past all of them.
        log_probs: number of log-probs for each token, in addition to the sampled token's.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=chosen.max_tokens,
        min_tokens=chosen.min_tokens,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
        stop=list(chosen.stop),
        ignore_eos=ignore_eos,
        stop_token_ids=[] if ignore_eos else list(ends),
        logprobs=log_probs,
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
    log_probs = completion.logprobs
    return Generation(
        np.asarray(completion.token_ids, dtype=np.int32),
        np.asarray(log_probs.logprobs, dtype=np.float32),
        completion.finish_reason or "abort",
        runs or ((version, len(completion.token_ids)),),
        log_probs.writer.columns() if isinstance(log_probs, SupportReader) else None,
    )


def routes_of(experts: np.ndarray) -> np.ndarray:
    """[P + T, W] int16, the experts of all tokens of a request, from vLLM's [P + T - 1, layers, k], which lack the last
    token's."""
    return np.pad(experts.reshape(len(experts), -1).astype(np.int16), ((0, 1), (0, 0)), constant_values=UNROUTED)
