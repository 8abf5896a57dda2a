"""Deploys a model with OpenAI's API: `ray.serve.llm`, with vLLM's server in each replica.

    client ─► Serve's HTTP proxy ─► replica: vLLM's FastAPI app ─► vLLM engine

1. `ray.serve.llm` places replicas, starts their engines and scales them. vLLM's server provides chat, completions,
   streaming, `/health` and `/metrics`; this module implements no protocol.
2. The settings of the run's validation (`slipstream.json` of an exported model) become the engine's settings and the
   defaults of a request: dtype, template arguments, sampling. So greedy responses equal the validation's. A request may
   still set its own `temperature`, `max_tokens` and so on.
3. On CPUs the engine runs as a process of the replica, so all CPUs of the replica are the engine's.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.model import ModelConfig
from pipeline.models.architecture import longer_positions
from pipeline.models.ends import Ends, as_stored, find_ends
from pipeline.models.tokenizer import load_tokenizer
from pipeline.models.weight_files import alone, find_weights, note, read_config

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.llm import LLMConfig

    from pipeline.export.served_model import ServedModel

POLL_S = 1.0
MIN_BATCHED_TOKENS = 8192


@dataclass
class ServeOptions:
    """The options of a deployment, see `python -m jobs.serve --help`. None takes the run's setting, or a default."""

    name: str | None = None
    """Name of the model for clients, and of the application in Serve."""
    min_replicas: int = 1
    max_replicas: int | None = None
    target_ongoing_requests: int = 64
    num_cpus: float | None = None
    """Number of Ray CPUs of a replica; if the replica has several GPUs, per GPU."""
    num_gpus: float | None = None
    max_tokens: int | None = None
    tool_parser: str | None = None
    """Name of vLLM's parser for the model's tool calls, or `auto` or `none`."""
    engine: list[tuple[str, Any]] = field(default_factory=list)
    """Further arguments of vLLM's engine and server as (name, value); they replace the run's."""

    def replicas(self) -> tuple[int, int]:
        """Return (minimum, maximum) of the number of replicas.

        Raises:
            ValueError: the numbers are impossible.
        """
        low = self.min_replicas
        high = max(low, 1) if self.max_replicas is None else self.max_replicas
        if not 0 <= low <= high or high < 1:
            raise ValueError(f"{low} to {high} replicas are impossible; give --min-replicas >= 0, --max-replicas >= 1")
        return low, high

    def resources(self, model: "ServedModel") -> tuple[float, float]:
        """Return (Ray CPUs per GPU, number of Ray GPUs) of one replica.

        Raises:
            ValueError: the number of GPUs is impossible.
        """
        cpus = model.engine("num_cpus", 1.0) if self.num_cpus is None else self.num_cpus
        gpus = model.engine("num_gpus", 0.0) if self.num_gpus is None else self.num_gpus
        if gpus > 1 and gpus != int(gpus):
            raise ValueError(f"{gpus:g} GPUs per replica are impossible; give a fraction or a whole number")
        return cpus, gpus


def engine_kwargs(model: "ServedModel", options: ServeOptions) -> dict[str, Any]:
    """Collect the arguments of vLLM's engine and server (`AsyncEngineArgs` and `FrontendArgs`), without the API key."""
    chosen = model.engine("engine_kwargs", {}) | dict(options.engine)
    arguments: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    answer = options.max_tokens
    settings = model.settings
    if settings is not None:
        answer = answer or settings.max_response_length
        arguments |= {"dtype": settings.dtype, "enforce_eager": settings.enforce_eager}
        arguments["max_model_len"] = settings.max_prompt_length + answer
        sampling |= {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
        if settings.chat_template_kwargs:
            arguments["default_chat_template_kwargs"] = dict(settings.chat_template_kwargs)
    if answer:
        sampling["max_new_tokens"] = answer
    if sampling:
        arguments["override_generation_config"] = sampling
    if model.config and model.config.model.trust_remote_code:
        arguments["trust_remote_code"] = True
    _, gpus = options.resources(model)
    if gpus > 1:
        arguments["tensor_parallel_size"] = int(gpus)
    if longer := longer_positions(read_config(model.path)):
        arguments["hf_overrides"] = longer
    arguments |= model.calls | chosen
    if not gpus:
        # vLLM rewinds the random generator of a request whose prompt takes two steps, which generators on CPUs refuse.
        # So one step has to hold any prompt.
        longest = arguments.get("max_model_len")
        arguments.setdefault("enable_chunked_prefill", False)
        if longest:
            arguments.setdefault("max_num_batched_tokens", max(MIN_BATCHED_TOKENS, longest))
    return arguments


def llm_config(model: "ServedModel", options: ServeOptions, api_key: str | None = None) -> "LLMConfig":
    """Make the configuration for `ray.serve.llm`.

    Args:
        model: the model.
        options: options of the deployment.
        api_key: key that requests must have; None accepts any request.

    Raises:
        ValueError: an argument of the engine is unknown, or the replicas or their resources are impossible.
    """
    from ray.serve.llm import LLMConfig

    from pipeline.threads import compute_threads

    low, high = options.replicas()
    cpus, gpus = options.resources(model)
    arguments = engine_kwargs(model, options)
    middleware = list(arguments.get("middleware", []))
    if not arguments.get("tool_call_parser"):
        middleware.append("pipeline.export.tools.RefuseTools")
    if api_key:
        # The last middleware is the first to get a request.
        middleware.append("pipeline.export.api_key.RequireKey")
        arguments["api_key"] = [api_key]
    if middleware:
        arguments["middleware"] = middleware
    env = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    bundle = {"CPU": cpus}
    if gpus:
        bundle["GPU"] = min(gpus, 1)
    else:
        # GiB of KV cache: vLLM's own variable, or the run's setting.
        space = os.environ.get("VLLM_CPU_KVCACHE_SPACE") or model.engine("cpu_kvcache_space_gb", 1)
        env["VLLM_CPU_KVCACHE_SPACE"] = str(space)
        env["OMP_NUM_THREADS"] = str(compute_threads(0, cpus))
    config = LLMConfig(
        model_loading_config={"model_id": options.name or model.name, "model_source": model.path},
        engine_kwargs=arguments,
        placement_group_config={"bundle_per_worker": bundle},
        runtime_env={"env_vars": env},
        # With one replica vLLM's metrics are at its /metrics; with more they are labelled by replica in Ray's metrics.
        log_engine_metrics=high > 1,
        deployment_config={
            "autoscaling_config": {
                "min_replicas": low,
                "initial_replicas": max(low, 1),
                "max_replicas": high,
                "target_ongoing_requests": options.target_ongoing_requests,
            },
            # The replica itself only waits; the engine uses the resources of the bundle.
            "ray_actor_options": {"num_cpus": 0},
        },
    )
    config.get_engine_config()
    return config


def find_model_ends(model: "ServedModel", options: ServeOptions) -> Ends:
    """Find the tokens that end responses of a model, with the server's tokenizer and template arguments.

    Raises:
        ValueError: the tokenizer cannot be loaded.
    """
    trusted = bool(dict(options.engine).get("trust_remote_code", model.config and model.config.model.trust_remote_code))
    config = ModelConfig(model.path, dict(options.engine).get("tokenizer"), trust_remote_code=trusted)
    arguments = model.settings.chat_template_kwargs if model.settings else {}
    return find_ends(config, load_tokenizer(config, needs_chat_template=False), arguments)


@contextmanager
def weights_alone(model: "ServedModel") -> Iterator["ServedModel"]:
    """Yield the model without the files of weights that engines would read by mistake; see `weight_files.py`.

    If there are such files, the yielded model has a temporary folder with links to its other files.

    Raises:
        ValueError: such files exist, and replicas may run on other machines; or a file is damaged.
    """
    folder = Path(model.path)
    found = find_weights(folder) if folder.is_dir() else None
    if found is None or not found.mislead_engines:
        yield model
        return
    if os.environ.get("RAY_ADDRESS"):
        raise ValueError(
            f"{note(folder, model.path)}; an engine would read them, too: move them out of the folder, which replicas "
            "on other machines read as it is"
        )
    with alone(folder) as links:
        yield replace(model, path=links)


def write_generation_config(model: "ServedModel", ends: Ends, folder: Path) -> None:
    """Write the model's `generation_config.json`, with the tokens `ends`, into `folder`.

    vLLM reads it if the option `generation_config` names the folder.
    """
    from transformers import GenerationConfig

    own: dict[str, Any] = {}
    with suppress(OSError):
        own = GenerationConfig.from_pretrained(model.path).to_diff_dict()
    text = json.dumps(own | {"eos_token_id": as_stored(ends.ids)}, indent=2)
    (folder / "generation_config.json").write_text(text, encoding="utf-8")


def application(config: "LLMConfig") -> "Application":
    """Build the application for Serve; Ray must be running."""
    import ray
    from ray import serve
    from ray.serve.llm import build_llm_deployment
    from ray.serve.llm.deployment import LLMServer

    options = config.runtime_env or {}
    # The deployment's variables would replace the variables of this process's job.
    inherited = dict(ray.get_runtime_context().runtime_env.get("env_vars") or {})
    options["env_vars"] = inherited | options.get("env_vars", {})
    return build_llm_deployment(config, name_prefix="LLM:", deployment_cls=serve.ingress()(LLMServer))


def wait_until_running(name: str, timeout: float) -> None:
    """Wait at most `timeout` seconds until the application `name` runs, and print Serve's messages meanwhile.

    Raises:
        RuntimeError: the application cannot be started.
        TimeoutError: the application does not run in time.
    """
    from ray import serve

    deadline = time.monotonic() + timeout
    printed = ""
    while True:
        app = serve.status().applications.get(name)
        status = app.status.value if app else "NOT_STARTED"
        if status == "RUNNING":
            return
        message = "; ".join(each.message for each in app.deployments.values() if each.message) if app else ""
        if app and status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise RuntimeError(f"the model {name} could not be started: {message or app.message}")
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the model {name} did not run within {timeout:.0f} s (--start-timeout); its status in Serve is "
                f"{status}: {message or 'without a message'}"
            )
        if message != printed:
            print(f"{name}: Serve: {message}", flush=True)
            printed = message
        time.sleep(POLL_S)
