"""Dynamic sampling's ledger: which groups are trained, by which iteration, and the end of its prompts.

The filter stage keeps it, chunk by chunk in the order of the stream. The kept groups of an attempt are numbered, and a
group's number determines the iteration that trains it. A chunk may come again (a worker died) and gets the same
decision. For each iteration the ledger gives the chunk and offset of its end; a resumed run starts with the next
prompt.

With `max_staleness=0` all of this follows only from the rows: a chunk starts if the chunks before it do not fill the
batch, and surplus groups are discarded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.config import Config

DECISIONS_KEPT = 1000
"""Number of latest chunks whose decisions are kept, because they may come again."""


@dataclass(frozen=True)
class FilterRules:
    """Settings that the filter stage needs."""

    metric: str
    """`score`, or a part of the reward, that must differ in a group."""
    max_num_gen_batches: int
    carry: bool
    """True if the next iteration trains surplus groups."""
    batch: int
    """Groups of an iteration."""
    chunk_prompts: int
    last_iteration: int
    max_error_rate: float

    @classmethod
    def of(cls, config: Config, iterations: int) -> "FilterRules":
        """Return the rules of a run with `iterations` iterations."""
        groups = config.algorithm.filter_groups
        return cls(
            groups.metric or "",
            groups.max_num_gen_batches,
            groups.surplus == "carry",
            config.data.train_batch_size,
            config.rollout.chunk_prompts,
            iterations,
            config.reward.max_error_rate,
        )


@dataclass(frozen=True)
class ChunkStats:
    """Counts of a chunk of scored rows."""

    groups: int
    kept: Sequence[int]
    """Positions in the chunk, from 0, of the groups that do not agree."""
    equal: int = 0
    """Groups that agree."""
    failed: int = 0
    """Groups with fewer than two rows whose reward did not fail."""
    rows: int = 0
    errors: int = 0
    """Rows whose reward failed."""
    score: float = 0.0
    """Sum over the other rows."""


@dataclass
class IterationStats:
    """Counts of the rows generated for one iteration."""

    groups: int = 0
    equal: int = 0
    failed: int = 0
    surplus: int = 0
    """Kept groups that exceed the iteration."""
    rows: int = 0
    errors: int = 0
    score: float = 0.0

    def add(self, chunk: ChunkStats) -> None:
        self.groups += chunk.groups
        self.equal += chunk.equal
        self.failed += chunk.failed
        self.rows += chunk.rows
        self.errors += chunk.errors
        self.score += chunk.score

    def metrics(self, batch: int) -> dict[str, float]:
        """Metrics of an iteration of `batch` groups."""
        metrics = {
            "generated": self.groups,
            "gen_batches": self.groups / batch,
            "dropped_ratio": (self.equal + self.failed) / self.groups,
            "equal": self.equal,
            "failed": self.failed,
            "surplus": self.surplus,
            "error_rate": self.errors / self.rows if self.rows else 0.0,
        }
        if scored := self.rows - self.errors:
            metrics["score_mean"] = self.score / scored
        return {f"filter_groups/{name}": value for name, value in metrics.items()}


@dataclass(frozen=True)
class Decision:
    """The decision about the kept groups of a chunk."""

    iteration: int
    """The iteration that trains the first kept group."""
    first: int
    """Number of the first kept group in the attempt."""
    taken: int
    """Number of kept groups that are trained; later ones are surplus."""
    stats: IterationStats
    """Counts of `iteration` so far."""
    full: bool
    """True if the chunk fills the iteration."""
    exhausted: bool
    """True if the iteration is not full, and no more rows may be generated for it."""
    used: tuple[int, int] = (0, 0)
    """End of a full iteration: a batch of prompts of the attempt, and the number of its prompts that are used."""


@dataclass
class Ledger:
    """The ledger of one attempt, which began with policy version `base`."""

    rules: FilterRules
    base: int
    kept: int = 0
    """Number of groups that are trained, so far."""
    dropped: int = 0
    following: int = 0
    """The chunk that comes next."""
    _stats: IterationStats = field(default_factory=IterationStats)
    _decisions: dict[int, Decision] = field(default_factory=dict)

    def known(self, chunk: int) -> Decision | None:
        """Return an earlier decision about a chunk."""
        return self._decisions.get(chunk)

    def decide(self, chunk: int, found: ChunkStats) -> Decision:
        """Enter the next chunk."""
        rules = self.rules
        first, kept = self.kept, len(found.kept)
        room = rules.batch - first % rules.batch
        iteration = self.base + first // rules.batch + 1
        full = kept >= room
        taken = room if full and not rules.carry else kept
        # Chunks that were in flight as the last iteration became full contribute nothing.
        taken = max(0, min(taken, (rules.last_iteration - self.base) * rules.batch - first))
        full = full and taken > 0
        self.kept += taken
        self.dropped += found.groups - taken
        self.following = chunk + 1
        self._stats.add(found)
        stats, used = self._stats, (0, 0)
        if full:
            stats.surplus = kept - room
            # Prompts of carried groups belong to the iteration that trains them.
            rest = rules.carry and kept > room
            used = self._place(chunk, found.kept[room - 1] + 1 if rest else rules.chunk_prompts)
            self._stats = IterationStats()
        exhausted = not full and stats.groups >= rules.max_num_gen_batches * rules.batch
        self._decisions[chunk] = Decision(iteration, first, taken, stats, full, exhausted, used)
        self._decisions.pop(chunk - DECISIONS_KEPT, None)
        return self._decisions[chunk]

    def _place(self, chunk: int, used: int) -> tuple[int, int]:
        """Locate prompt `used` of a chunk: its batch in the attempt, and the number of that batch's prompts before
        it."""
        # A place at the end of a batch stays in that batch: the next one may not have been made yet.
        chunks = self.rules.batch // self.rules.chunk_prompts
        batch = chunk // chunks
        return batch, (chunk - batch * chunks) * self.rules.chunk_prompts + used
