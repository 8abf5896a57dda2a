"""Cursors of the prompts at beginnings of batches and ends of iterations, from which a restarted prompt source, or a
resumed run, continues."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.store.cursor import PromptCursor

PAGES_KEPT = 1000
"""Number of newest pages whose grants are kept, in case the prompt source must make a page again."""


@dataclass(frozen=True)
class PromptBatch:
    """One batch of the prompts of an attempt."""

    number: int
    """Number of the batch, from 0 in each attempt; the beginning of batch `n + 1` is the end of batch `n`."""
    cursor: PromptCursor
    """Cursor at the beginning of the batch."""
    metrics: dict[str, int]
    """Metrics of the prompts before the batch."""
    iteration: int | None = None
    """The iteration that ends at the beginning of this batch; None with dynamic sampling (the filter stage reports
    it)."""


@dataclass(frozen=True)
class PageGrant:
    """The permission to make a page of prompts, with dynamic sampling."""

    version: int
    """The policy version that was current when the page was granted."""
    first: bool
    """True if this is the first page that was granted at this version."""
    over: bool
    """True if the last iteration is trained, so that no more prompts are needed."""


class PromptLedger:
    """The cursors and page grants of one attempt.

    Args:
        base: policy version with which the attempt began.
        start: cursor at the beginning of the attempt's first batch.
    """

    def __init__(self, base: int, start: PromptCursor):
        self._base, self._start = base, start
        self._batches: dict[int, PromptBatch] = {0: PromptBatch(0, start, {})}
        self._ends: dict[int, tuple[int, int]] = {}
        """With dynamic sampling: iteration to (number of its last batch, number of prompts of this batch that it
        used)."""
        self._grants: dict[int, PageGrant] = {}

    def add(self, batches: Sequence[PromptBatch]) -> None:
        self._batches |= {batch.number: batch for batch in batches}

    def begin_of(self, batch: int) -> PromptCursor:
        """Return the cursor at the beginning of a batch.

        Raises:
            KeyError: the batch is unknown, or already deleted.
        """
        return self._start if batch == 0 else self._batches[batch].cursor

    def end(self, iteration: int, batch: int, used: int) -> dict[str, int]:
        """Record that `iteration` ends after `used` prompts of batch `batch`; returns the metrics of the batch."""
        self._ends[iteration] = batch, used
        return self._batches[batch].metrics if batch in self._batches else {}

    def end_of(self, iteration: int, filtered: bool) -> PromptCursor:
        """Return the cursor at the end of the prompts of `iteration`.

        Args:
            iteration: number of the iteration.
            filtered: whether the run uses dynamic sampling; then the end was recorded by `end`.

        Raises:
            KeyError: the cursor is not known yet, or already deleted.
        """
        if iteration == self._base:
            return self._start
        batch, used = self._ends[iteration] if filtered else (iteration - self._base, 0)
        return replace(self._batches[batch].cursor, skip=used)

    def grant(self, page: int, version: int, over: bool) -> PageGrant:
        """Return the grant of page number `page`. A page that is made again gets the same grant as before.

        Args:
            page: number of the page.
            version: the current policy version.
            over: whether the last iteration is trained.
        """
        if page not in self._grants:
            before = max((grant.version for grant in self._grants.values()), default=-1)
            self._grants[page] = PageGrant(version, version > before, over)
            for old in sorted(self._grants)[:-PAGES_KEPT]:
                del self._grants[old]
        return self._grants[page]

    def granted(self, page: int) -> bool:
        return page in self._grants

    def forget(self, version: int, filtered: bool) -> None:
        """Delete cursors that cannot be requested any more once `version` is current.

        Args:
            version: the current policy version.
            filtered: whether the run uses dynamic sampling.
        """
        oldest = version - 1 - self._base
        if filtered:
            trained = [iteration for iteration in self._ends if iteration < version]
            if not trained:
                return
            oldest, _ = self._ends[max(trained)]
            self._ends = {iteration: end for iteration, end in self._ends.items() if iteration >= max(trained)}
        self._batches = {number: batch for number, batch in self._batches.items() if number >= oldest}
