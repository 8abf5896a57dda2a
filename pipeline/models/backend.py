"""The passes of micro-batches through a model, and the steps of its optimiser: the part that a way of training decides.

A learner hands over the whole list of micro-batches of a step, and computes losses and metrics itself. So another way
may order the passes in its own manner, compute a part of the layers on each rank, or hold the gradients elsewhere.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.models.fsdp import clip_grad_norm
from pipeline.models.packing import MicroBatch
from pipeline.models.precision import computing_in

Result = TypeVar("Result")


@dataclass(frozen=True)
class MicroBatches(Sequence[Any]):
    """The micro-batches of some rows; each is built when it passes."""

    packs: Sequence[list[list[int]]]
    """The packs of each micro-batch, lists of context numbers."""
    build: Callable[[list[list[int]]], Any]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, number: Any) -> Any:
        return self.build(self.packs[number])


class FsdpBackend:
    """Passes of a model that FSDP shards. Every rank has all layers, and micro-batches pass one after the other.

    Args:
        module: the sharded model.
        optimizer: its optimiser; None for a frozen model.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        self._module: Any = module
        self._optimizer: Any = optimizer

    def run(
        self,
        batches: Sequence[MicroBatch],
        forward: Callable[..., Any],
        loss: Callable[[MicroBatch, Any], tuple[Tensor, Result]],
    ) -> list[Result | None]:
        """Run the forward and backward pass of each micro-batch, and add up the gradients; a collective.

        Args:
            batches: the micro-batches, as many on every rank.
            forward: passes a micro-batch through the model.
            loss: computes the loss of a micro-batch from the model's output, and a result.

        Returns:
            the result of each micro-batch; None if another rank computes it.
        """
        results: list[Result | None] = []
        for batch in batches:
            value, result = loss(batch, forward(batch))
            value.backward()
            results.append(result)
        return results

    def predict(self, batches: Sequence[MicroBatch], forward: Callable[..., Any]) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield each micro-batch with the model's output; a collective. Arguments are as in `run`."""
        for batch in batches:
            yield batch, forward(batch)

    def computing_in(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Return a context in which passes compute in `dtype`; see `precision.computing_in`."""
        return computing_in(self._module, dtype)

    def zero(self) -> None:
        """Clear the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the gradients by `factor`."""
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clip(self, max_norm: float) -> float:
        """Scale the gradients down to a norm of at most `max_norm`; a collective. See `clip_grad_norm`."""
        return clip_grad_norm(self._module.parameters(), max_norm)

    def step(self) -> None:
        """Take an optimiser step."""
        self._optimizer.step()
