"""The prompt stage: page numbers in, the prompts of those iterations out.

A **page** is the prompts of a few whole iterations, with the validation rows that are due between them: those of a
version stand before the first prompts that need it, so that they are admitted together. One actor turns pages into
rows, one after the other, and the policy store paces it: a page is made when its first iteration is about to be
admitted, so the source never runs ahead of the run, however large the data. The position behind every iteration is left
in the store; a restarted actor and a resumed run go on from there.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from pipeline.ask import ask
from pipeline.config import Config
from pipeline.overlap import ahead
from pipeline.prompts import files
from pipeline.prompts.chat import ChatTokenizer, load_tokenizer
from pipeline.prompts.encode import Encoder, stamp, to_table
from pipeline.prompts.feedback import lag
from pipeline.prompts.generator import make_generator
from pipeline.prompts.quarantine import Quarantine
from pipeline.prompts.recorded import RecordedSupply
from pipeline.prompts.recording import Recording
from pipeline.prompts.sampler import SETTLED, make_sampler
from pipeline.prompts.source import PromptSource
from pipeline.prompts.supply import Supply
from pipeline.rollout.sampling import RowLimits
from pipeline.rows import PROMPT
from pipeline.stages import begun_prompts, uses_filter
from pipeline.track.history import read_history

MAX_PAGES = 256
"""Pages of a run: each of them is a block from the start."""
PAGE_PROMPTS = 256
"""Prompts of a page, where those of an iteration are fewer and it need not wait for what became of others: a page costs
as much as the way of a chunk."""
LOOKAHEAD = 1
"""Iterations whose prompts are made before they are admitted."""


@dataclass(frozen=True)
class Schedule:
    """Which iterations there are, which policy versions are validated, and how iterations are laid into pages."""

    iterations: int
    """Number of the last iteration."""
    chunks_per_iteration: int
    chunk_prompts: int
    validation: bool
    val_before_train: bool
    test_freq: int
    max_staleness: int = 0
    """Versions that engines may be ahead."""
    max_num_gen_batches: int | None = None
    """With dynamic sampling: batches of prompts that an iteration may take. Pages are then of batches."""
    more_prompts: int = 0
    """Prompts that a chunk begins with beyond `chunk_prompts`."""
    page_prompts: int = 0
    """Prompts of whole iterations that go into one page, as far as no validation stands between them."""

    @classmethod
    def of(cls, config: Config, iterations: int) -> "Schedule":
        return cls(
            iterations,
            config.data.train_batch_size // config.rollout.chunk_prompts,
            config.rollout.chunk_prompts,
            bool(config.data.val_files),
            config.trainer.val_before_train,
            config.trainer.test_freq,
            ahead(config),
            config.algorithm.filter_groups.max_num_gen_batches if uses_filter(config) else None,
            begun_prompts(config) - config.rollout.chunk_prompts,
            PAGE_PROMPTS if config.data.generator is None and config.data.sampler in SETTLED else 0,
        )

    @property
    def begun_prompts(self) -> int:
        """Prompts that a chunk begins with."""
        return self.chunk_prompts + self.more_prompts

    @property
    def page_iterations(self) -> int:
        if self.max_num_gen_batches is not None:
            # Validation rows stand in front of a page, and every version must generate the first batch of one.
            often = self.validation and self.test_freq > 0
            return 1 if often else -(-self.iterations * self.max_num_gen_batches // MAX_PAGES)
        fitting = self.page_prompts // (self.chunks_per_iteration * self.begun_prompts)
        if self.validation and self.test_freq > 0:
            fitting = min(fitting, self.test_freq)
        return max(1, fitting, -(-self.iterations // MAX_PAGES))

    @property
    def pages(self) -> int:
        """Pages of a run from the start: those of the iterations, and one for the last validation."""
        if self.max_num_gen_batches is not None:
            ahead = LOOKAHEAD + self.max_staleness
            return -(-(self.iterations * self.max_num_gen_batches + ahead) // self.page_iterations) + 1
        return -(-self.iterations // self.page_iterations) + 1

    def validates(self, version: int, last: bool) -> bool:
        """Whether policy `version` is validated; the last one always is."""
        if not self.validation:
            return False
        if version == 0:
            return self.val_before_train
        return last or (self.test_freq > 0 and version % self.test_freq == 0)

    def reached(self, base: int, done: int) -> int:
        """The version that the prompts of the iteration after `done` iterations of a generation need, which began with
        version `base`; `base - 1` before the first one."""
        return base + max(0, done - self.max_staleness) if done >= 0 else base - 1

    @property
    def validation_lag(self) -> int:
        """Iterations that may be trained past a version before its validation is recorded, and no more."""
        # Batches are made one page ahead, and validation rows stand between pages.
        return self.max_staleness + (self.max_num_gen_batches is not None)


def sources(config: Config, run_dir: str | None = None) -> tuple[PromptSource, PromptSource | None]:
    """The training source and, where there are validation files, the validation source.

    Args:
        config: settings of the run.
        run_dir: where unusable rows are set aside; None only counts them.

    Raises:
        ValueError, FileNotFoundError, OSError: a file, the tokenizer or the sampler cannot be used.
    """
    data, seed = config.data, config.trainer.seed
    chat = ChatTokenizer(load_tokenizer(config.model), data)
    quarantine = Quarantine(data.max_bad_rows, run_dir)
    train = files.resolve(data.train_files, "data.train_files", data.prompt_key) if data.train_files else []
    val = files.resolve(data.val_files, "data.val_files", data.prompt_key) if data.val_files else None
    for_train, for_val = (Encoder(chat, quarantine, RowLimits.of(config, split)) for split in ("train", "val"))
    return (
        PromptSource(train, data, for_train, seed, sampler=make_sampler(data, seed)),
        PromptSource(val, data, for_val, seed, split="val") if val else None,
    )


def first_generated(config: Config, source: PromptSource) -> list[dict[str, Any]]:
    """What the generator makes for the first iteration of a run, as rows of `encode.COLUMNS`; none without one.

    Raises:
        ValueError: the generator cannot be made, or gives what it must not.
    """
    supply = Supply(source, make_generator(config.data, config.trainer.seed), epochs=1, lag=1)
    rows = supply.iteration(1, config.data.train_batch_size) if supply.generator else []
    return rows[: supply.generated]


class Prompts:
    """The one actor of the prompt stage."""

    def __init__(
        self, config: Config, schedule: Schedule, store: Any, generation: int, run_dir: str, endless: bool = False
    ):
        self._config, self._schedule = config, schedule
        self._store, self._generation, self._run_dir = store, generation, run_dir
        data, trainer = config.data, config.trainer
        epochs = None if trainer.total_training_steps or endless else trainer.total_epochs
        self._supply: Supply | RecordedSupply
        if data.recorded_run is not None:
            self._val = None
            self._supply = RecordedSupply(Recording(data.recorded_run, data.recorded_iterations), epochs)
        else:
            train, self._val = sources(config, run_dir)
            generator = make_generator(data, trainer.seed)
            page_lag = lag(config.algorithm.max_staleness, schedule.page_iterations)
            self._supply = Supply(train, generator, epochs, run_dir, page_lag)
        self._next_page = -1
        self._last: int | None = None
        """The last policy version that generates rows, once the prompts have ended."""
        self._made: list[tuple[int, Any, dict[str, int]]] = []
        """Iterations of which the store has not been told, with the positions at which they end and their metrics."""

    def __call__(self, table: pa.Table) -> pa.Table:
        """The rows of one page; none once the data or the iterations are used up."""
        page = table["id"][0].as_py()
        schedule, deadlines = self._schedule, self._config.trainer.deadlines
        before = page * schedule.page_iterations  # iterations of this generation before the page
        base, _ = self._wait("start", deadlines.engine_start)
        # Not merely whether the end is known: a restarted actor makes the page again in which it came.
        self._last = self._ask("ended")
        if self._past_end(base + before):
            return PROMPT.empty_table()
        self._wait("pace", before * schedule.chunks_per_iteration, LOOKAHEAD, deadlines.admission)
        if page != self._next_page:
            self._supply.load(self._ask("position", base + before))
        self._next_page = page + 1
        made = [PROMPT.empty_table()]
        for done in range(before, before + schedule.page_iterations):
            made += self._iteration(base + done, done)
        self._tell()
        return pa.concat_tables(made)

    def _iteration(self, version: int, done: int) -> Iterator[pa.Table]:
        """Rows of iteration `version + 1`, `done` iterations into this generation, behind the validations of versions
        that they are the first to need; where the prompts have ended, all validations that are left."""
        schedule, base = self._schedule, version - done
        if self._past_end(version):
            return
        batch, size = schedule.chunks_per_iteration * schedule.begun_prompts, schedule.begun_prompts
        rows = self._supply.iteration(version + 1, batch) if version < schedule.iterations else []
        last = len(rows) < batch
        until = version if last else schedule.reached(base, done)
        for due in range(schedule.reached(base, done - 1) + 1, until + 1):
            if schedule.validates(due, last and due == version):
                yield from self._validation(due, base)
        if last:
            self._tell()
            self._ask("end", version)
            self._last = version
            return
        first = done * schedule.chunks_per_iteration
        for chunk in range(schedule.chunks_per_iteration):
            prompts = to_table(rows[chunk * size : (chunk + 1) * size])
            yield stamp(prompts, "train", first + chunk, version + 1)
        # A copy: samplers and generators may go on with what they gave as their state.
        self._made.append((version + 1, copy.deepcopy(self._supply.state), self._supply.counts()))

    def _tell(self) -> None:
        """Tell the store of the iterations that have been made."""
        if self._made:
            self._ask("made", self._made)
            self._made = []

    def _validation(self, version: int, base: int) -> Iterator[pa.Table]:
        # What a resumed run starts from was validated before it stopped, unless the stop cut the validation off.
        if version == base and version > 0 and not self._cut_off(version):
            self._ask("validation", version, 0)
            return
        assert self._val is not None
        size, rows = self._schedule.begun_prompts, 0
        for prompts in self._val.validation_rows(size):
            rows += len(prompts)
            yield stamp(prompts, "val", -1, version)
            # Every chunk has the same number of rows; what fills up the last one is neither generated nor recorded.
            yield from [stamp(prompts.slice(0, 1), "pad", -1, version)] * (size - len(prompts))
        self._ask("validation", version, rows)

    def _cut_off(self, version: int) -> bool:
        """Whether the iteration is recorded, and its validation is not."""
        for record in reversed(read_history(Path(self._run_dir) / "metrics.jsonl")):
            if record["iteration"] == version:
                return not any(name.startswith("val-") for name in record)
        return False

    def _past_end(self, version: int) -> bool:
        return self._last is not None and version > self._last

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the store that answers at once."""
        return ask(self._store, method, self._generation, *args)

    def _wait(self, method: str, *args: Any) -> Any:
        """Call a method of the store that waits; its last argument is its deadline, which a living run extends."""
        return ray.get(getattr(self._store, method).remote(self._generation, *args), timeout=None)
