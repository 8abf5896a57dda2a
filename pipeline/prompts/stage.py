"""The prompt stage of the pipeline: an actor that gets numbers of pages and returns the prompts of each page.

A **page** consists of the prompts of one or several whole iterations, and of the validation rows that are due between
them. The validation rows of a policy version come before the first prompts that need this version, so both are admitted
together. The policy store sets the pace: a page is made when its first iteration is about to be admitted, so the stage
never reads far ahead of training, however large the data. The store keeps the position at which each iteration ends; a
restarted actor and a resumed run continue there.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pipeline.config import Config
from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.trainer import TrainerConfig
from pipeline.derived import chunk_prompts, uses_filter
from pipeline.models.processor import load_vision
from pipeline.models.tokenizer import load_tokenizer
from pipeline.prompts import files
from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.encode import PromptEncoder, stamp, to_table
from pipeline.prompts.generator import make_generator
from pipeline.prompts.loader import PromptLoader
from pipeline.prompts.parquet import check_prompts
from pipeline.prompts.quarantine import Quarantine
from pipeline.prompts.sampler import STATELESS_SAMPLERS, make_sampler
from pipeline.rows import prompt_columns
from pipeline.sampling import RowLimits
from pipeline.store.client import StoreClient
from pipeline.store.cursor import PromptCursor
from pipeline.store.policy_store import PolicyStore
from pipeline.store.prompt_ledger import PromptBatch
from pipeline.store.status import TrainerState

MAX_PAGES = 256
"""Maximum number of pages in a run: Ray Data creates a block per page at the start."""
PAGE_PROMPTS = 256
"""Maximum number of prompts in a page that holds several iterations. Such pages are used if prompts do not depend on
earlier scores, since making a page takes as long as making a chunk."""
LOOKAHEAD = 1
"""Number of iterations by which prompts are made before they are admitted to generation."""


@dataclass(frozen=True)
class Schedule:
    """The iterations of a run, the policy versions to validate, and the division of iterations into pages."""

    iterations: int
    """Number of iterations of the run, which is also the number of the last one."""
    chunks_per_iteration: int
    chunk_prompts: int
    validation: bool
    val_before_train: bool
    test_freq: int
    max_staleness: int = 0
    """`algorithm.max_staleness`: number of versions by which a row may be older than the policy that trains on it."""
    max_num_gen_batches: int | None = None
    """With dynamic sampling: maximum number of prompt batches per iteration; a page then consists of batches. None
    without dynamic sampling."""
    page_prompts: int = 0
    """Maximum number of prompts in a page of several iterations, if no validation lies between them; 0 for one
    iteration per page."""

    @classmethod
    def of(cls, config: Config, iterations: int) -> "Schedule":
        return cls(
            iterations,
            config.data.train_batch_size // chunk_prompts(config),
            chunk_prompts(config),
            bool(config.data.val_files),
            config.trainer.val_before_train,
            config.trainer.test_freq,
            config.algorithm.max_staleness,
            config.algorithm.filter_groups.max_num_gen_batches if uses_filter(config) else None,
            PAGE_PROMPTS if config.data.generator is None and config.data.sampler in STATELESS_SAMPLERS else 0,
        )

    @property
    def page_iterations(self) -> int:
        if self.max_num_gen_batches is not None:
            # Validation rows come before a page, and every version must generate the first batch of one.
            often = self.validation and self.test_freq > 0
            return 1 if often else -(-self.iterations * self.max_num_gen_batches // MAX_PAGES)
        fitting = self.page_prompts // (self.chunks_per_iteration * self.chunk_prompts)
        if self.validation and self.test_freq > 0:
            fitting = min(fitting, self.test_freq)
        return max(1, fitting, -(-self.iterations // MAX_PAGES))

    @property
    def pages(self) -> int:
        """Number of pages of a run from its start: the pages of its iterations, and one for the last validation."""
        if self.max_num_gen_batches is not None:
            ahead = LOOKAHEAD + self.max_staleness
            return -(-(self.iterations * self.max_num_gen_batches + ahead) // self.page_iterations) + 1
        return -(-self.iterations // self.page_iterations) + 1

    @property
    def feedback_lag(self) -> int:
        """Number of iterations between an iteration and the first one with prompts that may depend on its scores.

        The prompts of a page are made when the version `max_staleness + 2` iterations before its first iteration is
        current. The lag is the same for all iterations of a page, so a resumed run may divide pages differently.
        """
        return self.max_staleness + 1 + self.page_iterations

    @property
    def validation_lag(self) -> int:
        """Maximum number of iterations that may be trained after a policy version before its validation is recorded."""
        # Batches are made one page ahead, and validation rows are between pages.
        return self.max_staleness + (self.max_num_gen_batches is not None)

    def validates(self, version: int, last: bool) -> bool:
        """Return True if policy version `version` is validated.

        Args:
            version: number of the version; 0 is the initial policy.
            last: True if this is the last version of the run, which is always validated.
        """
        if not self.validation:
            return False
        if version == 0:
            return self.val_before_train
        return last or (self.test_freq > 0 and version % self.test_freq == 0)

    def reached(self, base: int, done: int) -> int:
        """Return the oldest policy version that may generate the prompts after `done` iterations of an attempt.

        Args:
            base: version with which the attempt (a start or a resume of the run) began.
            done: number of iterations of the attempt before these prompts; -1 returns `base - 1`.
        """
        return base + max(0, done - self.max_staleness) if done >= 0 else base - 1


def loaders(
    data: DataConfig,
    model: ModelConfig,
    limits: Mapping[str, RowLimits],
    seed: int,
    run_dir: str | None = None,
    epochs: int | None = None,
    lag: int = 1,
) -> tuple[PromptLoader, PromptLoader | None]:
    """Return (loader of training prompts, loader of validation prompts); the second is None without validation files.

    Args:
        data: the section `data`.
        model: the section `model`; its tokenizer is used.
        limits: what rows may request, by split: the result of `sampling.row_limits`.
        seed: `trainer.seed`.
        run_dir: folder of the run, for unusable rows and recorded trajectories; None: unusable rows are only counted.
        epochs, lag: as in `PromptLoader`.

    Raises:
        ValueError, FileNotFoundError, OSError: a file, the tokenizer, the sampler or the generator cannot be used.
    """
    check = functools.partial(check_prompts, prompt_key=data.prompt_key)
    train = files.resolve(data.train_files, "data.train_files", check) if data.train_files else []
    val = files.resolve(data.val_files, "data.val_files", check) if data.val_files else None
    # A wrong file is refused before the seconds that importing transformers takes.
    chat = ChatTokenizer(load_tokenizer(model), data)
    quarantine = Quarantine(data.max_bad_rows, run_dir)
    vision = load_vision(model) if model.vision != "none" else None
    encoders = {split: PromptEncoder(chat, quarantine, limits[split], vision) for split in ("train", "val")}
    made = make_sampler(data, seed), make_generator(data, seed)
    training = PromptLoader(train, data, encoders["train"], seed, "train", *made, epochs, run_dir or "", lag)
    return training, PromptLoader(val, data, encoders["val"], seed, "val") if val else None


class Prompts:
    """Make the prompts of a run, page by page. The prompt stage has one actor, of this class.

    Without dynamic sampling, a page has `Schedule.page_iterations` iterations. With dynamic sampling, the number of
    prompts of an iteration is known only when the iteration is full. A page then has `Schedule.page_iterations`
    **batches** of prompts, each as large as an iteration. The stage repeats the data as often as needed, and ends when
    the last iteration is trained. Engines generate no surplus prompts (`PolicyStore.admit`).

    With dynamic sampling, the validation rows of a version come before the first page that is made while that version
    is current. The version stays current until these rows are recorded, and generates at least one batch, so such a
    page exists.
    """

    def __init__(
        self,
        data: DataConfig,
        model: ModelConfig,
        trainer: TrainerConfig,
        limits: Mapping[str, RowLimits],
        schedule: Schedule,
        store: StoreClient,
        run_dir: str,
    ):
        """Load the prompts.

        Raises:
            ValueError: `loaders` raises it; or a sampler or generator learns from scores, with dynamic sampling.
        """
        self._schedule, self._store, self._deadlines = schedule, store, trainer.deadlines
        self._endless = schedule.max_num_gen_batches is not None
        epochs = None if trainer.total_training_steps or self._endless else trainer.total_epochs
        self._loader, self._val = loaders(data, model, limits, trainer.seed, run_dir, epochs, schedule.feedback_lag)
        if self._endless and self._loader.learns:
            raise ValueError(
                f"data.sampler={data.sampler} learns from the outcomes of earlier prompts, but with "
                "algorithm.filter_groups.enable=true dropped groups are not recorded; use a sampler that does not "
                "learn"
            )
        self._next_page = -1
        self._last: int | None = None
        """The last policy version that generates rows, once the prompts have ended."""
        self._made: list[PromptBatch] = []
        """Batches that were made but are not yet reported to the policy store."""

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the rows of the page with the number in column `id`; no rows after the end of data or iterations."""
        page = table["id"][0].as_py()
        trainer = self._store.wait(PolicyStore.trainer_state, self._deadlines.engine_start)
        made = self._batches(page, trainer) if self._endless else self._iterations(page, trainer)
        columns = prompt_columns(self._loader.encoder.vision is not None)
        return pa.concat_tables([columns.empty_table(), *made])

    def _iterations(self, page: int, trainer: TrainerState) -> Iterator[pa.Table]:
        """Yield the rows of page `page`, without dynamic sampling."""
        schedule, base = self._schedule, trainer.version
        before = page * schedule.page_iterations  # iterations of this attempt before the page
        # A restarted actor may make the page in which the prompts ended again, so the version matters.
        self._last = self._store.call(PolicyStore.last_version)
        if self._past_end(base + before):
            return
        chunk = before * schedule.chunks_per_iteration
        self._store.wait(PolicyStore.wait_prompts_due, chunk, LOOKAHEAD, self._deadlines.admission)
        if page != self._next_page:
            self._loader.load(self._store.call(PolicyStore.begin_of_batch, before))
        self._next_page = page + 1
        for done in range(before, before + schedule.page_iterations):
            yield from self._iteration(base + done, done, trainer)
        self._report()

    def _iteration(self, version: int, done: int, trainer: TrainerState) -> Iterator[pa.Table]:
        """Yield the rows of iteration `version + 1`, and before them the validation rows of the versions that this
        iteration is the first to need. If the prompts have ended, yield all remaining validation rows.

        Args:
            version: policy version before the iteration.
            done: number of iterations of this attempt before it.
            trainer: state of the trainer at the start of the attempt.
        """
        schedule, base = self._schedule, trainer.version
        if self._past_end(version):
            return
        batch = schedule.chunks_per_iteration * schedule.chunk_prompts
        rows = self._loader.iteration(version + 1, batch) if version < schedule.iterations else []
        last = len(rows) < batch
        until = version if last else schedule.reached(base, done)
        for due in range(schedule.reached(base, done - 1) + 1, until + 1):
            if schedule.validates(due, last and due == version):
                yield from self._validation(due, trainer)
        if last:
            self._report()
            self._store.call(PolicyStore.end_prompts, version)
            self._last = version
            return
        yield from self._chunks(rows, done, version + 1)
        self._made.append(PromptBatch(done + 1, self._cursor(version + 2), self._loader.counts(), version + 1))

    def _batches(self, page: int, trainer: TrainerState) -> Iterator[pa.Table]:
        """Yield the rows of page `page`, with dynamic sampling; no rows after the last iteration is trained."""
        schedule = self._schedule
        first = page * schedule.page_iterations
        # The last chunk of the first batch: validation rows of a version follow the pages made before it, and none of
        # their chunks may need the version after it, which waits for the validation.
        chunk = (first + 1) * schedule.chunks_per_iteration - 1
        grant = self._store.wait(PolicyStore.grant_page, page, chunk, LOOKAHEAD, self._deadlines.admission)
        if grant.first and schedule.validates(grant.version, grant.over):
            yield from self._validation(grant.version, trainer)
        if grant.over:
            self._store.call(PolicyStore.end_prompts, grant.version)
            return
        if page != self._next_page:
            cursor = self._store.call(PolicyStore.begin_of_batch, first)
            self._loader.load(cursor)
            if cursor.skip:
                # These prompts were trained, or dropped, before the run stopped.
                self._loader.iteration(cursor.batch, cursor.skip)
        self._next_page = page + 1
        for batch in range(first, first + schedule.page_iterations):
            number = trainer.cursor.batch + batch
            self._made.append(PromptBatch(batch, self._cursor(number), self._loader.counts()))
            self._report()
            rows = self._loader.iteration(number, schedule.chunks_per_iteration * schedule.chunk_prompts)
            # Only the filter stage knows which iteration trains a row.
            yield from self._chunks(rows, batch, None)

    def _chunks(self, rows: list[dict[str, Any]], batch: int, iteration: int | None) -> Iterator[pa.Table]:
        """Yield the chunks of a batch, with the columns split, chunk and iteration.

        Args:
            rows: prompts of the batch.
            batch: number of the batch in this attempt, from 0.
            iteration: number of the iteration; None if not known yet.
        """
        chunks, size = self._schedule.chunks_per_iteration, self._schedule.chunk_prompts
        for chunk in range(chunks):
            prompts = to_table(rows[chunk * size : (chunk + 1) * size], self._loader.encoder.columns)
            yield stamp(prompts, "train", batch * chunks + chunk, iteration)

    def _cursor(self, number: int) -> PromptCursor:
        """Return the loader's current position as the beginning of batch `number` of the run."""
        return replace(self._loader.cursor, batch=number)

    def _report(self) -> None:
        """Report the batches in `_made` to the policy store."""
        if self._made:
            self._store.call(PolicyStore.report_prompts, self._made)
            self._made = []

    def _validation(self, version: int, trainer: TrainerState) -> Iterator[pa.Table]:
        # The version from which a run resumes was validated before the run stopped, unless a signal stopped it.
        if version == trainer.version and version > 0 and trainer.validated:
            self._store.call(PolicyStore.announce_validation, version, 0)
            return
        assert self._val is not None
        size, rows = self._schedule.chunk_prompts, 0
        for prompts in self._val.epoch(size):
            rows += len(prompts)
            yield stamp(prompts, "val", -1, version)
            # Every chunk has the same number of rows. The padding of the last one is neither generated nor recorded.
            yield from [stamp(prompts.slice(0, 1), "pad", -1, version)] * (size - len(prompts))
        self._store.call(PolicyStore.announce_validation, version, rows)

    def _past_end(self, version: int) -> bool:
        return self._last is not None and version > self._last
