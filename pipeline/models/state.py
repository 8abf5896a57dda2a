"""The state of a model: all tensors that a checkpoint of the model holds."""

from collections.abc import Collection, Iterator

from torch import Tensor, nn


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for all parameters and persistent buffers, module by module.

    A tied parameter comes once, under its first name. Buffers that are not persistent are left out: they are computed
    from the configuration. So are the weights that another stage of a pipeline has (`Pretrained.borrowed`).
    """
    seen: set[int] = set()
    elsewhere: Collection[str] = getattr(model, "borrowed", ())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and name not in elsewhere:
            seen.add(id(tensor))
            yield name, tensor


def is_weight(tensor: Tensor) -> bool:
    """Return True for a parameter, False for a buffer. Only parameters are converted to another dtype."""
    return isinstance(tensor, nn.Parameter)
