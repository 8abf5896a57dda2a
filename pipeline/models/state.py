"""The state of a model: all tensors that a checkpoint of the model holds."""

from collections.abc import Iterator

from torch import Tensor, nn


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for all parameters and persistent buffers, module by module.

    A tied parameter comes once, under its first name. Buffers that are not persistent are left out: they are computed
    from the configuration.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def is_weight(tensor: Tensor) -> bool:
    """Return True for a parameter, False for a buffer. Only parameters are converted to another dtype."""
    return isinstance(tensor, nn.Parameter)
