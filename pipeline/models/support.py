"""The support of a token: the tokens that the engine could choose from when it sampled it.

With `top_p`, `top_k`, `min_p` or `min_tokens` an engine samples from a part S of the vocabulary, and its log-prob of a
token t is log p(t) - log p(S). The trainer, the reference and other replicas compute the same, over the same S, so that
the ratio of two policies is not off by the mass p(S).

A row has S for each of its tokens in the columns `support` and `support_sizes`. Of S and its complement the shorter one
is written.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from pipeline.models.head import TokenLists
from pipeline.rows import UNKNOWN


@dataclass(frozen=True)
class Support:
    """The supports of N tokens. Of the two lists of a token at least one is empty; both are if the support is the whole
    vocabulary or unknown."""

    inside: TokenLists
    """The tokens of each support."""
    outside: TokenLists
    """The tokens outside of each support."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on `device`."""
        return type(self)(self.inside.to(device), self.outside.to(device))

    def select(self, tokens: Tensor) -> Self:
        """Return the supports of `tokens` [n] int64, which ascend."""
        return type(self)(self.inside.select(tokens), self.outside.select(tokens))

    def renormalise(self, log_probs: Tensor, listed: Tensor, kept: Tensor | None) -> Tensor:
        """[N] float32, log-probs of tokens within their supports, from the log-probs in the whole vocabulary.

        Args:
            log_probs: [N] log-probs of the sampled tokens.
            listed: [M] log-probs of the tokens in `inside`.
            kept: [N] log of the probability of all tokens but those in `outside`; None if there are none.
        """
        position, empty = self.inside.position, self.inside.counts == 0
        top = torch.full_like(log_probs, -torch.inf).scatter_reduce(0, position, listed.detach(), "amax")
        top = torch.where(empty, 0.0, top)
        sums = torch.zeros_like(log_probs).index_add(0, position, (listed - top[position]).exp())
        inside = log_probs - torch.where(empty, 1.0, sums).log() - top
        return inside if kept is None else inside - kept

    def cut(self, logits: Tensor) -> Tensor:
        """[N, V] `logits` with minus infinity for the tokens outside of each position's support."""
        left = torch.zeros_like(logits, dtype=torch.bool)
        left[self.inside.counts > 0] = True
        left[self.inside.position, self.inside.ids] = False
        left[self.outside.position, self.outside.ids] = True
        return logits.masked_fill(left, -torch.inf)


class SupportWriter:
    """Writes the supports of a response's tokens, one token after the other, in the form of the columns.

    Args:
        vocabulary: number of tokens in the vocabulary.
        most: maximum number of ids for a token (`rollout.max_support`).
    """

    def __init__(self, vocabulary: int, most: int) -> None:
        self._vocabulary, self._most = vocabulary, most
        self._ids: list[np.ndarray] = []
        self._sizes: list[int] = []

    def whole(self) -> None:
        """Add a token that was sampled from the whole vocabulary."""
        self._sizes.append(0)

    def unknown(self) -> None:
        """Add a token whose support is not known."""
        self._sizes.append(UNKNOWN)

    def inside(self, ids: np.ndarray) -> None:
        """Add a token whose support is `ids` [n], in any order."""
        if len(ids) <= self._vocabulary - len(ids):
            self._add(ids, len(ids))
        else:
            self._add(self._others(ids), len(ids) - self._vocabulary)

    def outside(self, ids: np.ndarray) -> None:
        """Add a token whose support is the vocabulary without `ids` [n]."""
        if len(ids) < self._vocabulary - len(ids):
            self._add(ids, -len(ids))
        else:
            self._add(self._others(ids), self._vocabulary - len(ids))

    def columns(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return `support` [M] int32 and `support_sizes` [T] int32; None if all tokens had the whole vocabulary."""
        if not any(self._sizes):
            return None
        return np.concatenate([np.empty(0, np.int32), *self._ids]), np.array(self._sizes, np.int32)

    def _add(self, ids: np.ndarray, size: int) -> None:
        if len(ids) > self._most:
            self.unknown()
            return
        self._ids.append(np.sort(ids).astype(np.int32))
        self._sizes.append(size)

    def _others(self, ids: np.ndarray) -> np.ndarray:
        rest = np.ones(self._vocabulary, dtype=bool)
        rest[ids] = False
        return np.flatnonzero(rest)
