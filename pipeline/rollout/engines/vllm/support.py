"""The supports of vLLM's tokens, from the log-probs that it returns.

With `logprobs_mode=processed_logprobs` the tokens that a request may not sample have minus infinity, so the likeliest K
tokens name a support of up to K tokens. If the probabilities of these tokens do not sum to 1, the support is larger.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from pipeline.models.support import SupportWriter
from pipeline.sampling import Sampling

TIES = 32
"""Further tokens to ask for with `top_k`: vLLM keeps all tokens that are as likely as the last one."""
COMPLETE = 1e-3
"""Largest missing mass of a support with all of its tokens, for rounding."""


class SupportReader:
    """The log-probs and supports of a request's tokens, step by step.

    Args:
        sampling: settings of the request.
        ends: ids of the tokens that vLLM forbids before `min_tokens`.
        vocabulary, most: as in `SupportWriter`.
    """

    def __init__(self, sampling: Sampling, ends: Collection[int], vocabulary: int, most: int) -> None:
        self._sampling, self._ends = sampling, np.array(sorted(ends), np.int64)
        self.logprobs: list[float] = []
        """Log-prob of each sampled token."""
        self.writer = SupportWriter(vocabulary, most)

    def add(self, lists: Any) -> None:
        """Take the arrays of a step (`LogprobsLists`), in which the sampled token comes first."""
        for ids, log_probs in zip(lists.logprob_token_ids, lists.logprobs, strict=True):
            if self._sampling.truncated:
                self._add_listed(np.asarray(ids), np.asarray(log_probs))
            elif len(self.logprobs) < self._sampling.min_tokens:
                self.writer.outside(self._ends)
            else:
                self.writer.whole()
            self.logprobs.append(float(log_probs[0]))

    def _add_listed(self, ids: np.ndarray, log_probs: np.ndarray) -> None:
        kept = np.isfinite(log_probs)
        # The sampled token comes again at its place among the likeliest.
        ids, first = np.unique(ids[kept], return_index=True)
        if np.exp(log_probs[kept][first].astype(np.float64)).sum() < 1 - COMPLETE:
            self.writer.unknown()
        else:
            self.writer.inside(ids)


def listed(sampling: Sampling, vocabulary: int, most: int) -> int:
    """Return the number of log-probs to ask for, so that they name a token's support.

    Args:
        sampling: settings of the request.
        vocabulary: number of tokens in the vocabulary.
        most: maximum number of ids for a token.
    """
    if not sampling.truncated:
        return 0
    # The rest of a support with fewer than `most` tokens outside is written too.
    wanted = sampling.top_k + TIES if sampling.top_k > 0 else vocabulary if vocabulary <= 2 * most else most
    return min(wanted, vocabulary)
