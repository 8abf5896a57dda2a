"""A model behind the OpenAI API: Ray Serve's deployment for language models, with vLLM's own server in each replica.

    client ─► Serve's HTTP proxy ─► replica: vLLM's FastAPI app ─► vLLM engine

1. `ray.serve.llm` places replicas, starts their engines and scales them. Its server takes vLLM's app as its own
   ingress, so chat, completions, streaming, keys, `/health` and `/metrics` are vLLM's, and no protocol is written here.
2. What a run validated with (`slipstream.json` of an exported model) becomes the engine's settings and the defaults of
   a request: the same type, template arguments and sampling, so that greedy answers are those of the validation. A
   request's own `temperature`, `max_tokens`, `chat_template_kwargs` hold as ever.
3. On CPUs the engine is a process of the replica, so the whole replica's CPUs are the engine's.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.export.settings import ModelSettings

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.llm import LLMConfig

POLL_S = 1.0
MIN_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Serving:
    """What is served, and how."""

    model: str
    """Folder or hub name."""
    name: str
    """What clients call the model, and Serve the application."""
    settings: ModelSettings | None = None
    """How its run validated it; None leaves the model's own defaults."""
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: int = 64
    """Requests at a time that a replica is to have; more start further replicas, fewer stop some."""
    num_cpus: float = 1
    """Ray CPUs of a replica."""
    num_gpus: float = 0
    """Ray GPUs of a replica: a part of one, one, or several for tensor parallelism."""
    kvcache_space_gb: int = 1
    """GiB of KV cache of an engine on CPUs."""
    dtype: str | None = None
    """Type to compute in; None takes the run's, or the model's own."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None takes the run's, or the model's own."""
    max_tokens: int | None = None
    """Most tokens of an answer where a request does not say; None takes the run's."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM, laid over the others."""


def engine_kwargs(serving: Serving) -> dict[str, Any]:
    """Arguments of vLLM's engine and server (`AsyncEngineArgs` and `FrontendArgs`), without the key."""
    settings = serving.settings
    arguments: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    length, answer = serving.max_model_len, serving.max_tokens
    if settings is not None:
        answer = answer or settings.max_response_length
        length = length or settings.max_prompt_length + answer
        arguments["dtype"] = settings.dtype
        arguments["enforce_eager"] = settings.enforce_eager
        defaults |= {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
        if settings.chat_template_kwargs:
            arguments["default_chat_template_kwargs"] = dict(settings.chat_template_kwargs)
    if serving.dtype:
        arguments["dtype"] = serving.dtype
    if length:
        arguments["max_model_len"] = length
    if answer:
        defaults["max_new_tokens"] = answer
    if defaults:
        arguments["override_generation_config"] = defaults
    if serving.trust_remote_code:
        arguments["trust_remote_code"] = True
    if serving.num_gpus > 1:
        arguments["tensor_parallel_size"] = int(serving.num_gpus)
    if not serving.num_gpus:
        # vLLM rewinds the generator of a request whose prompt takes two steps, which CPU generators refuse; so a step
        # has to hold any prompt.
        arguments["enable_chunked_prefill"] = False
        if length:
            arguments["max_num_batched_tokens"] = max(MIN_BATCHED_TOKENS, length)
    return arguments | serving.engine_kwargs


def llm_config(serving: Serving, api_key: str | None = None) -> "LLMConfig":
    """The configuration for `ray.serve.llm`.

    Args:
        serving: what is served.
        api_key: what requests have to carry; None takes any request.

    Raises:
        ValueError: an argument of the engine is unknown, or resources or replicas cannot be.
    """
    from ray.serve.llm import LLMConfig

    from pipeline.cluster import compute_threads

    if not 0 <= serving.min_replicas <= serving.max_replicas or serving.max_replicas < 1:
        raise ValueError(
            f"{serving.min_replicas} to {serving.max_replicas} replicas cannot be; give a minimum of at least 0 and a "
            "maximum of at least 1 and the minimum"
        )
    if serving.num_gpus > 1 and serving.num_gpus != int(serving.num_gpus):
        raise ValueError(f"{serving.num_gpus:g} GPUs a replica cannot be; give a part of one, or a whole number")
    arguments = engine_kwargs(serving) | ({"api_key": [api_key]} if api_key else {})
    env = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    if not serving.num_gpus:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(serving.kvcache_space_gb)
        env["OMP_NUM_THREADS"] = str(compute_threads(0, serving.num_cpus))
    bundle = {"CPU": serving.num_cpus}
    if serving.num_gpus:
        bundle["GPU"] = min(serving.num_gpus, 1)
    config = LLMConfig(
        model_loading_config={"model_id": serving.name, "model_source": serving.model},
        engine_kwargs=arguments,
        placement_group_config={"bundle_per_worker": bundle},
        runtime_env={"env_vars": env},
        # vLLM's numbers go to one place: to /metrics of the only replica, or labelled by replica to Ray's metrics.
        log_engine_metrics=serving.max_replicas > 1,
        deployment_config={
            "autoscaling_config": {
                "min_replicas": serving.min_replicas,
                "initial_replicas": max(serving.min_replicas, 1),
                "max_replicas": serving.max_replicas,
                "target_ongoing_requests": serving.target_ongoing_requests,
            },
            # The replica itself only waits; what the bundle has is the engine's.
            "ray_actor_options": {"num_cpus": 0},
        },
    )
    config.get_engine_config()
    return config


def application(config: "LLMConfig") -> "Application":
    """The application for Serve; Ray is running."""
    import ray
    from ray import serve
    from ray.serve.llm import build_llm_deployment
    from ray.serve.llm.deployment import LLMServer

    options = config.runtime_env or {}
    # The deployment's variables would replace those of this process's job.
    inherited = dict(ray.get_runtime_context().runtime_env.get("env_vars") or {})
    options["env_vars"] = inherited | options.get("env_vars", {})
    return build_llm_deployment(config, name_prefix="LLM:", deployment_cls=serve.ingress()(LLMServer))


def resources(serving: Serving) -> dict[str, float]:
    """Ray resources of one replica."""
    workers = max(int(serving.num_gpus), 1)
    return {"CPU": serving.num_cpus * workers, "GPU": serving.num_gpus}


def check_resources(serving: Serving, nodes: list[dict[str, float]]) -> None:
    """Refuse what would wait for ever.

    Raises:
        ValueError: the cluster as it is cannot hold the first replicas.
    """
    first = max(serving.min_replicas, 1)
    for name, needed in resources(serving).items():
        have = sum(node.get(name, 0.0) for node in nodes)
        if needed * first > have:
            raise ValueError(
                f"{first} replicas need {needed * first:g} {name}s, but Ray has {have:g}; lower --min-replicas, "
                f"--num-{name.lower()}s, or add nodes"
            )


def wait(name: str, timeout: float, waiting: Callable[[str], None]) -> None:
    """Wait until the application `name` runs.

    Args:
        name: the application.
        timeout: seconds.
        waiting: is told what is waited for, whenever that changes.

    Raises:
        RuntimeError: it cannot be started.
        TimeoutError: it does not run in time.
    """
    from ray import serve

    deadline, said = time.monotonic() + timeout, ""
    while True:
        found = serve.status().applications.get(name)
        status = found.status.value if found else "NOT_STARTED"
        told = "; ".join(each.message for each in found.deployments.values() if each.message) if found else ""
        if status == "RUNNING":
            return
        if found and status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise RuntimeError(f"the model {name} could not be started: {told or found.message}")
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the model {name} was not ready within {timeout:.0f} s (--start-timeout), Serve calls it {status}: "
                f"{told or 'it says nothing else'}"
            )
        if told != said:
            waiting(told)
            said = told
        time.sleep(POLL_S)
