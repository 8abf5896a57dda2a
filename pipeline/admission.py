"""The admission rule: the policy version at which a chunk may start, the same for every way to train."""

from dataclasses import dataclass

from pipeline.groups import DynamicSampling


@dataclass(frozen=True)
class Admission:
    """The arithmetic of admission, all sizes in prompt groups."""

    chunk_prompts: int
    train_batch_size: int
    max_staleness: int
    dynamic: DynamicSampling | None = None
    """Set where groups may be dropped."""

    def version_needed(self, chunk: int, dropped_groups: int = 0) -> int:
        """Lowest policy version at which chunk `chunk` (from 0) may start.

        The rule `(c + 1) * chunk_prompts - dropped <= (version + 1 + max_staleness) * train_batch_size`, solved for the
        version. It depends on the chunk's number and on drops alone, never on who asks first.
        """
        groups = (chunk + 1) * self.chunk_prompts - dropped_groups
        if self.dynamic and self.max_staleness == 0:
            # Chunks start whole, and what the batch lacks may be less than one: the last chunk starts nevertheless, and
            # what it has too much is discarded. With staleness the chunks of later iterations fill the batch.
            groups -= self.chunk_prompts - 1
        return max(0, -(-groups // self.train_batch_size) - 1 - self.max_staleness)
