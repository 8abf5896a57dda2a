"""The ledger of dynamic sampling: decides which groups are trained, and in which iteration.

The filter stage enters the chunks in the order of the stream. The kept groups of an attempt are numbered, and the
number of a group determines the iteration that trains it. If a chunk comes again (because a worker died), it gets the
same decision. The ledger also records the last prompt that each iteration used: a resumed run starts with the next one.

With `max_staleness=0` the decisions depend only on the rows: a chunk starts only if the chunks before it do not fill
the batch, and surplus groups are discarded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.config import Config
from pipeline.derived import chunk_prompts

DECISIONS_KEPT = 1000
"""Number of newest chunks whose decisions are kept, because a chunk may come again."""


@dataclass(frozen=True)
class FilterRules:
    """Settings that the filter stage needs."""

    metric: str
    """`score`, or the name of a reward part: a group is kept only if its rows differ in this number."""
    max_num_gen_batches: int
    """Largest number of generated groups per iteration, as a multiple of `batch`."""
    carry: bool
    """True if surplus groups of an iteration train in the next one; else they are discarded."""
    batch: int
    """Number of groups that an iteration trains."""
    chunk_prompts: int
    """Number of groups in a chunk."""
    last_iteration: int
    """Number of the run's last iteration."""
    max_error_rate: float
    """Largest allowed fraction of generated rows whose reward failed."""

    @classmethod
    def of(cls, config: Config, iterations: int) -> "FilterRules":
        """Take the rules from the configuration of a run with `iterations` iterations."""
        groups = config.algorithm.filter_groups
        return cls(
            groups.metric or "",
            groups.max_num_gen_batches,
            groups.surplus == "carry",
            config.data.train_batch_size,
            chunk_prompts(config),
            iterations,
            config.reward.max_error_rate,
        )


@dataclass(frozen=True)
class ChunkStats:
    """Counts of a chunk of scored rows."""

    groups: int
    """Number of groups in the chunk."""
    kept: Sequence[int]
    """Numbers in the chunk, from 0, of the groups whose rows differ in the metric."""
    equal: int = 0
    """Number of groups whose rows all have the same value of the metric."""
    failed: int = 0
    """Number of groups with fewer than two rows whose reward did not fail."""
    rows: int = 0
    """Number of rows in the chunk."""
    errors: int = 0
    """Number of rows whose reward failed."""
    score: float = 0.0
    """Sum of the scores of all other rows."""


@dataclass
class IterationStats:
    """Counts of the rows generated for one iteration so far; fields without a description are as in `ChunkStats`."""

    groups: int = 0
    equal: int = 0
    failed: int = 0
    surplus: int = 0
    """Number of kept groups beyond the ones that the iteration needed."""
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
        """Compute the metrics `filter_groups/...` of an iteration that trains `batch` groups."""
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
    """The decision about the groups of a chunk."""

    iteration: int
    """Number of the iteration that trains the chunk's first kept group."""
    first: int
    """Number in the attempt, from 0, of the chunk's first kept group."""
    taken: int
    """Number of the chunk's kept groups that are trained; the kept groups after these are discarded."""
    stats: IterationStats
    """Counts of `iteration` so far."""
    full: bool
    """True if the iteration has all of its groups with this chunk."""
    exhausted: bool
    """True if the iteration lacks groups, and `max_num_gen_batches` allows no more."""
    used: tuple[int, int] = (0, 0)
    """If `full`, the end of the iteration's prompts: the number of a batch of prompts in the attempt, and the number of
    prompts of this batch that are used."""


@dataclass
class Ledger:
    """The ledger of one attempt."""

    rules: FilterRules
    base: int
    """Policy version with which the attempt began."""
    kept: int = 0
    """Number of groups so far that are trained."""
    dropped: int = 0
    """Number of groups so far that are not trained."""
    following: int = 0
    """Number of the next chunk, from 0."""
    _stats: IterationStats = field(default_factory=IterationStats)
    _decisions: dict[int, Decision] = field(default_factory=dict)

    def known(self, chunk: int) -> Decision | None:
        """Return the decision about a chunk that came before; None for a new chunk."""
        return self._decisions.get(chunk)

    def decide(self, chunk: int, found: ChunkStats) -> Decision:
        """Enter the next chunk, with the counts `found`, and decide about its groups."""
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
        """Return (batch, prompts): the end of the first `used` prompts of a chunk, as a batch of prompts in the attempt
        and the number of prompts of this batch up to there."""
        # The end of a batch counts as this batch, since the next one may not have been made yet.
        chunks = self.rules.batch // self.rules.chunk_prompts
        batch = chunk // chunks
        return batch, (chunk - batch * chunks) * self.rules.chunk_prompts + used
