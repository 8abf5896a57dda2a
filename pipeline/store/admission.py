"""The admission rule: the policy version at which a chunk may start, the same for every way to train."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """The arithmetic of admission; sizes are in prompt groups."""

    chunk_prompts: int
    train_batch_size: int
    max_staleness: int
    last_iteration: int | None = None
    """With dynamic sampling, where groups may be dropped: number of the run's last iteration."""

    @property
    def drops_groups(self) -> bool:
        """Whether dynamic sampling may drop groups."""
        return self.last_iteration is not None

    def version_needed(self, chunk: int, dropped_groups: int = 0) -> int:
        """Lowest policy version at which chunk `chunk` (from 0) may start.

        The rule `(c + 1) * chunk_prompts - dropped <= (version + 1 + max_staleness) * train_batch_size`, solved for the
        version. It depends on the chunk's number and on drops alone, never on who asks first.
        """
        groups = (chunk + 1) * self.chunk_prompts - dropped_groups
        if self.drops_groups and self.max_staleness == 0:
            # Chunks start whole, and what the batch lacks may be less than one: the last chunk starts nevertheless, and
            # what it has too much is discarded. With staleness the chunks of later iterations fill the batch.
            groups -= self.chunk_prompts - 1
        return max(0, -(-groups // self.train_batch_size) - 1 - self.max_staleness)

    def filled(self, base: int, kept: int) -> bool:
        """Whether `kept` groups fill all iterations of an attempt that began with version `base`, so that nothing more
        is generated; only with dynamic sampling."""
        return self.last_iteration is not None and kept >= (self.last_iteration - base) * self.train_batch_size

    def needless(self, base: int, chunk: int, dropped: int) -> bool:
        """Whether the groups kept of the chunks before this one fill all iterations, if none of them is dropped."""
        return self.filled(base, chunk * self.chunk_prompts - dropped)

    def over(self, version: int) -> bool:
        """Whether the last iteration is trained; only with dynamic sampling."""
        return self.last_iteration is not None and version >= self.last_iteration
