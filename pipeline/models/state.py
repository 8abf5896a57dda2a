"""A model's state: all tensors that its checkpoint holds."""

from collections.abc import Iterator

from torch import Tensor, nn


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers with their names, module by module; a tied one once, under its first
    name.

    Buffers that are not persistent are left out: they follow from the configuration.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def is_weight(tensor: Tensor) -> bool:
    """Return True for a parameter, whose type may be converted; a buffer keeps its type."""
    return isinstance(tensor, nn.Parameter)
