"""A model's state: all tensors that its checkpoint holds."""

from collections.abc import Iterator

from torch import Tensor, nn


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers with their names, module by module; a tied one once, under its first name.

    A buffer that is not persistent follows from the configuration.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, which may have another type elsewhere; a buffer keeps its own."""
    return isinstance(tensor, nn.Parameter)
