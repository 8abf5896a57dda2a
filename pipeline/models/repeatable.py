"""Switches off randomness in training (dropout, dropped layers, jitter), and checks that a model has none left.

Engines generate in evaluation mode, without dropout. With dropout in the trainer, the ratio of two log-probs of a token
would measure chance.

1. Model families have different names for random parts. Each number with "drop" or "jitter" in its name is set to 0, in
   modules, and in configurations, which some modules read in each pass. A saved model keeps the original numbers. If
   such a number also changes the result in evaluation mode, the mode in which engines compute, the model is refused.
2. Remaining randomness is found by its effect: two passes in training mode over the same tokens, with different seeds,
   may differ no more than two passes in evaluation mode with one seed. (On CPUs the latter are equal.) If a model draws
   random numbers, more passes are made: a layer that is seldom dropped may be present in both of the first two.
"""

import inspect
import itertools
import pickle
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

RANDOM = re.compile("drop|jitter")
"""Pattern in the names of numbers that make a pass random."""
ROWS, TOKENS = 2, 8
"""Number of rows, and of tokens per row, in a trial pass."""
MORE = 14
"""Number of additional trial passes for a model that draws random numbers."""
KEPT = 256
"""About the number of entries of a tensor that are compared."""
NOISE = 4.0
"""Ratio of differences up to which the rounding of a GPU's kernels explains the larger one."""
OWN = "own_randomness"
"""Attribute of a model: the numbers that were set to 0, as a list of (module or configuration, name, original)."""

Calls = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]
"""(module name, number of the call) to samples of the call's inputs and outputs, in the order in which calls ended."""


def without_dropout(lm: Any) -> None:
    """Switch off all randomness of a model of `transformers` in training mode.

    Raises ValueError if the model is still random. This is not checked here if this process has only slices of the
    weights, or the model cannot run here (kernels for GPUs only): the learner checks it later (`check_repeatable`).
    """
    found = [getattr(part, "config", None) for part in lm.modules()]
    found += [inner for config in found if hasattr(config, "to_dict") for inner in vars(config).values()]
    configs = {id(config): config for config in found if hasattr(config, "to_dict")}
    own = getattr(lm, OWN, [])
    for holder in (*lm.modules(), *configs.values()):
        for name, value in [*vars(holder).items()]:
            named = RANDOM.search(name) or (name == "p" and isinstance(holder, nn.modules.dropout._DropoutNd))
            if named and isinstance(value, float) and value:
                own = [*own, (holder, name, value)]
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
    """Restore, within the block, the original numbers in `lm` and its configurations that `without_dropout` set to
    0."""
    own = getattr(lm, OWN, [])
    for holder, name, value in own:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, _ in own:
            setattr(holder, name, 0.0)


def few_tokens(lm: Any, device: torch.device) -> Tensor:
    """[ROWS, TOKENS] int64 on `device`, token ids for a trial pass of `lm`; none is the pad token."""
    config = lm.config.get_text_config()
    # The padding's embedding may be 0, and experts that are equally good for it are drawn.
    known = (
        number
        for number in itertools.cycle(range(config.vocab_size))
        if number != getattr(config, "pad_token_id", None)
    )
    return torch.tensor([*itertools.islice(known, ROWS * TOKENS)], device=device).view(ROWS, TOKENS)


def check_repeatable(model: Any, device: torch.device) -> None:
    """Check, before training, that a model gives the same numbers in each pass over the same tokens; a collective.

    Args:
        model: sharded as it trains, with a method `try_pass(device)`.
        device: this rank's device.

    Raises ValueError if the model is random; the sentence names the model and the first random module.
    """
    if problem := _why_random(model, device, lambda: model.try_pass(device), together=True):
        raise ValueError(problem)


@torch.no_grad()
def _why_random(model: nn.Module, device: torch.device, run: Callable[[], Any], together: bool = False) -> str | None:
    """Return a sentence on why a model cannot be trained because it is random; None if it is not random.

    Args:
        model: the model.
        device: this rank's device.
        run: runs a forward pass.
        together: whether all ranks call this together; then it is a collective.
    """
    lm: Any = getattr(model, "lm", None) or getattr(model, "decoder", model)
    path, own = getattr(lm.config, "_name_or_path", ""), getattr(lm, OWN, [])
    name = f"{type(lm).__name__}{f' of {path}' if path else ''}"
    parts = dict(model.named_modules())
    modes = {name: part.training for name, part in parts.items()}
    noise = 0.0
    try:
        model.eval()
        if own or device.type != "cpu":
            first, _ = _calls(parts, device, run, seed=0)
        if device.type != "cpu":
            noise = NOISE * max(_distances(first, _calls(parts, device, run, seed=0)[0]).values(), default=0.0)
        if own:
            with own_randomness(lm):
                theirs, _ = _calls(parts, device, run, seed=0)
            if _apart(first, theirs, noise) is not None:
                numbers = ", ".join(dict.fromkeys(f"{name}={value}" for _, name, value in own))
                return (
                    f"{name} computes something else, in evaluation too, if what is random in training is switched "
                    f"off ({numbers} set to 0), so trainer and engine would differ; use another model."
                )
        model.train()
        one, drew = _calls(parts, device, run, seed=1)
        if together and dist.is_initialized():
            any_drew = torch.tensor(int(drew), device=device)
            dist.all_reduce(any_drew, dist.ReduceOp.MAX)
            drew = bool(any_drew)
        for seed in range(2, 3 + MORE * drew):
            other, _ = _calls(parts, device, run, seed)
            if (place := _apart(one, other, noise)) is not None:
                break
        else:
            return None
    finally:
        for part_name, part in parts.items():
            part.training = modes[part_name]
            if isinstance(part, FSDPModule):
                part.reshard()
    where = f", first in {place}, a {type(parts[place]).__name__}" if place else ""
    return (
        f"{name} is random in training: two passes over the same tokens differ{where}, although all of its numbers "
        "whose name speaks of drop or jitter were set to 0. The ratio of two log-probs would measure chance; use "
        "another model."
    )


def _apart(one: Calls, other: Calls, noise: float) -> str | None:
    """Find the innermost module that got equal inputs in both passes and gave different outputs.

    Returns the module's name, "" if no single module can be named, or None if the passes are equal.

    Args:
        one, other: the recorded calls of the two passes.
        noise: relative difference up to which two tensors count as equal.
    """
    apart = [call for call, distance in _distances(one, other).items() if distance > noise]
    if not apart and one.keys() == other.keys():
        return None
    # The innermost module ends first.
    return next((call[0] for call in apart if _distance(one[call][0], other[call][0]) <= noise), "")


def _calls(parts: dict[str, nn.Module], device: torch.device, run: Callable[[], Any], seed: int) -> tuple[Calls, bool]:
    """Record inputs and outputs of modules in a forward pass.

    Args:
        parts: name to module, the modules to record.
        device: device of the pass.
        run: runs the pass.
        seed: seed of the random generators at the beginning.

    Returns:
        the calls, and whether the pass drew random numbers.
    """
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
            began = _generators(device)
            run()
            drew = _generators(device) != began
    finally:
        for hook in hooks:
            hook.remove()
    return calls, drew


def _generators(device: torch.device) -> list[bytes]:
    """Return the states of all random generators (torch, CUDA, numpy, Python) from which a model may draw."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [*(state.numpy().tobytes() for state in states), pickle.dumps([random.getstate(), np.random.get_state()])]


def _sample(values: Any) -> list[Tensor]:
    """Return a copy of about `KEPT` entries of each floating-point tensor in nested `values`, as float32."""
    samples = []
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.is_floating_point():
            flat = (value.to_local() if isinstance(value, DTensor) else value).detach().flatten()
            # A copy: a module may change its input in place.
            samples.append(flat[:: max(1, len(flat) // KEPT)].float().nan_to_num().clone())
    return samples


def _distances(one: Calls, other: Calls) -> dict[tuple[str, int], float]:
    """Return `_distance` of the outputs, for each call that occurs in both passes."""
    return {call: _distance(one[call][1], other[call][1]) for call in one if call in other}


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest absolute difference of two tensors, relative to the largest absolute entry of the tensor.

    The result is the maximum over pairs of tensors; infinite if shapes differ.
    """
    if [part.shape for part in one] != [part.shape for part in other]:
        return float("inf")
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if len(a) and not torch.equal(a, b)]
    return max((float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs), default=0.0)
