"""An engine's check of the first version that it loads: are all tensors published, and all read by vLLM's loader?

    not sent     a tensor that the model of `transformers` has and no train worker published
    not read     a tensor that was published and that vLLM's loader skipped
    left over    a parameter of the engine to which nothing was written

vLLM's loaders silently skip names that they do not know, and some list skipped weights as loaded. So the data is
followed: a tensor was read if values computed from it were written to memory. A buffer may be skipped if the model's
class computes it from the configuration, as in old models the frequencies of the rotary embedding.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.errors import FinalError, short_reason
from pipeline.models.state import is_weight, tensors
from pipeline.weights.checkpoint_names import as_in_checkpoint

SHOWN = 4
"""Most names of tensors in an error."""
REMEDY = "use a model of another family, or the versions of vLLM and transformers that requirements/ names"


@dataclass(frozen=True)
class Confirmation:
    """Findings of one worker of an engine; three empty sets if the version is complete."""

    unsent: set[str]
    """Names, in the model of `transformers`, of tensors that no train worker published."""
    unread: set[str]
    """Names, in a checkpoint, of published tensors that the loader did not read."""
    left: set[str]
    """Names, in the engine's model, of parameters to which nothing was written."""


def check(found: Sequence[Confirmation], family: str) -> None:
    """Raise FinalError if, by the findings of all workers of an engine, a version is not complete.

    With expert parallelism a worker reads only its own experts, so a tensor counts as read if any worker read it.

    Args:
        found: findings of each worker.
        family: name of the model, for the error.
    """
    lists = {
        "not published": set.union(*(worker.unsent for worker in found)),
        "published and not read by the engine": set.intersection(*(worker.unread for worker in found)),
        "parameters of the engine that received no weights": set.union(*(worker.left for worker in found)),
    }
    if parts := [f"{_some(names)}: {what}" for what, names in lists.items() if names]:
        raise FinalError(
            f"trainer and engine do not hold the same weights of {family}: {'; '.join(parts)}. The engine would not "
            f"compute with the policy that is trained; {REMEDY}"
        )


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


class Watch(TorchDispatchMode):
    """Follows tensors through the loader of a vLLM model, while its `with` block is active.

    Args:
        model: vLLM's model, prepared for loading.
        needed: names of the parameters with which the model computes. A model prepared for loading may have further
            ones, such as scales, that checkpoints may lack.
    """

    def __init__(self, model: Any, needed: Collection[str]) -> None:
        super().__init__()
        self._model = model
        self._made_of: dict[StorageWeakRef, set[str]] = {}
        """Storage to the names of the tensors from which its values may be computed. (A weak reference as the key keeps
        the storage's address from being used again.)"""
        self._written: set[StorageWeakRef] = set()
        held = ((name, parameter) for name, parameter in model.named_parameters() if name in needed)
        self._parameters = {name: StorageWeakRef(parameter.untyped_storage()) for name, parameter in held}
        self.unread: dict[str, Tensor] = {}
        """Name to tensor, for tensors that the loader got and has not read so far."""
        self.loading: str | None = None
        """Name of the tensor on which the loader works now."""

    def followed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights for the loader, as copies, since views of one storage could not be distinguished."""
        for name, tensor in weights:
            self.unread[name] = tensor = tensor.clone()
            self._made_of[StorageWeakRef(tensor.untyped_storage())] = {name}
            self.loading = name
            yield name, tensor
            self.loading = None

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the weights into the model with its `load_weights`, and follow them.

        Raises FinalError if the loader fails with a tensor.
        """
        try:
            with self:
                self._model.load_weights(self.followed(weights))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # loaders raise errors of many kinds for a name or a shape
            if self.loading is None:
                raise
            raise FinalError(
                f"vLLM's {type(self._model).__name__} cannot load {self.loading} as it is trained "
                f"({short_reason(error)}); {REMEDY}"
            ) from error

    def confirmation(self, lm: Any, sent: set[str]) -> Confirmation:
        """Return the findings on the version that was loaded.

        Args:
            lm: the model of `transformers` of the same class (`checkpoint_names.skeleton`).
            sent: names of the published tensors.
        """
        known = dict(tensors(lm))
        computed = dict(as_in_checkpoint(lm, ((name, t) for name, t in known.items() if not is_weight(t))))
        unread = {
            name
            for name, tensor in self.unread.items()
            if name not in computed or not torch.equal(computed[name].to(tensor), tensor)
        }
        left = {name for name, storage in self._parameters.items() if storage not in self._written}
        return Confirmation(known.keys() - sent, unread, left)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        names = set[str]().union(*(self._made_of.get(ref, ()) for ref in _storages((args, kwargs))))
        if not names:
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            self._read(names)
        changed = [
            value
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in (args[place : place + 1] or [(kwargs or {}).get(argument.name)])
        ]
        self._written.update(_storages(changed))
        if any(isinstance(value, Tensor) and not value.is_meta for value in tree_leaves(changed)):
            self._read(names)
        for ref in _storages((result, changed)):
            self._made_of.setdefault(ref, set()).update(names)
        return result

    def _read(self, names: set[str]) -> None:
        for name in names:
            self.unread.pop(name, None)


def _storages(values: Any) -> list[StorageWeakRef]:
    """Return weak references to the storages of all tensors in nested `values`."""
    found = (value for value in tree_leaves(values) if isinstance(value, Tensor) and value.layout == torch.strided)
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in found]
