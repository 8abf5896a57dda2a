"""Randomness in training: dropout, dropped layers, jitter. It is switched off, and two passes show that it is.

Engines generate with the model as it is in evaluation. If the trainer drew another one in each pass, the ratio of two
log-probs of a token would measure chance.

1. Every family has its own names for what is random. A number whose name speaks of dropping or of jitter becomes 0, in
   modules and in configurations, which some modules read in each pass. A saved model keeps its own numbers.
2. What is left is found by its effect: two passes in training mode over the same tokens, with different seeds, may
   differ by no more than two passes in evaluation mode with one seed do. On CPUs these are equal.
"""

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

RANDOM = re.compile("drop|jitter")
"""In the names of numbers that make a pass random."""
ROWS, TOKENS = 2, 8
"""Size of a pass that is tried."""
KEPT = 256
"""Numbers of a tensor that are compared."""
NOISE = 4.0
"""By which factor two pairs of passes may differ in the rounding of a GPU's kernels."""
OWN = "own_randomness"
"""Attribute of a model: the numbers of its configurations that were set to 0, as (configuration, name, number)."""

Calls = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]
"""What modules read and gave, by their name and the number of the call, in the order in which the calls ended."""


def without_dropout(lm: Any) -> None:
    """Switch off what is random in training in a model of `transformers`.

    Raises ValueError if the model is still random. If this process has only slices of it, or its kernels run on GPUs
    alone, it is tried by its learner (`check_repeatable`).
    """
    found = [getattr(part, "config", None) for part in lm.modules()]
    found += [inner for config in found if hasattr(config, "to_dict") for inner in vars(config).values()]
    configs = {id(config): config for config in found if hasattr(config, "to_dict")}
    own = getattr(lm, OWN, [])
    for holder in (*lm.modules(), *configs.values()):
        for name, value in [*vars(holder).items()]:
            named = RANDOM.search(name) or (name == "p" and isinstance(holder, nn.modules.dropout._DropoutNd))
            if named and isinstance(value, float) and value:
                own = [*own, (holder, name, value)] if id(holder) in configs else own
                setattr(holder, name, 0.0)
    setattr(lm, OWN, own)
    if any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in lm.parameters()):
        return
    device = next(lm.parameters()).device
    options = {"use_cache": False} if "use_cache" in inspect.signature(lm.forward).parameters else {}
    try:
        ids = few_tokens(lm, device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
        problem = _why_random(lm, device, lambda: lm(**inputs))
    except Exception:  # noqa: BLE001 (a model that does not run here is tried by its learner)
        return
    if problem:
        raise ValueError(problem)


@contextmanager
def own_randomness(lm: Any) -> Iterator[None]:
    """Inside, the configurations of `lm` have the numbers that `without_dropout` has set to 0."""
    own = getattr(lm, OWN, [])
    for config, name, value in own:
        setattr(config, name, value)
    try:
        yield
    finally:
        for config, name, _ in own:
            setattr(config, name, 0.0)


def few_tokens(lm: Any, device: torch.device) -> Tensor:
    """Token ids [ROWS, TOKENS] int64 for a pass of `lm`."""
    config = lm.config.get_text_config()
    # The padding's embedding may be 0, and experts that are equally good for it are drawn.
    known = (
        number
        for number in itertools.cycle(range(config.vocab_size))
        if number != getattr(config, "pad_token_id", None)
    )
    return torch.tensor([*itertools.islice(known, ROWS * TOKENS)], device=device).view(ROWS, TOKENS)


def check_repeatable(model: Any, device: torch.device) -> None:
    """Refuse a model that is random in training, in the form in which it trains; a collective.

    Args:
        model: with a method `try_pass`.
        device: this rank's device.

    Raises ValueError, which names the model and the first module that gives other numbers each time.
    """
    if problem := _why_random(model, device, lambda: model.try_pass(device)):
        raise ValueError(problem)


@torch.no_grad()
def _why_random(model: nn.Module, device: torch.device, run: Callable[[], Any]) -> str | None:
    """A sentence on a model that is random in training; None if it is not."""
    parts = dict(model.named_modules())
    modes = {name: part.training for name, part in parts.items()}
    try:
        noise = 0.0
        if device.type != "cpu":
            model.eval()
            first, second = (_calls(parts, device, run, seed=0) for _ in range(2))
            noise = NOISE * max(_distances(first, second).values(), default=0.0)
        model.train()
        one, other = (_calls(parts, device, run, seed) for seed in (1, 2))
    finally:
        for name, part in parts.items():
            part.training = modes[name]
            if isinstance(part, FSDPModule):
                part.reshard()
    apart = [call for call, distance in _distances(one, other).items() if distance > noise]
    if not apart and one.keys() == other.keys():
        return None
    # A module that read the same and gave something else; the innermost one ends first.
    place = next((call[0] for call in apart if _distance(one[call][0], other[call][0]) <= noise), "")
    lm: Any = getattr(model, "lm", None) or getattr(model, "decoder", model)
    where = f", first in {place}, a {type(parts[place]).__name__}" if place else ""
    path = getattr(lm.config, "_name_or_path", "")
    return (
        f"{type(lm).__name__}{f' of {path}' if path else ''} is random in training: two passes over the same tokens "
        f"differ{where}, although all of its numbers whose name speaks of drop or jitter were set to 0. The ratio of "
        "two log-probs would measure chance; use another model."
    )


def _calls(parts: dict[str, nn.Module], device: torch.device, run: Callable[[], Any], seed: int) -> Calls:
    """What the modules read and gave in a pass that begins with `seed`."""
    calls: Calls = {}
    numbers: Counter[str] = Counter()
    reading: list[list[Tensor]] = []
    hooks = []
    for name, part in parts.items():

        def before(_: Any, args: Any, kwargs: Any) -> None:
            reading.append(_sample((args, kwargs)))

        def after(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            calls[name, numbers[name]] = reading.pop(), _sample(output)
            numbers[name] += 1

        hooks += [
            part.register_forward_pre_hook(before, with_kwargs=True),
            part.register_forward_hook(after, with_kwargs=True),
        ]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _sample(values: Any) -> list[Tensor]:
    """Some numbers of each tensor in nested values."""
    samples = []
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.is_floating_point():
            flat = (value.to_local() if isinstance(value, DTensor) else value).detach().flatten()
            # A copy: a module may change its input in place.
            samples.append(flat[:: max(1, len(flat) // KEPT)].float().nan_to_num().clone())
    return samples


def _distances(one: Calls, other: Calls) -> dict[tuple[str, int], float]:
    """How far the outputs of the calls that both passes have are apart."""
    return {call: _distance(one[call][1], other[call][1]) for call in one if call in other}


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference of two numbers, relative to the largest number of their tensor."""
    if [part.shape for part in one] != [part.shape for part in other]:
        return float("inf")
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if len(a) and not torch.equal(a, b)]
    return max((float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs), default=0.0)
