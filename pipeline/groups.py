"""Dynamic sampling: the account of which groups are trained, and what that asks of admission.

Groups that agree are left out behind the reward stage (`pipeline/advantage/filter.py`), and others take their place.
The policy store keeps the account, chunk by chunk in the order of the stream:

- The kept groups of a generation are numbered. A number says which iteration trains the group, and which chunk it is
  dealt to a train worker in, so the trainer gets full batches however many groups were left out.
- A chunk may be asked for again (a worker died): the answer is the one of the first time.
- Iteration k ends at a place in a chunk. The prompts up to there are used up, and a resumed run goes on behind them.

With `max_staleness=0` all of this follows from the rows, whatever came first: a chunk starts if the chunks before it do
not fill the batch, and what their kept groups leave over is discarded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.prompts.place import with_more, without

if TYPE_CHECKING:
    from pipeline.config import Config


@dataclass(frozen=True)
class DynamicSampling:
    """What the policy store has to know of it."""

    iterations: int
    """Number of the last iteration of the run."""
    max_num_gen_batches: int
    carry: bool
    """Whether groups that an iteration has no room for go into the next one."""
    more_prompts: int = 0
    """Prompts that a chunk begins with beyond the groups that it has."""

    @classmethod
    def of(cls, config: "Config", iterations: int) -> "DynamicSampling | None":
        """As `config` says; None where groups are not filtered."""
        from pipeline.stages import begun_prompts, uses_filter

        if not uses_filter(config):
            return None
        groups = config.algorithm.filter_groups
        more = begun_prompts(config) - config.rollout.chunk_prompts
        return cls(iterations, groups.max_num_gen_batches, groups.surplus == "carry", more)


@dataclass(frozen=True)
class Found:
    """What is in a chunk of scored rows."""

    groups: int
    kept: list[int]
    """Places in the chunk, from 0, of the groups that do not agree."""
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
class Tally:
    """What was generated for one iteration."""

    groups: int = 0
    equal: int = 0
    failed: int = 0
    surplus: int = 0
    """Groups that do not agree, and that the iteration had no room for."""
    rows: int = 0
    errors: int = 0
    score: float = 0.0

    def add(self, found: Found) -> None:
        for name in ("groups", "equal", "failed", "rows", "errors", "score"):
            setattr(self, name, getattr(self, name) + getattr(found, name))

    def metrics(self, batch: int) -> dict[str, float]:
        """Metrics of an iteration of `batch` groups."""
        scored = self.rows - self.errors
        return {
            "filter_groups/generated": self.groups,
            "filter_groups/gen_batches": self.groups / batch,
            "filter_groups/dropped_ratio": (self.equal + self.failed) / self.groups,
            "filter_groups/equal": self.equal,
            "filter_groups/failed": self.failed,
            "filter_groups/surplus": self.surplus,
            "filter_groups/error_rate": self.errors / self.rows if self.rows else 0.0,
            **({"filter_groups/score_mean": self.score / scored} if scored else {}),
        }


@dataclass(frozen=True)
class Verdict:
    """What becomes of the kept groups of a chunk."""

    iteration: int
    """That trains the first one."""
    first: int
    """Number of the first one in the generation."""
    taken: int
    """How many go on; those behind them are surplus."""
    tally: Tally
    """Of `iteration` so far."""
    full: bool
    """Whether the chunk fills the iteration."""
    exhausted: bool
    """Whether no more may be generated for the iteration, which is not full."""


@dataclass(frozen=True)
class Opening:
    """When a page of prompts is made."""

    version: int
    """The current one."""
    first: bool
    """Whether no page before was made at this version."""
    over: bool
    """Whether the last iteration is trained, so that no prompt is needed any more."""


@dataclass
class Groups:
    """The account of one generation.

    Args:
        sampling: its rules.
        chunk_prompts: groups of a chunk.
        batch: groups of an iteration.
        base: policy version that the generation began with.
    """

    sampling: DynamicSampling
    chunk_prompts: int
    batch: int
    base: int
    kept: int = 0
    """Groups that go on so far."""
    dropped: int = 0
    """Groups that do not."""
    _tally: Tally = field(default_factory=Tally)
    _verdicts: dict[int, Verdict] = field(default_factory=dict)
    _ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    _states: dict[int, tuple[int, Any]] = field(default_factory=dict)
    _counts: dict[int, dict[str, int]] = field(default_factory=dict)
    _openings: dict[int, Opening] = field(default_factory=dict)

    @property
    def _prompts(self) -> int:
        """Of a chunk."""
        return self.chunk_prompts + self.sampling.more_prompts

    def settled(self, chunk: int) -> bool:
        """Whether the chunk is entered."""
        return chunk in self._verdicts

    def settle(self, chunk: int, found: Found) -> Verdict:
        """Enter a chunk; one that was entered before changes nothing."""
        if chunk in self._verdicts:
            return self._verdicts[chunk]
        first, kept = self.kept, len(found.kept)
        room = self.batch - first % self.batch
        iteration = self.base + first // self.batch + 1
        full = kept >= room
        taken = room if full and not self.sampling.carry else kept
        # Chunks that were under way when the last iteration filled up have nothing to give.
        taken = max(0, min(taken, (self.sampling.iterations - self.base) * self.batch - first))
        self.kept += taken
        self.dropped += found.groups - taken
        self._tally.add(found)
        tally, full = self._tally, full and taken > 0
        if full:
            tally.surplus = kept - room
            # Of what is carried, the prompts are used up by the iteration that trains it.
            rest = self.sampling.carry and kept > room
            self._ends[iteration] = (chunk, found.kept[room - 1] + 1 if rest else self._prompts)
            self._tally = Tally()
        exhausted = not full and tally.groups >= self.sampling.max_num_gen_batches * self.batch
        self._verdicts[chunk] = Verdict(iteration, first, taken, tally, full, exhausted)
        return self._verdicts[chunk]

    def needless(self, chunk: int) -> bool:
        """Whether the groups kept of the chunks before this one fill all iterations, if none of them is dropped."""
        left = (self.sampling.iterations - self.base) * self.batch
        return chunk * self.chunk_prompts - self.dropped >= left

    @property
    def filled(self) -> bool:
        """Whether the groups kept so far fill all iterations, so that nothing more is generated."""
        return self.kept >= (self.sampling.iterations - self.base) * self.batch

    def over(self, version: int) -> bool:
        """Whether `version` is what the run was to make."""
        return version >= self.sampling.iterations

    def open(self, page: int, version: int) -> Opening:
        """The page is made now, or was made before and is made again."""
        if page not in self._openings:
            before = max((opening.version for opening in self._openings.values()), default=-1)
            self._openings[page] = Opening(version, version > before, self.over(version))
        return self._openings[page]

    def opened(self, page: int) -> bool:
        return page in self._openings

    def set_batch(self, batch: int, number: int, state: Any, counts: dict[str, int]) -> None:
        """The batch of prompts `batch` of the generation, the run's `number`th, begins at `state` of the source."""
        self._states[batch], self._counts[batch] = (number, state), counts

    def batch_state(self, batch: int) -> Any:
        """Where a batch begins, as `resume` reads it.

        Raises:
            KeyError: it is not known (any more).
        """
        number, state = self._states[batch]
        return position(state, number, 0)

    def end_of(self, iteration: int) -> Any:
        """Where the prompts that `iteration` has used up end, as `resume` reads it.

        Raises:
            KeyError: it is not known (yet, or any more).
        """
        chunk, used = self._ends[iteration]
        batch = chunk * self.chunk_prompts // self.batch
        number, state = self._states[batch]
        # At the end of a batch, too: the next one may not have been made yet, and one place has one name.
        chunks = self.batch // self.chunk_prompts
        return position(state, number, (chunk - batch * chunks) * self._prompts + used)

    def metrics(self, verdict: Verdict, chunk: int) -> dict[str, float]:
        """Metrics of the iteration that `chunk` has filled."""
        counts = self._counts.get(chunk * self.chunk_prompts // self.batch, {})
        return counts | verdict.tally.metrics(self.batch)

    def forget(self, version: int) -> None:
        """Leave out what no part of a run at `version` can ask for."""
        known = [iteration for iteration in self._ends if iteration < version]
        if not known:
            return
        chunk, _ = self._ends[max(known)]
        batch = chunk * self.chunk_prompts // self.batch
        for old in [iteration for iteration in known if iteration != max(known)]:
            del self._ends[old]
        for entries, oldest in ((self._verdicts, chunk), (self._states, batch), (self._counts, batch)):
            for key in [key for key in entries if key < oldest]:
                del entries[key]
        for page in sorted(self._openings)[:-PAGES_KEPT]:
            del self._openings[page]


PAGES_KEPT = 1000
"""Pages that may be made again."""


def position(state: Any, number: int, skip: int) -> tuple[Any, ...]:
    """A place in the prompts: `skip` of them behind `state`, in the run's batch `number`. As JSON can hold it."""
    return with_more(state, batch=number, skip=skip)


def resume(place: Sequence[Any]) -> tuple[tuple[Any, ...], int, int]:
    """The state of the source, the number of the batch and the prompts to leave out, of a place that `position` made or
    that a run without dynamic sampling left."""
    state, own = without(place, "batch", "skip")
    return state, own.get("batch", 1), own.get("skip", 0)
