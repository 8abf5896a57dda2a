"""The admission rule: which policy version a chunk needs to start. On-policy and asynchronous runs share it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """The arithmetic of admission; sizes are in prompt groups."""

    chunk_prompts: int
    train_batch_size: int
    max_staleness: int
    last_iteration: int | None = None
    """Number of the run's last iteration; set only with dynamic sampling, which may drop groups."""

    @property
    def drops_groups(self) -> bool:
        """True if dynamic sampling may drop groups."""
        return self.last_iteration is not None

    def version_needed(self, chunk: int, dropped_groups: int = 0) -> int:
        """Lowest policy version at which chunk `chunk` (from 0) may start.

        The rule `(c + 1) * chunk_prompts - dropped <= (version + 1 + max_staleness) * train_batch_size`, solved for the
        version. It depends on the chunk's number and on the dropped groups, not on the order of requests.
        """
        groups = (chunk + 1) * self.chunk_prompts - dropped_groups
        if self.drops_groups and self.max_staleness == 0:
            # A chunk starts as a whole, and the batch may lack fewer groups than a chunk has. The last chunk starts
            # nevertheless, and its surplus groups are discarded. With staleness, chunks of later iterations fill the
            # batch.
            groups -= self.chunk_prompts - 1
        return max(0, -(-groups // self.train_batch_size) - 1 - self.max_staleness)

    def filled(self, base: int, kept: int) -> bool:
        """With dynamic sampling: return whether `kept` groups fill all iterations of an attempt that began with version
        `base`, so that no more groups are generated."""
        return self.last_iteration is not None and kept >= (self.last_iteration - base) * self.train_batch_size

    def needless(self, base: int, chunk: int, dropped: int) -> bool:
        """Return whether the chunks before this one fill all iterations unless more of their groups are dropped."""
        return self.filled(base, chunk * self.chunk_prompts - dropped)

    def over(self, version: int) -> bool:
        """With dynamic sampling: return whether `version` is the result of the last iteration."""
        return self.last_iteration is not None and version >= self.last_iteration
