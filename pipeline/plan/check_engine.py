"""Check that the chosen engine (`rollout.name`) can do what the settings require."""

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import Config
from pipeline.config.bounds import sentences
from pipeline.config.engines import FACTS
from pipeline.derived import uses_images
from pipeline.errors import nearest
from pipeline.models.architecture import ROUTERS
from pipeline.plan.engine_arguments import engine_arguments
from pipeline.plan.models import read_model

SGLANG = "0.5.23"
"""Tested version of SGLang, whose interface for weights changes often."""


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence for each setting that the engine cannot do."""
    rollout = config.rollout
    if rollout.name not in FACTS:  # outside its bounds, which are checked elsewhere
        return
    facts = rollout.facts
    package = facts.package
    missing = package is not None and importlib.util.find_spec(package) is None
    others = ", ".join(name for name, other in FACTS.items() if not other.package and name != "sglang")
    instead = f", or set rollout.name={others}" * bool(others)
    readers = " or ".join(name for name, other in FACTS.items() if other.images)
    restricted = [f"{{rollout.{name}}}" for name, used in rollout.restrictions().items() if used]
    seeds = facts.seeds or bool(facts.seeds_with and rollout.engine_kwargs.get(facts.seeds_with))
    table: dict[str, object] = {
        f"{{rollout.name}} needs the package {package}, which is not installed here; install it{instead}": missing,
        "{rollout.seed_per_request} and {rollout.name}: this engine ignores the seeds of requests; set "
        "seed_per_request=false": rollout.seed_per_request and not seeds,
        f"{' and '.join(restricted)} with {{rollout.name}}: this engine does not return the tokens that it samples "
        "from, so the trainer could not compute its log-probs; sample from all tokens (top_p=1 top_k=-1 min_p=0 "
        "min_tokens=0)": restricted and not facts.supports,
        "{rollout.sleep} and {rollout.name}: this engine cannot free its memory while it is idle; set sleep=false": (
            rollout.sleep and not facts.sleep
        ),
        "{rollout.tensor_parallel_size} and {rollout.name}: this engine does not split a model over GPUs; set "
        "tensor_parallel_size=1": rollout.tensor_parallel_size > 1 and not facts.tensor_parallel,
        "{model.lora.weight_sync} and {rollout.name}: this engine takes no adapter without the base model; set "
        "weight_sync=merged": config.model.lora.alone and not facts.adapters,
        f"{{model.vision}} and {{rollout.name}}: this engine cannot read images; set rollout.name={readers}": (
            uses_images(config) and not facts.images
        ),
    }
    yield from sentences(config, table)
    if rollout.replay_routes:
        yield from _routes(config)
    if rollout.name == "sglang":
        yield from _sglang(config)
    yield from _arguments(rollout.name, list(rollout.engine_kwargs), facts.arguments)


def _routes(config: Config) -> Iterator[str]:
    """Yield sentences on `rollout.replay_routes`: the engine, and the family of the model."""
    rollout, path = config.rollout, config.model.path
    engines = " or ".join(name for name, facts in FACTS.items() if facts.routes)
    vllm = rollout.name == "vllm"
    model = read_model(path)
    kind = model and model.config.get("model_type")
    dense = model and (model.config.get("mlp_only_layers") or model.config.get("decoder_sparse_step", 1) > 1)
    table: dict[str, object] = {
        "{rollout.replay_routes} and {rollout.name}: this engine does not return the experts of tokens; set "
        f"replay_routes=false or rollout.name={engines}": not rollout.facts.routes,
        "{rollout.replay_routes} and {rollout.num_gpus}: vLLM returns the experts of tokens on GPUs only; set "
        "replay_routes=false or rollout.name=hf": vllm and rollout.num_gpus == 0,
        "{rollout.replay_routes} and {rollout.enable_prefix_caching}: vLLM keeps experts with the prefixes; set "
        "enable_prefix_caching=true": vllm and not rollout.enable_prefix_caching,
        f"{{rollout.replay_routes}} and {{rollout.name}}: some layers of model.path={path} have no experts, which was "
        "not tried with vLLM; set replay_routes=false or rollout.name=hf": vllm and dense,
        f"{{rollout.replay_routes}}: the routers of model.path={path}, a {kind}, cannot be replayed; set "
        f"replay_routes=false, or take one of {', '.join(ROUTERS.values())}": model and kind not in ROUTERS.values(),
    }
    yield from sentences(config, table)


def _sglang(config: Config) -> Iterator[str]:
    """Yield sentences on SGLang's environment, and on its deterministic mode."""
    rollout = config.rollout
    python = rollout.sglang_python
    problem = environment_problem(python)
    table: dict[str, object] = {
        "rollout.engine_kwargs.enable_deterministic_inference=true is a mode of SGLang's kernels for GPUs; leave it "
        "out on CPUs ({rollout.num_gpus}), and set rollout.seed_per_request=false": (
            rollout.engine_kwargs.get("enable_deterministic_inference") and rollout.num_gpus == 0
        ),
        f"rollout.engine_python={python} {problem}": problem,
    }
    yield from sentences(config, table)


def environment_problem(python: str) -> str:
    """Return the problem with an interpreter of SGLang's environment as text; "" if it has the tested version."""
    remedy = "make the environment with `make sglang-env`, or name the interpreter of yours"
    if not Path(python).is_file():
        return f"is not a file; SGLang needs an environment of its own: {remedy}"
    ask = "from importlib.metadata import version; print(version('sglang'))"
    try:
        found = subprocess.run([python, "-P", "-c", ask], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({error}); {remedy}"
    if found.returncode:
        return f"has no package sglang; {remedy}"
    version = found.stdout.strip()
    return "" if version == SGLANG else f"has sglang {version}, but only {SGLANG} was tested; {remedy}"


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
