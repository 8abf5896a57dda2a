"""A check that a model's attention function supports everything that the model's layers need.

A layer of `transformers` passes its attention function the arguments that its family needs: a cap on the scores (Gemma
2), sinks (gpt-oss), a bias. A function that does not know an argument silently ignores it, while the engine applies it.
So the function of `model.attn_implementation` is compared with the family's own code (`eager`), on the arguments that
the layers really pass.
"""

import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pipeline.models.one_layer import whole
from pipeline.models.repeatable import few_tokens

SCORES = (4.0, 40.0, 400.0)
"""Standard deviations of the attention scores in the trials. A cap has an effect if scores are about as large."""
TOLERANCE = 1e-3
"""Relative difference up to which two outputs in float32 count as equal but for rounding."""


@torch.no_grad()
def choose_attention(lm: Any) -> str | None:
    """Switch `lm` to attention `eager` if its attention function ignores an argument that matters.

    Returns a clause on the change for the user. None if the attention stays: it computes the same as `eager`, or the
    model does not run here.

    Args:
        lm: a model of `transformers`.
    """
    from transformers.modeling_utils import AttentionInterface

    name = getattr(lm.config.get_text_config(), "_attn_implementation", None)
    if name in (None, "eager"):
        return None
    found: list[str] = []
    seen: set[Any] = set()
    choose = AttentionInterface.get_interface

    def spy(interfaces: Any, chosen: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = choose(interfaces, chosen, default)

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
            given = tuple(sorted(option for option, own in options.items() if own is not None))
            kind = (type(module), given, mask is None, getattr(module, "layer_type", None))
            if kind not in seen and function is not default:
                seen.add(kind)
                if (left_out := _left_out(function, default, module, (query, key, value), mask, options)) is not None:
                    found.append(", ".join(left_out) or "something")
            return function(module, query, key, value, mask, **options)

        return attend

    try:
        tried = whole(lm.base_model)
        ids = few_tokens(tried, next(tried.parameters()).device)
        options = {"use_cache": False} if "use_cache" in inspect.signature(tried.forward).parameters else {}
        with patch.object(AttentionInterface, "get_interface", spy):
            tried(input_ids=ids, **options)
    except Exception:  # noqa: BLE001 (a model that does not run here is tried when it runs)
        return None
    if not found:
        return None
    lm.set_attn_implementation("eager")
    return f"attention {name!r} leaves out {found[0]}, so 'eager' computes it; that needs memory for all scores"


def _left_out(
    function: Callable[..., Any],
    default: Callable[..., Any],
    module: Any,
    states: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    options: dict[str, Any],
) -> list[str] | None:
    """Return names of arguments that `function` ignores and that change the result of `default`.

    None if the two functions agree; empty if they differ for another reason.

    Args:
        function: the attention function to check.
        default: the family's own (`eager`).
        module: the attention layer.
        states: query, key and value of the layer's call.
        mask: mask of the call; None for causal attention.
        options: further arguments of the call.
    """
    query, key, value = (part.float() for part in states)
    if "dropout" in options:
        options = options | {"dropout": 0.0}
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        ones = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
        allowed = ones.tril(keys - queries) if getattr(module, "is_causal", True) else ones
    else:
        allowed = mask
    if allowed.dtype == torch.bool:
        added = torch.zeros(allowed.shape, device=query.device).masked_fill(~allowed, -torch.inf)
    else:
        added = allowed.float()
    given = added if mask is not None and mask.dtype != torch.bool else mask
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    spread = float(scores.std()) * (options.get("scaling") or query.shape[-1] ** -0.5)
    for size in SCORES:
        strong = query * (size / max(spread, 1e-12))

        def expected(left_out: str = "", strong: Tensor = strong) -> Tensor:
            kept = {name: value for name, value in options.items() if name != left_out}
            return default(module, strong, key, value, added, **kept)[0]

        if _apart(function(module, strong, key, value, given, **options)[0], expected()):
            unknown = options.keys() - inspect.signature(function).parameters.keys()
            return sorted(name for name in unknown if _matters(name, expected))
    return None


def _matters(name: str, expected: Callable[..., Tensor]) -> bool:
    try:
        return _apart(expected(name), expected())
    except TypeError:  # it cannot be left out
        return True


def _apart(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() > TOLERANCE * theirs.abs().max().clamp(min=1e-12))
