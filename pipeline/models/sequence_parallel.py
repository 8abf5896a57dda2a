"""Sequence parallelism over packed rows (DeepSpeed Ulysses: Jacobs et al. 2023, arXiv 2309.14509).

    rank 0   positions 0 .. T/S, all heads                      all positions, heads 0 .. h/S
    rank 1   positions T/S .. 2 T/S, all heads   all-to-all     all positions, heads h/S .. 2 h/S      ─► attention
    ...                                             ─►          ...

The S ranks of a group see the same packed sequence of T tokens and h heads. Each rank computes everything but attention
for T/S of the positions. Before attention an all-to-all exchange gives each rank all positions of h/S heads; after
attention a second exchange reverses the first.

Each rank computes log-probs (or values) at its own positions. `Share.join` then gives all of them to all ranks, so that
every rank computes the same loss. In the backward pass a rank uses only the gradient of its own numbers. FSDP sums the
gradients over ranks, and the sum is the gradient of the loss.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Share:
    """This rank's share of a packed sequence of T positions: T/S neighbouring ones, the first T/S for the first rank.

    N is the number of positions at which a token is predicted, and n the number of these in this rank's share.
    """

    group: dist.ProcessGroup
    """The S ranks that divide the sequence."""
    own: Tensor
    """[n] int64, indices (0 to N - 1) of the predictions at this rank's positions."""

    @property
    def ranks(self) -> int:
        """S, the number of ranks; it divides T."""
        return self.group.size()

    def cut(self, packed: Tensor) -> Tensor:
        """[1, T / S], this rank's positions of `packed` [1, T]."""
        return packed.chunk(self.ranks, dim=1)[self.group.rank()]

    def join(self, values: Tensor, count: int) -> Tensor:
        """[N] the values of all ranks, one per prediction. A collective; the backward pass is not.

        Args:
            values: [n] the values at this rank's positions.
            count: N.
        """
        joined: Tensor = _Join.apply(values, self.own, count, self.group)
        return joined

    def join_all(self, values: Tensor, count: int) -> Tensor:
        """[N, K] the values of all ranks, as `join`, for several numbers [n, K] per prediction, without gradients."""
        joined = values.new_zeros((count, *values.shape[1:]))
        joined[self.own] = values
        dist.all_reduce(joined, group=self.group)
        return joined

    def by_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange all heads at this rank's positions for some heads at all positions; a collective.

        Args:
            query: [T / S, h, D], with h a multiple of S.
            key, value: [T / S, k, D], with h a multiple of k. If S does not divide k, heads are repeated.

        Returns:
            query [T, h / S, D], key and value [T, lcm(k, S) / S, D].
        """
        if query.shape[1] % self.ranks:
            raise ValueError(
                f"actor.parallel.sequence={self.ranks} does not divide the {query.shape[1]} attention heads of a rank"
            )
        copies = self.ranks // math.gcd(key.shape[1], self.ranks)
        if copies > 1:
            key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
        return self._exchange(query, 1, 0), self._exchange(key, 1, 0), self._exchange(value, 1, 0)

    def by_positions(self, states: Tensor) -> Tensor:
        """[T / S, h, D], all heads at this rank's positions: reverses `by_heads` for `states` [T, h / S, D].

        A collective.
        """
        return self._exchange(states, 0, 1)

    def _exchange(self, states: Tensor, given: int, taken: int) -> Tensor:
        """Run an all-to-all: split `states` along dimension `given`, send each rank one part, and join the received
        parts along dimension `taken`."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        parts = torch.stack(states.chunk(self.ranks, given))
        received = all_to_all_single_autograd(parts, None, None, self.group)
        return torch.cat(received.unbind(0), taken)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        joined = values.new_zeros(count)
        joined[own] = values
        dist.all_reduce(joined, group=group)
        ctx.save_for_backward(own)
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_joined: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return of_joined[own], None, None, None
