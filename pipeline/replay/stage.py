"""The first stage of a replay: an actor that gets numbers of pages and returns the recorded rows of their iterations.

The rows enter the stream at the reward stage, without engines or admission. Tokens and log-probs come from the
recording; numbers of iterations, chunks and policy versions come from the replay. So once the policy of the replay
differs from the recorded one, training is off-policy.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import rows
from pipeline.config.data import DataConfig
from pipeline.config.trainer import DeadlineConfig
from pipeline.prompts.stage import LOOKAHEAD, Schedule
from pipeline.replay.recording import Recording
from pipeline.store.client import StoreClient
from pipeline.store.cursor import PromptCursor
from pipeline.store.policy_store import PolicyStore
from pipeline.store.prompt_ledger import PromptBatch
from pipeline.store.status import TrainerState


class Replay:
    """Returns recorded rows, page by page. The stage has one actor, of this class.

    Args:
        data: the section `data`, which names the recording.
        baselines: True if the advantage estimator reads the recorded scores of greedy responses.
        episodes: True if the rows are episodes.
        images: True if prompts may have images.
        schedule: iterations and pages of the run.
        store: client of the policy store for this attempt (a start or a resume of the run).
        deadlines: the section `trainer.deadlines`.
    """

    def __init__(
        self,
        data: DataConfig,
        baselines: bool,
        episodes: bool,
        images: bool,
        schedule: Schedule,
        store: StoreClient,
        deadlines: DeadlineConfig,
    ):
        assert data.recorded_run is not None
        self._recording = Recording(data.recorded_run, data.recorded_iterations, baselines, episodes, images)
        self._schedule, self._store, self._deadlines = schedule, store, deadlines
        self._prompts = schedule.chunks_per_iteration * schedule.chunk_prompts
        names = [*rows.prompt_columns(images).names, *rows.ROLLOUT.names, *rows.AGENT.names * episodes]
        names += ["baseline"] * baselines
        self._schema = pa.schema([rows.SCHEMA.field(name) for name in names])

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the rows of the page with the number in column `id`; no rows after the last iteration."""
        schedule = self._schedule
        trainer = self._store.wait(PolicyStore.trainer_state, self._deadlines.engine_start)
        first = table["id"][0].as_py() * schedule.page_iterations
        iterations = range(first, min(first + schedule.page_iterations, schedule.iterations - trainer.version))
        if not iterations:
            return self._schema.empty_table()
        chunk = first * schedule.chunks_per_iteration
        self._store.wait(PolicyStore.wait_prompts_due, chunk, LOOKAHEAD, self._deadlines.admission)
        page = pa.concat_tables([self._rows(done, trainer) for done in iterations])
        self._store.call(PolicyStore.report_prompts, [self._end(done, trainer) for done in iterations])
        return page

    def _begin(self, done: int, trainer: TrainerState) -> int:
        """Return the number of the first group after `done` iterations of the attempt.

        In a further pass over the recording, numbers of groups continue.
        """
        return trainer.cursor.epoch * self._recording.groups + trainer.cursor.offset + done * self._prompts

    def _end(self, done: int, trainer: TrainerState) -> PromptBatch:
        """Return the report for the policy store on the iteration after `done` iterations of the attempt: the position
        at its end, and metrics."""
        iteration, end = trainer.version + done + 1, self._begin(done + 1, trainer)
        epoch, offset = divmod(end, self._recording.groups)
        metrics = {"prompts/recorded_iteration": self._recording.iteration_of(end - 1)}
        return PromptBatch(done + 1, PromptCursor(epoch, offset, batch=iteration + 1), metrics, iteration)

    def _rows(self, done: int, trainer: TrainerState) -> pa.Table:
        """Return the rows of the iteration after `done` iterations of the attempt."""
        schedule, recording = self._schedule, self._recording
        group = np.repeat(np.arange(self._prompts), recording.n)
        chunk = done * schedule.chunks_per_iteration + group // schedule.chunk_prompts
        begin = self._begin(done, trainer)
        recorded = recording.rows(begin, begin + self._prompts)
        epoch, offset = np.divmod(begin + group, recording.groups)
        # In each pass over the recording, a group gets another uid.
        again = pc.binary_join_element_wise(recorded["uid"], pa.array(epoch).cast(pa.string()), "/")
        count, version = len(group), schedule.reached(trainer.version, done)
        tokens = np.diff(rows.flat(recorded, "response_ids")[1])
        written = {
            "split": pa.repeat(pa.scalar("train"), count),
            "chunk": pa.array(chunk),
            "iteration": pa.array(np.full(count, trainer.version + done + 1)),
            "uid": pc.if_else(pa.array(epoch > 0), again, recorded["uid"]),
            "epoch": pa.array(epoch),
            "offset": pa.array(offset),
            "policy_version": pa.array(np.full(count, version)),
            "version_runs": rows.version_runs(np.full(count, version), tokens, np.arange(count + 1)),
            "generate_s": pa.nulls(count, pa.float32()),
            "load_s": pa.nulls(count, pa.float32()),
        }
        columns = [written[name] if name in written else recorded[name] for name in self._schema.names]
        return pa.table(columns, schema=self._schema)
