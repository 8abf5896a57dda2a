"""Passes of micro-batches through the stages of a pipeline: one forward, one backward (Narayanan et al. 2019).

    stage 0   F0 F1 F2 B0 F3 B1 ...          Stage s of S runs S - s - 1 forward passes ahead, and keeps the
    stage 1      F0 F1 B0 F2 B1 ...          activations of at most S - s micro-batches.
    stage 2         F0 B0 F1 B1 ...

All ranks of a pipeline have the same micro-batches, so each knows the shapes of what it receives. Micro-batches may
have different lengths, which the schedules of torch do not allow. Only the last stage computes losses.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pipeline.models.backend import FsdpBackend, Result
from pipeline.models.fsdp import clip_grad_norm
from pipeline.models.head import HeadOutput
from pipeline.models.mesh import Mesh, PipelineStage
from pipeline.models.packing import MicroBatch

AHEAD, BACK = 1, -1
"""The stage after this one, and the stage before."""
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of hidden states, by their number in a message."""


class StagedBackend(FsdpBackend):
    """Passes of one stage of a model. Every call is a collective of all ranks, as is the creation.

    Args:
        module: the sharded stage, a `Policy`.
        optimizer: its optimiser; None for a frozen model.
        mesh: the ranks of the stage.
        device: this rank's device.
        keeps_weights: whether weights stay gathered between passes (`fsdp.reshard_after_forward=false`). Then gradients
            are summed over ranks once for all micro-batches of a call, unless there is tensor parallelism.

    Raises ValueError if the head is tied to the embedding in only one of the stages.
    """

    def __init__(
        self, module: Any, optimizer: Optimizer | None, mesh: Mesh, device: torch.device, keeps_weights: bool
    ) -> None:
        super().__init__(module, optimizer)
        assert mesh.stage.group is not None
        self._stage, self._group, self._device = mesh.stage, mesh.stage.group, device
        # In each backward pass the plan of a module such as `q_norm` sums all that `grad` holds over the tensor group.
        self._sums_once = keeps_weights and mesh.tensor is None
        self._width = int(module.decoder.config.get_text_config().hidden_size)
        self._types: dict[int, torch.dtype] = {}
        """Type of the hidden states to and from a neighbour in the current call."""
        self._tied = self._tied_weight()
        self.sent = 0
        """Number of bytes of hidden states, and of gradients of these, that this rank has sent."""

    def run(
        self,
        batches: Sequence[MicroBatch],
        forward: Callable[..., Any],
        loss: Callable[[MicroBatch, Any], tuple[Tensor, Result]],
    ) -> list[Result | None]:
        """Run the forward and backward pass of each micro-batch, and add up the gradients.

        Args:
            batches: the micro-batches, as many on every rank.
            forward: passes a micro-batch, with the hidden states of the stage before, through the stage.
            loss: computes the loss of a micro-batch from the output of the last stage, and a result.

        Returns:
            the result of each micro-batch; None in all stages but the last.
        """
        self._types = {}
        left, results = len(batches), list[Result | None]()
        early = self._stage.count - self._stage.number - 1
        waiting: deque[tuple[Tensor | None, Tensor]] = deque()
        coming = iter(batches)
        batch = next(coming, None)
        hidden = self._exchange(BACK, None, self._like(batch))
        for number in range(left):
            assert batch is not None
            output, result = forward(batch, hidden), None
            if self._stage.last:
                output, result = loss(batch, output)
            results.append(result)
            waiting.append((hidden, output))
            batch = next(coming, None)
            if number < early:
                self._exchange(AHEAD, output, None)
                hidden = self._exchange(BACK, None, self._like(batch))
            else:
                gradient = self._exchange(AHEAD, output, waiting[0][1])
                hidden = self._exchange(BACK, self._backward(waiting, gradient, left), self._like(batch))
                left -= 1
        while waiting:
            gradient = self._exchange(AHEAD, None, waiting[0][1])
            self._exchange(BACK, self._backward(waiting, gradient, left), None)
            left -= 1
        return results

    def predict(
        self, batches: Sequence[MicroBatch], forward: Callable[..., Any]
    ) -> Iterator[tuple[MicroBatch, HeadOutput]]:
        """Yield each micro-batch with the output of the last stage, in every stage. Arguments are as in `run`."""
        self._types = {}
        passed: list[MicroBatch] = []
        outputs: list[HeadOutput] = []
        for batch in batches:
            output = forward(batch, self._exchange(BACK, None, self._like(batch)))
            if self._stage.last:
                outputs.append(moved(output, torch.device("cpu")))
            self._exchange(AHEAD, output, None)
            passed.append(batch)
        yield from zip(passed, from_last(outputs, self._stage, self._device), strict=True)

    def clip(self, max_norm: float) -> float:
        """Add up the gradients of a tied weight, and scale all gradients down to a norm of at most `max_norm`."""
        if self._tied is not None:
            assert self._tied.grad is not None
            gradient = self._tied.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            other = self._send_and_receive(0 if self._stage.last else self._stage.count - 1, local, local)
            assert other is not None
            local.add_(other)
        copied = [self._tied] if self._stage.last and self._tied is not None else []
        return clip_grad_norm(self._module.parameters(), max_norm, copied, self._group, self._device)

    def _backward(self, waiting: deque[tuple[Tensor | None, Tensor]], gradient: Tensor | None, left: int) -> Any:
        """Run the backward pass of the oldest micro-batch; return the gradient of its hidden states, None in the first
        stage.

        Args:
            waiting: hidden states and output of each micro-batch that has passed forward; the oldest one is removed.
            gradient: gradient of the output; None for a loss.
            left: number of micro-batches, this one included, without a backward pass.
        """
        if self._sums_once:
            last = left == 1
            self._module.set_reshard_after_backward(last)
            self._module.set_requires_gradient_sync(last)
            self._module.set_is_last_backward(last)
        hidden, output = waiting.popleft()
        torch.autograd.backward(output, gradient)
        return None if hidden is None else hidden.grad

    def _like(self, batch: MicroBatch | None) -> tuple[int, ...] | None:
        """Return the shape of a rank's hidden states of a micro-batch; None for None."""
        if batch is None:
            return None
        rows, tokens = batch.input_ids.shape
        share = batch.packing.share if batch.packing else None
        return rows, tokens // (share.ranks if share else 1), self._width

    def _exchange(self, step: int, sent: Tensor | None, like: Tensor | tuple[int, ...] | None) -> Tensor | None:
        """Send hidden states or a gradient to a neighbour and receive from it, at once, so that two that do both do not
        wait for each other.

        Args:
            step: `AHEAD` or `BACK`. Without such a stage nothing is done.
            sent: tensor to send; None sends nothing.
            like: a tensor like the one to receive, or its shape; None receives nothing.

        Returns the received tensor, for hidden states with gradients if gradients are on.
        """
        neighbour = self._stage.number + step
        if neighbour not in range(self._stage.count):
            return None
        if step == AHEAD and sent is not None and step not in self._types:
            self._types[step] = sent.dtype
            self._send_and_receive(neighbour, torch.tensor([TYPES.index(sent.dtype)], device=self._device), None)
        if isinstance(like, tuple):
            if step not in self._types:
                number = self._send_and_receive(neighbour, None, torch.tensor([0], device=self._device))
                assert number is not None
                self._types[step] = TYPES[int(number)]
            like = torch.empty(like, dtype=self._types[step], device=self._device)
        received = self._send_and_receive(neighbour, sent, like)
        self.sent += 0 if sent is None else sent.nbytes
        return (
            received.requires_grad_() if received is not None and step == BACK and torch.is_grad_enabled() else received
        )

    def _send_and_receive(self, stage: int, sent: Tensor | None, like: Tensor | None) -> Tensor | None:
        received = None if like is None else torch.empty_like(like, memory_format=torch.contiguous_format).detach()
        work = []
        if sent is not None:
            work.append(dist.P2POp(dist.isend, sent.detach().contiguous(), group=self._group, group_peer=stage))
        if received is not None:
            work.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=stage))
        for done in dist.batch_isend_irecv(work) if work else ():
            done.wait()
        return received

    def _tied_weight(self) -> Any:
        """Return the weight that the first and the last stage have, in these two; else None."""
        lm = self._module.lm
        embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
        if self._stage.first:
            tied = bool(lm.config.get_text_config().tie_word_embeddings)
        else:
            tied = self._stage.last and getattr(embedding, "weight", None) is head.weight
        stages: list[Any] = [None] * self._stage.count
        dist.all_gather_object(stages, tied, group=self._group)
        if stages[0] != stages[-1]:
            raise ValueError(
                f"the head of {lm.name_or_path} is tied to its embedding by config.json, but its files hold another "
                "head; set tie_word_embeddings to false there, or actor.parallel.pipeline=1"
            )
        return embedding.weight if tied else None


def make_backend(
    module: Any, optimizer: Optimizer | None, mesh: Mesh, device: torch.device, keeps_weights: bool = False
) -> FsdpBackend:
    """Make the backend of a sharded model. Arguments and errors are as in `StagedBackend`."""
    if mesh.stage.count == 1:
        return FsdpBackend(module, optimizer)
    return StagedBackend(module, optimizer, mesh, device, keeps_weights)


def from_last(outputs: list[HeadOutput], stage: PipelineStage, device: torch.device) -> Iterator[HeadOutput]:
    """Yield the outputs of the last stage, on `device`, in every stage; a collective.

    Args:
        outputs: this rank's outputs, on the CPU; only the last stage's count.
        stage: this rank's stage.
        device: this rank's device.
    """
    found = [outputs]
    if stage.group is not None:
        dist.broadcast_object_list(found, group=stage.group, group_src=stage.count - 1)
    for output in found[0]:
        yield moved(output, device)


def moved(output: HeadOutput, device: torch.device) -> HeadOutput:
    """Return a copy of the tensors of `output` on `device`, without gradients."""

    def copied(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(copied, value))
        return value.detach().to(device) if isinstance(value, Tensor) else value

    return HeadOutput(*map(copied, output))
