"""The fused head: computes log-probs and entropies of given tokens from hidden states, chunk by chunk, with gradients.

    forward    logits of a chunk ─► log-prob of its targets and listed tokens, log of the softmax's denominator, entropy
    backward   logits once more ─► probabilities ─► gradient of the logits ─► of hidden states and weights

With logits x, p = softmax(x) and H the entropy, the gradients are

    d log p_t / dx = 1_t - p            dH / dx = -p (log p + H)

Between forward and backward pass only numbers per token [N] are kept. The logits [tokens, V] exist only for one chunk
at a time, in two or three copies. The vocabulary may be divided over the ranks of a tensor group; the ranks then sum
their contributions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

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


@dataclass(frozen=True)
class TokenLists:
    """A list of tokens for each of N positions, with M tokens in all; lists may be empty."""

    ids: Tensor
    """[M] int64, token ids, list after list."""
    counts: Tensor
    """[N] int64, number of tokens in each list."""

    @classmethod
    def of(cls, ids: Tensor) -> Self:
        """Return lists of equal length, `ids` [N, K] int."""
        counts = torch.full((len(ids),), ids.shape[1], dtype=torch.int64, device=ids.device)
        return cls(ids.reshape(-1).long(), counts)

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on `device`."""
        return type(self)(self.ids.to(device, non_blocking=True), self.counts.to(device, non_blocking=True))

    @property
    def position(self) -> Tensor:
        """[M] int64, position (0 to N - 1) of each token's list."""
        return torch.arange(len(self.counts), device=self.ids.device).repeat_interleave(
            self.counts, output_size=len(self.ids)
        )

    def places(self, positions: Tensor) -> Tensor:
        """[m] int64, places (0 to M - 1) of the tokens in the lists of `positions` [n] int64."""
        chosen = torch.zeros(len(self.counts), dtype=torch.bool, device=self.ids.device)
        chosen[positions] = True
        return chosen[self.position].nonzero()[:, 0]

    def select(self, positions: Tensor) -> Self:
        """Return the lists of `positions` [n] int64, which ascend."""
        return type(self)(self.ids[self.places(positions)], self.counts[positions])

    @classmethod
    def joined(cls, parts: Sequence[Self | None]) -> tuple[Self | None, list[Tensor | None]]:
        """Join the lists of each position, one after the other.

        Returns:
            The joined lists, None if all parts are None; and for each part the places of its tokens in them.
        """
        there = [part for part in parts if part is not None]
        if not there:
            return None, [None for _ in parts]
        order = torch.cat([part.position for part in there]).argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        split = iter(places.split([len(part.ids) for part in there]))
        ids = torch.cat([part.ids for part in there])[order]
        counts = torch.stack([part.counts for part in there]).sum(0)
        return cls(ids, counts), [None if part is None else next(split) for part in parts]

    def chunks(self, size: int) -> list[tuple[Tensor, Tensor, slice]]:
        """Return for each `size` positions: the ids of their tokens [m], the position of each in the chunk [m], and
        the place of these tokens among all."""
        ends = self.counts.cumsum(0)[size - 1 :: size].tolist()
        borders = [0, *ends] if len(self.counts) % size == 0 else [0, *ends, len(self.ids)]
        position = self.position % size
        return [(self.ids[a:b], position[a:b], slice(a, b)) for a, b in pairwise(borders)]


class HeadOutput(NamedTuple):
    """Output of the head at N positions."""

    log_probs: Tensor
    """[N] float32, log-probs of the targets."""
    entropies: Tensor | None
    """[N] float32, entropies in nats; None if not wanted."""
    listed: Tensor | None
    """[M] float32, log-probs of the tokens in `lists`; None without lists."""
    kept: Tensor | None
    """[N] float32, log of the probability of all tokens but those in `left_out`, 0 for an empty list; None without
    `left_out`."""
    top: tuple[Tensor, Tensor] | None = None
    """Ids [N, K] int64 of the most likely tokens, and their log-probs [N, K] float32; None if not wanted."""


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
        lists: TokenLists | None,
        left_out: TokenLists | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        log_probs, log_sums, entropies = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        listed = None if lists is None else hidden.new_empty(len(lists.ids), dtype=torch.float32)
        kept = None if left_out is None else torch.zeros_like(log_probs)
        in_chunks = lists.chunks(chunk_tokens) if lists else []
        left_in_chunks = left_out.chunks(chunk_tokens) if left_out else []
        for number, start in enumerate(range(0, len(hidden), chunk_tokens)):
            chunk = slice(start, start + chunk_tokens)
            x, _ = rule.apply(linear(hidden[chunk], weight, bias))
            top = x.amax(-1)
            if part:
                dist.all_reduce(top, dist.ReduceOp.MAX, part.group)
            x.sub_(top[:, None])
            place, here = _places(targets[chunk], len(weight), part)
            target = x.gather(-1, place[:, None]).squeeze(-1)
            if listed is not None:
                ids, position, where = in_chunks[number]
                there, mine = _places(ids, len(weight), part)
                logits = x[position, there]
                listed[where] = logits if mine is None else logits.where(mine, 0.0)
            rest = None if kept is None else _rest(x, *left_in_chunks[number][:2], part)
            weights = x.exp() if with_entropy else x.exp_()
            sums = [weights.sum(-1), target if here is None else target.where(here, 0.0)]
            sums += [torch.linalg.vecdot(weights, x)] if with_entropy else []
            if part:
                together = torch.stack(sums)
                dist.all_reduce(together, group=part.group)
                sums = list(together)
            log_sum = sums[0].log()
            log_probs[chunk], log_sums[chunk] = sums[1] - log_sum, log_sum + top
            if listed is not None:
                if part:
                    dist.all_reduce(listed[where], group=part.group)
                listed[where] -= log_sum[position]
            if kept is not None and left_out is not None and rest is not None:
                kept[chunk] = torch.where(left_out.counts[chunk] > 0, rest - log_sum, 0.0)
            if with_entropy:
                entropies[chunk] = log_sum - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropies, kept)
        ctx.arguments = rule, chunk_tokens, part, lists, left_out
        ctx.set_materialize_grads(False)
        return log_probs, entropies if with_entropy else None, listed, kept

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        of_log_probs: Tensor | None,
        of_entropies: Tensor | None,
        of_listed: Tensor | None,
        of_kept: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropies, kept = ctx.saved_tensors
        rule, chunk_tokens, part, lists, left_out = ctx.arguments
        of_hidden = torch.empty_like(hidden)
        # With adapters the head is frozen.
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        if of_log_probs is None:
            of_log_probs = torch.zeros_like(log_sums)
        total = of_log_probs
        if of_listed is not None:
            total = total.index_add(0, lists.position, of_listed)
        if of_kept is not None:
            of_kept = torch.where(left_out.counts > 0, of_kept, 0.0)
            total = total + of_kept
        in_chunks = lists.chunks(chunk_tokens) if of_listed is not None else []
        left_in_chunks = left_out.chunks(chunk_tokens) if of_kept is not None else []
        for number, start in enumerate(range(0, len(hidden), chunk_tokens)):
            chunk = slice(start, start + chunk_tokens)
            given, pulled = of_log_probs[chunk][:, None], total[chunk][:, None]
            x, derivative = rule.apply(linear(hidden[chunk], weight, bias))
            x.sub_(log_sums[chunk][:, None])  # log p
            of_rest = None
            if of_kept is not None:
                ids, position, _ = left_in_chunks[number]
                of_rest = (
                    _without(x, ids, position, part).sub_(kept[chunk][:, None]).exp_().mul_(of_kept[chunk][:, None])
                )
            if of_entropies is None:
                x.exp_().mul_(-pulled)
            else:
                p = x.exp()
                x.add_(entropies[chunk][:, None]).mul_(of_entropies[chunk][:, None]).add_(pulled).mul_(p).neg_()
            if of_rest is not None:
                x.add_(of_rest)
            place, here = _places(targets[chunk], len(weight), part)
            x.scatter_add_(1, place[:, None], given if here is None else given.where(here[:, None], 0.0))
            if of_listed is not None:
                ids, position, where = in_chunks[number]
                there, mine = _places(ids, len(weight), part)
                own = of_listed[where] if mine is None else of_listed[where].where(mine, 0.0)
                x.index_put_((position, there), own, accumulate=True)
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
        return of_hidden, of_weight, of_bias, *(None,) * 7


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


def _without(x: Tensor, ids: Tensor, position: Tensor, part: VocabularyPart | None) -> Tensor:
    """[N, V] a copy of `x` with minus infinity for the token `ids` [m] at the position `position` [m]."""
    there, mine = _places(ids, x.shape[1], part)
    if mine is not None:
        there, position = there[mine], position[mine]
    left = x.clone()
    left[position, there] = -torch.inf
    return left


def _rest(x: Tensor, ids: Tensor, position: Tensor, part: VocabularyPart | None) -> Tensor:
    """[N] logarithm of the sum of exp(x) over all tokens but `ids` [m] at the position `position` [m]."""
    left = _without(x, ids, position, part)
    if part is None:
        return left.logsumexp(-1)
    top = left.amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, part.group)
    total = left.sub_(top[:, None]).exp_().sum(-1)
    dist.all_reduce(total, group=part.group)
    return total.log() + top


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rule: LogitRule,
    chunk_tokens: int,
    with_entropy: bool,
    part: VocabularyPart | None = None,
    lists: TokenLists | None = None,
    left_out: TokenLists | None = None,
) -> HeadOutput:
    """Compute log-probs of `targets` and of listed tokens, and entropies, under the softmax of a linear head.

    Args:
        hidden: [N, H] hidden states; N may be 0.
        weight: [V, H], of the dtype of `hidden`; with `part` only this rank's rows.
        bias: [V] or None.
        targets: [N] int64, ids in the whole vocabulary.
        rule: turns the head's outputs into logits.
        chunk_tokens: number of positions for which logits exist at the same time.
        with_entropy: whether to compute entropies too.
        part: the part of the vocabulary that `weight` covers, if ranks divide the vocabulary; else None.
        lists: further tokens whose log-probs are wanted, for each position.
        left_out: tokens of each position, of whose complement the probability is wanted.
    """
    options = rule, chunk_tokens, with_entropy, part, lists, left_out
    return HeadOutput(*_Head.apply(hidden, weight, bias, targets, *options))


@torch.no_grad()
def top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rule: LogitRule,
    chunk_tokens: int,
    count: int,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the `count` most likely tokens at each position, without gradients.

    Other arguments are as in `token_log_probs`. Returns their ids [N, count] int64 and log-probs [N, count] float32,
    the most likely token first.
    """
    ids = hidden.new_empty((len(hidden), count), dtype=torch.int64)
    log_probs = hidden.new_empty((len(hidden), count), dtype=torch.float32)
    for start in range(0, len(hidden), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        x, _ = rule.apply(linear(hidden[chunk], weight, bias))
        log_sum = x.logsumexp(-1)
        best, found = x.topk(min(count, x.shape[1]), -1)
        if part:
            sums = [torch.empty_like(log_sum) for _ in range(part.group.size())]
            dist.all_gather(sums, log_sum, group=part.group)
            log_sum = torch.stack(sums).logsumexp(0)
            best, found = _joined_top(best, found + part.first, count, part)
        ids[chunk], log_probs[chunk] = found, best - log_sum[:, None]
    return ids, log_probs


def _joined_top(best: Tensor, ids: Tensor, count: int, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits of all ranks, and their ids, from the largest of each rank."""
    ranks = part.group.size()
    # Parts of the vocabulary may differ in size, and so in the number of candidates.
    missing = count - best.shape[1]
    best = torch.nn.functional.pad(best, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing))
    logits, names = ([torch.empty_like(values) for _ in range(ranks)] for values in (best, ids))
    dist.all_gather(logits, best.contiguous(), group=part.group)
    dist.all_gather(names, ids.contiguous(), group=part.group)
    best, order = torch.cat(logits, -1).topk(count, -1)
    return best, torch.cat(names, -1).gather(-1, order)
