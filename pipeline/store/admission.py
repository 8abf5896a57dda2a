"""The admission rule: the lowest policy version at which the generation of a chunk may start.

On-policy and asynchronous runs use the same rule.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """The arithmetic of admission; sizes are numbers of prompts (groups)."""

    chunk_prompts: int
    """Number of prompts in a chunk."""
    train_batch_size: int
    """Number of prompts in an iteration."""
    max_staleness: int
    """Largest number of versions by which rows may be older than the version that they would have on-policy."""
    last_iteration: int | None = None
    """Number of the run's last iteration; set only with dynamic sampling, which may drop groups."""

    @property
    def drops_groups(self) -> bool:
        """True if dynamic sampling may drop groups."""
        return self.last_iteration is not None

    def version_needed(self, chunk: int, dropped_groups: int = 0) -> int:
        """Return the lowest policy version, relative to the attempt's first, at which a chunk may start.

        This is the lowest version with `(chunk + 1) * chunk_prompts - dropped_groups <= (version + 1 + max_staleness) *
        train_batch_size`. It does not depend on the order in which chunks are requested.

        Args:
            chunk: number of the chunk in the attempt, from 0.
            dropped_groups: number of groups that dynamic sampling has dropped so far.
        """
        groups = (chunk + 1) * self.chunk_prompts - dropped_groups
        if self.drops_groups and self.max_staleness == 0:
            # A chunk starts as a whole, and the batch may lack fewer groups than a chunk has. The last chunk starts
            # nevertheless, and its surplus groups are discarded. With staleness, chunks of later iterations fill the
            # batch.
            groups -= self.chunk_prompts - 1
        return max(0, -(-groups // self.train_batch_size) - 1 - self.max_staleness)

    def filled(self, base: int, kept: int) -> bool:
        """Return whether dynamic sampling has enough groups for all remaining iterations, so that no more are needed.

        Args:
            base: policy version with which the attempt began.
            kept: number of groups that the attempt has kept.
        """
        return self.last_iteration is not None and kept >= (self.last_iteration - base) * self.train_batch_size

    def needless(self, base: int, chunk: int, dropped: int) -> bool:
        """Return whether chunk number `chunk` is not needed, because earlier chunks fill all remaining iterations.

        Groups of earlier chunks that are not judged yet count as kept.

        Args:
            base: policy version with which the attempt began.
            chunk: number of the chunk in the attempt, from 0.
            dropped: number of groups that dynamic sampling has dropped so far.
        """
        return self.filled(base, chunk * self.chunk_prompts - dropped)

    def over(self, version: int) -> bool:
        """Return whether the run uses dynamic sampling and `version` is the result of its last iteration."""
        return self.last_iteration is not None and version >= self.last_iteration
