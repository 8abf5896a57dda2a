"""Where the prompts of each batch begin and of each iteration end; a restarted source or run continues there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.store.cursor import PromptCursor

PAGES_KEPT = 1000
"""Pages that may be made again."""


@dataclass(frozen=True)
class PromptBatch:
    """A batch of prompts of the attempt."""

    number: int
    """From 0 in each attempt; batch `n` ends where batch `n + 1` begins."""
    cursor: PromptCursor
    """Where it begins."""
    metrics: dict[str, int]
    """Of the prompts that were made last."""
    iteration: int | None = None
    """The iteration that ends there; None with dynamic sampling, where the filter stage knows it."""


@dataclass(frozen=True)
class PageGrant:
    """The permission to make a page of prompts."""

    version: int
    """The current one."""
    first: bool
    """Whether no page before was made at this version."""
    over: bool
    """Whether the last iteration is trained, so that no prompt is needed any more."""


class PromptLedger:
    """The ledger of one attempt.

    Args:
        base: policy version that the attempt began with.
        start: where its first batch begins.
    """

    def __init__(self, base: int, start: PromptCursor):
        self._base, self._start = base, start
        self._batches: dict[int, PromptBatch] = {0: PromptBatch(0, start, {})}
        self._ends: dict[int, tuple[int, int]] = {}
        """With dynamic sampling: batch in which an iteration ends, and how many of its prompts are used up."""
        self._grants: dict[int, PageGrant] = {}

    def add(self, batches: Sequence[PromptBatch]) -> None:
        self._batches |= {batch.number: batch for batch in batches}

    def begin_of(self, batch: int) -> PromptCursor:
        """Where a batch begins.

        Raises:
            KeyError: it is not known (any more).
        """
        return self._start if batch == 0 else self._batches[batch].cursor

    def end(self, iteration: int, batch: int, used: int) -> dict[str, int]:
        """`iteration` ends after `used` prompts of a batch; the metrics of that batch."""
        self._ends[iteration] = batch, used
        return self._batches[batch].metrics if batch in self._batches else {}

    def end_of(self, iteration: int, filtered: bool) -> PromptCursor:
        """Where the prompts that `iteration` has used up end.

        Raises:
            KeyError: it is not known (yet, or any more).
        """
        if iteration == self._base:
            return self._start
        batch, used = self._ends[iteration] if filtered else (iteration - self._base, 0)
        return replace(self._batches[batch].cursor, skip=used)

    def grant(self, page: int, version: int, over: bool) -> PageGrant:
        """The page is made now, or was made before and is made again."""
        if page not in self._grants:
            before = max((grant.version for grant in self._grants.values()), default=-1)
            self._grants[page] = PageGrant(version, version > before, over)
            for old in sorted(self._grants)[:-PAGES_KEPT]:
                del self._grants[old]
        return self._grants[page]

    def granted(self, page: int) -> bool:
        return page in self._grants

    def forget(self, version: int, filtered: bool) -> None:
        """Remove what no part of a run at `version` can ask for."""
        oldest = version - 1 - self._base
        if filtered:
            trained = [iteration for iteration in self._ends if iteration < version]
            if not trained:
                return
            oldest, _ = self._ends[max(trained)]
            self._ends = {iteration: end for iteration, end in self._ends.items() if iteration >= max(trained)}
        self._batches = {number: batch for number, batch in self._batches.items() if number >= oldest}
