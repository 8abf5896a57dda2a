"""Check that the chosen engine (`rollout.name`) can do what the settings require."""

import importlib.util
from collections.abc import Iterator

from pipeline.config import Config
from pipeline.config.bounds import sentences
from pipeline.config.engines import FACTS
from pipeline.errors import nearest
from pipeline.plan.engine_arguments import engine_arguments


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence for each setting that the engine cannot do."""
    rollout = config.rollout
    if rollout.name not in FACTS:  # outside its bounds, which are checked elsewhere
        return
    facts = rollout.facts
    built = ", ".join(name for name, other in FACTS.items() if other.built)
    if not facts.built:
        yield from sentences(config, {f"{{rollout.name}} is not built in this version; use one of {built}": True})
        return
    package = facts.package
    missing = package is not None and importlib.util.find_spec(package) is None
    others = ", ".join(name for name, other in FACTS.items() if other.built and not other.package)
    instead = f", or set rollout.name={others}" * bool(others)
    truncated = rollout.top_p < 1 or rollout.top_k > 0
    table: dict[str, object] = {
        f"{{rollout.name}} needs the package {package}, which is not installed here; install it{instead}": missing,
        "{rollout.seed_per_request} and {rollout.name}: this engine ignores the seeds of requests; set "
        "seed_per_request=false": rollout.seed_per_request and not facts.seeds,
        "{rollout.top_p} and {rollout.top_k} with {rollout.name}: this engine returns log-probs over the whole "
        "vocabulary, not over the tokens that it samples from; set top_p=1 and top_k=-1": (
            truncated and not facts.truncated_log_probs
        ),
        "{rollout.sleep} and {rollout.name}: this engine cannot free its memory while it is idle; set sleep=false": (
            rollout.sleep and not facts.sleep
        ),
        "{rollout.tensor_parallel_size} and {rollout.name}: this engine does not split a model over GPUs; set "
        "tensor_parallel_size=1": rollout.tensor_parallel_size > 1 and not facts.tensor_parallel,
        "{model.lora.weight_sync} and {rollout.name}: this engine takes no adapter without the base model; set "
        "weight_sync=merged": config.model.lora.alone and not facts.adapters,
    }
    yield from sentences(config, table)
    yield from _arguments(rollout.name, list(rollout.engine_kwargs), facts.arguments)


def _arguments(engine: str, names: list[str], known: tuple[str, ...] | None) -> Iterator[str]:
    """Yield one sentence for each name in `rollout.engine_kwargs` that the engine does not know."""
    whose = f"the engine {engine}"
    if known is None and names:
        known, whose = engine_arguments(), "vLLM's EngineArgs"
        if not known:  # vLLM is not installed here
            return
    for name in names:
        if name not in (known or ()):
            remedy = "leave it out, or write the name of one" if known else "leave it out"
            yield f"rollout.engine_kwargs.{name} is not an argument of {whose}{nearest(name, known or ())}; {remedy}"
