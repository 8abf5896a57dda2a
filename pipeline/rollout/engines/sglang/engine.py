"""SGLang as the engine: its server is a child process (`server.py`), and this file translates to its HTTP interface.

    weights    begin ─► each buffer of shared memory ─► end ─► number of the version
    in flight  pause, which keeps or takes back the running requests ─► weights ─► continue

1. SGLang labels each token with the version that generated it.
2. Its prefix cache finds KV of old weights. So each request has its version as the salt of the cache.
3. It accepts half a model, and names that it does not know. So the first version is followed into its model
   (`weights/confirm.py`), and later ones must have the same names.
4. Its log-probs are not renormalised after top-p and top-k, and it ignores seeds if it is not in its deterministic
   mode. `plan/check_engine.py` refuses both.
"""

import base64
import json
import os
import pickle
import queue
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config.model import ModelConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.errors import EngineDead, FinalError
from pipeline.generation import EngineOutput, EngineRequest, Generation
from pipeline.models.architecture import longer_positions
from pipeline.models.weight_files import alone, read_config
from pipeline.rollout.engines.sglang.client import Client
from pipeline.rollout.engines.sglang.server import ServerProcess
from pipeline.weights.checkpoint_names import as_in_checkpoint, skeleton
from pipeline.weights.load import Shard, fetch, parameters
from pipeline.weights.shared import Report, SharedBuffer, aligned, buckets

if TYPE_CHECKING:
    import torch

BUFFER_BYTES = 64 << 20
WAIT_S = 0.01
"""Longest time of a step without a finished request; commands of the loop wait for its end."""
CONTROL_S = 60.0
"""Time limit, in seconds, for a request that the server answers at once."""
LOADER = "slipstream_weights.load"
SPARE = 8
"""Positions that SGLang must have beyond those of a row."""


class SGLang:
    """SGLang's server with the protocol `Engine`.

    Args:
        model, rollout, max_model_len, seed: as in `engines.build`.
        folder: folder for the log of the server; None for a temporary one.
        start_timeout: seconds in which the server must answer.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        max_model_len: int,
        seed: int,
        folder: Path | None,
        start_timeout: float,
    ) -> None:
        self._version = -1
        self._running: set[str] = set()
        self._accepted: set[str] = set()
        """Names of the tensors of a version that was checked; later ones with the same names are not."""
        self._seeds = bool(rollout.engine_kwargs.get("enable_deterministic_inference"))
        self._family = f"{read_config(model.path).get('model_type')} ({model.path})"
        self._lm = skeleton(model.path or "", model.trust_remote_code)
        self._buffers: list[SharedBuffer] = []
        log = (folder or Path(tempfile.gettempdir())) / f"sglang-{socket.gethostname()}-{os.getpid()}.log"
        # The folder is read while the server starts, and not later.
        with alone(model.path or "") as path:
            flags = arguments(model, rollout, max_model_len, seed, path)
            self.server = ServerProcess(python(rollout), flags, variables(rollout), log, start_timeout)
        self._client = Client(self.server.url, self.server.key)

    def add(self, request_id: str, request: EngineRequest) -> None:
        """Add a request. Its cache salt is the version, so that no version reads KV of another."""
        self._running.add(request_id)
        self._client.generate(request_id, body(request_id, request, self._version, self._seeds))

    def step(self) -> list[EngineOutput]:
        """Wait for a short time; returns the requests that are finished."""
        outputs = []
        try:
            found = self._client.finished.get(timeout=WAIT_S)
            while True:
                request_id, answer = found
                if request_id in self._running:
                    self._running.discard(request_id)
                    outputs.append(EngineOutput(request_id, self._generation(answer)))
                found = self._client.finished.get_nowait()
        except queue.Empty:
            if not outputs and (death := self.server.death()):
                raise EngineDead(death) from None
        return outputs

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests."""
        for request_id in request_ids:
            self._running.discard(request_id)
            self._client.begin("/abort_request", {"rid": request_id}, CONTROL_S)

    def drain(self) -> list[EngineOutput]:
        """Return nothing: a pause waits for the step that the server is in."""
        return []

    def load(self, shards: Sequence[Shard], timeout: float, version: int) -> None:
        """Replace the weights in place; see `Engine.load`."""
        self._post("/begin_weight_update", {}, CONTROL_S)
        try:
            self._send(shards, timeout)
        finally:
            self._post("/end_weight_update", {}, timeout)
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False}, CONTROL_S)
        self._version = version

    def update(self, shards: Sequence[Shard], timeout: float, version: int, recompute: bool) -> None:
        """Replace the weights while requests run; see `Engine.update`."""
        self._post("/pause_generation", {"mode": "retract" if recompute else "in_place"}, CONTROL_S)
        try:
            self.load(shards, timeout, version)
            if recompute:
                # Requests that were taken back have their old salt, and would find their old KV.
                self._post("/flush_cache", {}, CONTROL_S)
        finally:
            self._post("/continue_generation", {}, CONTROL_S)

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache."""
        self._post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, CONTROL_S)

    def wake(self, shards: Sequence[Shard], timeout: float, version: int) -> None:
        """Allocate the GPU memory again, and load weights into it."""
        self._post("/resume_memory_occupation", {"tags": ["weights"]}, CONTROL_S)
        self.load(shards, timeout, version)
        self._post("/resume_memory_occupation", {"tags": ["kv_cache"]}, CONTROL_S)

    def close(self) -> None:
        """End the server."""
        self.server.close()
        self._client.close()
        for buffer in self._buffers:
            buffer.close()

    def _post(self, path: str, content: dict[str, Any], timeout: float) -> Any:
        try:
            return self._client.post(path, content, timeout)
        except TimeoutError:
            raise TimeoutError(f"the SGLang server did not answer {path} within {timeout:.0f} s") from None
        except OSError as error:
            raise EngineDead(self.server.death() or f"no connection to the SGLang server: {error}") from error

    def _send(self, shards: Sequence[Shard], timeout: float) -> None:
        """Send a version's tensors, one buffer while the server loads the other."""
        from pipeline.weights.confirm import Confirmation, check, computed, recomputed, unsent

        names = {piece.name for shard in shards for piece in shard.pieces}
        checks, known = names != self._accepted, computed(self._lm)
        given: dict[str, torch.Tensor] = {}
        self._buffers = self._buffers or [SharedBuffer(BUFFER_BYTES) for _ in range(2)]

        def tensors() -> "Iterator[tuple[str, torch.Tensor]]":
            published = parameters(shards, lambda refs: fetch(refs, "cpu", timeout))
            for name, tensor in as_in_checkpoint(self._lm, published):
                if name in known:
                    given[name] = tensor.clone()
                yield name, tensor

        report, pending = Report(), None
        for number, bucket in enumerate(buckets(tensors(), BUFFER_BYTES)):
            buffer = self._buffers[number % 2]
            buffer.grow(sum(aligned(tensor) for _, tensor in bucket))
            manifest = buffer.write(bucket, checks, first=number == 0).encode()
            if pending is not None:
                report = self._loaded(*pending, timeout)
            pending = buffer, self._client.begin("/update_weights_from_tensor", tensor_body(manifest), timeout)
        if pending is not None:
            report = self._loaded(*pending, timeout)
        if checks:
            unread = set(report.unread) - recomputed(self._lm, given)
            check([Confirmation(unsent(self._lm, names), unread, set(report.left))], self._family)
            self._accepted = names

    def _loaded(self, buffer: SharedBuffer, answer: Any, timeout: float) -> Report:
        """Wait until the server has loaded a buffer; returns its report."""
        try:
            answer.result()
        except TimeoutError:
            raise TimeoutError(
                f"the SGLang server did not load a part of the weights within {timeout:.0f} s "
                "(trainer.deadlines.publish)"
            ) from None
        except OSError as error:
            raise EngineDead(self.server.death() or f"no connection to the SGLang server: {error}") from error
        report = buffer.report()
        if report is None:
            raise EngineDead("the SGLang server did not report on the weights that it was sent")
        if report.error:
            raise (FinalError if report.final else ValueError)(f"weights: {report.error}")
        return report

    def _generation(self, answer: Any) -> Generation:
        if isinstance(answer, Exception):
            raise EngineDead(self.server.death() or f"a request to the SGLang server failed: {answer}") from answer
        made = read(answer, self._version)
        if made.finish_reason == "abort":
            raise EngineDead(f"the SGLang server has given up a request: {answer['meta_info']['finish_reason']}")
        return made


def python(rollout: RolloutConfig) -> str:
    """Return the interpreter of SGLang's environment. Raises ValueError if it is not on this machine."""
    path = rollout.sglang_python
    if not os.access(path, os.X_OK):
        raise ValueError(
            f"rollout.engine_python={path} is not on the machine {socket.gethostname()}; make the environment there "
            "with `make sglang-env`"
        )
    return os.path.abspath(path)


def variables(rollout: RolloutConfig) -> dict[str, str]:
    """Return environment variables of the server."""
    return {} if rollout.num_gpus else {"SGLANG_USE_CPU_ENGINE": "1"}


def arguments(model: ModelConfig, rollout: RolloutConfig, max_model_len: int, seed: int, path: str) -> list[str]:
    """Return the arguments of the server.

    Args:
        model, rollout, max_model_len, seed: as in `engines.build`.
        path: folder of the model's files.
    """
    length = max_model_len + SPARE
    chosen: dict[str, Any] = {
        "model_path": path,
        "tokenizer_path": model.tokenizer_path or path,
        "dtype": rollout.dtype,
        "load_format": "dummy",
        "custom_weight_loader": LOADER,
        "context_length": length,
        "max_running_requests": rollout.max_num_seqs,
        "random_seed": seed,
        "log_level": "error",
        "skip_server_warmup": True,
        "trust_remote_code": model.trust_remote_code,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "enable_memory_saver": rollout.sleep,
    }
    if changes := longer_positions(read_config(model.path)):
        chosen["json_model_override_args"] = json.dumps(changes)
    if rollout.num_gpus:
        chosen |= {
            "mem_fraction_static": rollout.gpu_memory_utilization,
            "chunked_prefill_size": rollout.max_num_batched_tokens,
            "disable_cuda_graph": rollout.enforce_eager,
        }
    else:
        cache = (rollout.cpu_kvcache_space_gb << 30) // kv_bytes(read_config(model.path), rollout.dtype)
        chosen |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
            # A fraction of the machine's memory, which SGLang refuses if it is small; the number of tokens limits it.
            "mem_fraction_static": 0.3,
            "max_total_tokens": min(cache, rollout.max_num_seqs * length),
        }
    words: list[str] = []
    for name, value in (chosen | rollout.engine_kwargs).items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def kv_bytes(config: dict[str, Any], dtype: str) -> int:
    """Return the bytes of KV cache of one token."""
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    number = 4 if dtype == "float32" else 2
    return 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * size * number


def body(request_id: str, request: EngineRequest, version: int, seeds: bool) -> dict[str, Any]:
    """Return the content of a request of `/generate`.

    Args:
        request_id: id of the request.
        request: the request.
        version: policy version of the weights.
        seeds: true if the server is in its deterministic mode, in which it uses seeds.
    """
    own = request.sampling
    chosen: dict[str, Any] = {
        "max_new_tokens": own.max_tokens,
        "min_new_tokens": own.min_tokens,
        "temperature": own.temperature,
        "top_p": own.top_p,
        "top_k": own.top_k,
        "min_p": own.min_p,
        "stop": list(own.stop),
        "stop_token_ids": [] if request.ignore_eos else list(request.ends),
        "ignore_eos": request.ignore_eos,
    }
    if seeds and request.seed is not None:
        chosen["sampling_seed"] = request.seed
    return {
        "rid": request_id,
        "input_ids": request.prompt_ids,
        "sampling_params": chosen,
        "return_logprob": True,
        "cache_salt": f"v{version}",
    }


def tensor_body(manifest: bytes) -> dict[str, Any]:
    """Return the content of a request of `/update_weights_from_tensor`, with the manifest as its only tensor."""
    import torch

    packed = pickle.dumps([("manifest", torch.frombuffer(bytearray(manifest), dtype=torch.uint8))])
    return {
        "serialized_named_tensors": [base64.b64encode(packed).decode()],
        "load_format": LOADER,
        # The salt of the prefix cache separates the versions.
        "flush_cache": False,
    }


def read(answer: dict[str, Any], version: int) -> Generation:
    """Convert the server's answer; `version` labels the tokens if the server does not."""
    about = answer["meta_info"]
    ids = np.asarray(answer["output_ids"], dtype=np.int32)
    log_probs = np.asarray([entry[0] for entry in about["output_token_logprobs"]], dtype=np.float32)
    # Weights that the server read from the disk have no number.
    spans = [span for span in about.get("weight_versions") or () if span["version"].isdigit()]
    runs = tuple((int(span["version"]), span["end"] - span["start"]) for span in spans)
    reason = about["finish_reason"]["type"] if about["finish_reason"] else "abort"
    return Generation(ids, log_probs, reason, runs or ((version, len(ids)),))
