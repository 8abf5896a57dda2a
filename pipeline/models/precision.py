"""dtypes by name, and forward passes in another dtype without a second copy of the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pipeline.upstream.torch import uncast_inputs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str, key: str) -> torch.dtype:
    """Return the torch dtype for a name in `DTYPES`.

    Args:
        name: such as `bfloat16`.
        key: configuration key that has this value, for the error.

    Raises ValueError if `name` is not in `DTYPES`.
    """
    if name not in DTYPES:
        raise ValueError(f"{key}={name} is not a known type; use one of {', '.join(DTYPES)}.")
    return DTYPES[name]


@contextmanager
def computing_in(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let forward passes of `module` compute in `dtype` within the block, as if its weights had this dtype.

    Inputs and weights of each submodule are converted to `dtype` while the submodule runs. So this also works for
    weights that FSDP gathers, and only one submodule's weights are in memory twice at a time. The weights of a language
    model's head, which `Policy` reads outside of the head's module, have `dtype` during the whole pass.
    """
    head = getattr(getattr(module, "lm", None), "get_output_embeddings", lambda: None)()
    owners: dict[nn.Module, list[nn.Module]] = {
        part: [part] for part in module.modules() if part is not head and any(True for _ in _floats(part))
    }
    if head is not None:
        owners.setdefault(module, []).append(head)
    kept: dict[nn.Module, dict[str, Any]] = {}

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def before(part: nn.Module, args: Any, kwargs: Any) -> Any:
        for owner in owners[part]:
            kept[owner] = dict(owner._parameters)
            owner._parameters.update({name: cast(weight) for name, weight in _floats(owner)})
        return tree_map(cast, args), tree_map(cast, kwargs)

    def after(part: nn.Module, *_: Any) -> None:
        for owner in owners[part]:
            owner._parameters.update(kept.pop(owner))

    hooks: list[Any] = []
    for part in owners:
        hooks.append(part.register_forward_pre_hook(before, with_kwargs=True))
        # FSDP's own hook, which frees the gathered weights, comes after.
        hooks.append(part.register_forward_hook(after, prepend=True, always_call=True))
    try:
        # Otherwise FSDP would cast the inputs of its parts.
        with uncast_inputs(module):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _floats(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, parameter) for the floating-point parameters of `part` itself, without its submodules."""
    for name, weight in part._parameters.items():
        if weight is not None and weight.is_floating_point():
            yield name, weight
