"""The fused head: computes log-probs and entropies of given tokens from hidden states, chunk by chunk, with gradients.

    forward    logits of a chunk ─► log-prob of its targets, log of the softmax's denominator, entropy
    backward   logits once more ─► probabilities ─► gradient of the logits ─► of hidden states and weights

With logits x, p = softmax(x) and H the entropy, the gradients are

    d log p_t / dx = 1_t - p            dH / dx = -p (log p + H)

Between forward and backward pass only numbers per token [N] are kept. The logits [tokens, V] exist only for one chunk
at a time, in two or three copies. The vocabulary may be divided over the ranks of a tensor group; the ranks then sum
their contributions.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear


@dataclass(frozen=True)
class LogitRule:
    """Rule that turns the outputs z of a linear head into logits.

    Logits are `softcap tanh(scale z / softcap) / temperature`, or without a cap `scale z / temperature`.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def apply(self, numbers: Tensor) -> tuple[Tensor, Tensor | None]:
        """Turn the head's outputs into logits.

        Args:
            numbers: [N, V] outputs of the head; overwritten if they are float32.

        Returns:
            logits [N, V] float32; and the derivative of each logit by its output, [N, V], or None if it is `slope`
            everywhere.
        """
        x = numbers.float()
        if self.softcap is None:
            return x if self.slope == 1.0 else x.mul_(self.slope), None
        x = x.mul_(self.scale / self.softcap).tanh_()
        derivative = (1 - x.square()).mul_(self.slope)
        return x.mul_(self.softcap / self.temperature), derivative

    @property
    def slope(self) -> float:
        """Derivative of a logit by the output of the head, without a cap, or with a cap at output 0."""
        return self.scale / self.temperature


@dataclass(frozen=True)
class VocabularyPart:
    """The part of the vocabulary for which this rank has the rows of the head's weights."""

    first: int
    """Token id of this rank's first row."""
    group: dist.ProcessGroup
    """Ranks that together have all rows, and compute with the same hidden states."""


def own_rows(parameter: Tensor | None) -> tuple[Tensor | None, VocabularyPart | None]:
    """Return this rank's rows of a head's weights [V, H] or bias [V], and the part of the vocabulary that they cover.

    The part is None if tensor parallelism has not divided the rows.
    """
    if not isinstance(parameter, DTensor):
        return parameter, None
    mesh = parameter.device_mesh
    return parameter.to_local(), VocabularyPart(mesh.get_local_rank() * len(parameter) // mesh.size(), mesh.get_group())


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rule: LogitRule,
        chunk_tokens: int,
        with_entropy: bool,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor | None]:
        log_probs, log_sums, entropies = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            x, _ = rule.apply(linear(hidden[chunk], weight, bias))
            top = x.amax(-1)
            if part:
                dist.all_reduce(top, dist.ReduceOp.MAX, part.group)
            x.sub_(top[:, None])
            place, here = _places(targets[chunk], len(weight), part)
            target = x.gather(-1, place[:, None]).squeeze(-1)
            weights = x.exp() if with_entropy else x.exp_()
            sums = [weights.sum(-1), target if here is None else target.where(here, 0.0)]
            sums += [torch.linalg.vecdot(weights, x)] if with_entropy else []
            if part:
                together = torch.stack(sums)
                dist.all_reduce(together, group=part.group)
                sums = list(together)
            log_sum = sums[0].log()
            log_probs[chunk], log_sums[chunk] = sums[1] - log_sum, log_sum + top
            if with_entropy:
                entropies[chunk] = log_sum - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropies)
        ctx.arguments = rule, chunk_tokens, part
        ctx.set_materialize_grads(False)
        return log_probs, entropies if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropies = ctx.saved_tensors
        rule, chunk_tokens, part = ctx.arguments
        of_hidden = torch.empty_like(hidden)
        # With adapters the head is frozen.
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        if of_log_probs is None:
            of_log_probs = torch.zeros_like(log_sums)
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            given = of_log_probs[chunk][:, None]
            x, derivative = rule.apply(linear(hidden[chunk], weight, bias))
            x.sub_(log_sums[chunk][:, None])  # log p
            if of_entropies is None:
                x.exp_().mul_(-given)
            else:
                p = x.exp()
                x.add_(entropies[chunk][:, None]).mul_(of_entropies[chunk][:, None]).add_(given).mul_(p).neg_()
            place, here = _places(targets[chunk], len(weight), part)
            x.scatter_add_(1, place[:, None], given if here is None else given.where(here[:, None], 0.0))
            if derivative is not None:
                x.mul_(derivative)
            elif rule.slope != 1.0:
                x.mul_(rule.slope)
            of_numbers = x.to(hidden.dtype)
            torch.mm(of_numbers, weight, out=of_hidden[chunk])
            if of_weight is not None:
                of_weight.addmm_(of_numbers.t(), hidden[chunk])
            if of_bias is not None:
                of_bias += of_numbers.sum(0)
        if part:
            dist.all_reduce(of_hidden, group=part.group)
        return of_hidden, of_weight, of_bias, None, None, None, None, None


def _places(targets: Tensor, rows: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor | None]:
    """Find the rows of this rank's weights for the tokens `targets` [N].

    Returns:
        [N] row numbers, any row for tokens that this rank does not have; and [N] bool, true for tokens that it has, or
        None if it has all.
    """
    if part is None:
        return targets, None
    place = targets - part.first
    return place.clamp(0, rows - 1), (place >= 0) & (place < rows)


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rule: LogitRule,
    chunk_tokens: int,
    with_entropy: bool,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs of `targets`, and entropies, under the softmax of a linear head.

    Args:
        hidden: [N, H] hidden states; N may be 0.
        weight: [V, H], of the dtype of `hidden`; with `part` only this rank's rows.
        bias: [V] or None.
        targets: [N] int64, ids in the whole vocabulary.
        rule: turns the head's outputs into logits.
        chunk_tokens: number of positions for which logits exist at the same time.
        with_entropy: whether to compute entropies too.
        part: the part of the vocabulary that `weight` covers, if ranks divide the vocabulary; else None.

    Returns:
        log-probs [N] float32 and entropies [N] float32 in nats (None without `with_entropy`).
    """
    result: tuple[Tensor, Tensor | None] = _Head.apply(
        hidden, weight, bias, targets, rule, chunk_tokens, with_entropy, part
    )
    return result
