"""Facts about the rollout engines (`rollout.name`), readable without building one.

The checks of a run read them, and refuse by name each setting that the chosen engine cannot do.
`tests/rollout/engines/` has a case for each fact that is claimed.
"""

from dataclasses import dataclass

SGLANG_PYTHON = ".venv-sglang/bin/python"
"""Interpreter of SGLang's environment if `rollout.engine_python` is null, relative to the folder of the command."""


@dataclass(frozen=True)
class EngineFacts:
    """Abilities of one engine."""

    package: str | None
    """Name under which the engine's own package is imported; None if it needs no package of its own."""
    seeds: bool
    """A request may have its own seed, and its response then does not depend on the other requests."""
    supports: bool
    """With top-p, top-k, min-p and min_tokens, log-probs are renormalised over the tokens that are left, and the engine
    returns these tokens."""
    routes: bool
    """The engine returns the experts of each token in a mixture of experts (`rollout.replay_routes`)."""
    sleep: bool
    """The engine can free its GPU memory while it is idle."""
    adapters: bool
    """The engine can load an adapter without the base model."""
    tensor_parallel: bool
    """The engine can split a model over several GPUs."""
    quantised: bool
    """The engine can read models with quantised weights."""
    images: bool
    """The engine can read images in prompts (`model.vision`)."""
    own_models: bool
    """The engine has code of its own for models, also of families that `transformers` cannot load."""
    arguments: tuple[str, ...] | None
    """Names allowed in `rollout.engine_kwargs`; None for the fields of vLLM's `EngineArgs`."""
    seeds_with: str | None = None
    """Name of the argument in `rollout.engine_kwargs` with which an engine without `seeds` uses them."""


SGLANG_ARGUMENTS = (
    "attention_backend",
    "chunked_prefill_size",
    "disable_overlap_schedule",
    "enable_deterministic_inference",
    "load_format",
    "log_level",
    "max_total_tokens",
    "mem_fraction_static",
    "sampling_backend",
    "schedule_conservativeness",
    "schedule_policy",
    "watchdog_timeout",
)
"""Arguments of SGLang's server that `rollout.engine_kwargs` may hold."""

FACTS = {
    "vllm": EngineFacts(
        package="vllm",
        seeds=True,
        supports=True,
        routes=True,
        sleep=True,
        adapters=True,
        tensor_parallel=True,
        quantised=True,
        images=True,
        own_models=True,
        arguments=None,
    ),
    "hf": EngineFacts(
        package=None,
        seeds=True,
        supports=True,
        routes=True,
        sleep=False,
        adapters=False,
        tensor_parallel=False,
        quantised=False,
        images=True,
        own_models=False,
        arguments=("use_cache",),
    ),
    "sglang": EngineFacts(
        # Its package lies in another environment (`rollout.engine_python`).
        package=None,
        seeds=False,
        seeds_with="enable_deterministic_inference",
        supports=False,
        routes=False,
        sleep=False,
        adapters=False,
        tensor_parallel=False,
        quantised=False,
        images=False,
        own_models=True,
        arguments=SGLANG_ARGUMENTS,
    ),
}
"""The facts by name of the engine."""
