"""The driver of an evaluation: chunks of scored responses come in, are kept and added up.

parts that are there ─► summary        stream ─► one chunk ─► part ─► summary ─► next chunk
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray

from pipeline.evaluate.folder import Folder
from pipeline.evaluate.prompts import Pace
from pipeline.evaluate.rollout import EvaluationRollout
from pipeline.evaluate.settings import in_flight
from pipeline.evaluate.stream import build
from pipeline.evaluate.summary import Summary
from pipeline.train.feed import Blocks

if TYPE_CHECKING:
    from pipeline.evaluate.prepare import Evaluation


@dataclass
class Speed:
    """How fast responses came, of those that were generated now."""

    tokens: int = 0
    began: float | None = None
    """`time.monotonic()` when the first engine began to generate."""
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.began if self.began is not None else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Response tokens per second of generating and scoring; None where nothing was generated."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    def add(self, tokens: int, chunk_s: float) -> None:
        """A chunk has come that took `chunk_s` seconds to generate."""
        self.ended = time.monotonic()
        self.began = self.ended - chunk_s if self.began is None else self.began
        self.tokens += tokens


def generate(
    evaluation: "Evaluation",
    speed: Speed,
    shown: Callable[[], None],
    rollout_stage: type[EvaluationRollout] = EvaluationRollout,
) -> None:
    """Generate and score the chunks that are missing; Ray is running and everything has been checked.

    Args:
        evaluation: its folder gets the parts, its summary adds them up.
        speed: what is added to.
        shown: called after every chunk.
        rollout_stage: as of `stream.build`.

    Raises:
        TimeoutError: no chunk came in time.
        Exception: whatever a stage raised.
    """
    config, pages, folder = evaluation.config, evaluation.pages, evaluation.folder
    ahead = pages.page_chunks + 2 * in_flight(config) * config.rollout.num_engines
    pace: Any = ray.remote(Pace).options(num_cpus=0).remote(ahead)
    stream = build(config, pages, evaluation.iteration, pace, str(folder.path), rollout_stage)
    received = 0

    def waiting() -> str:
        chunks = pages.chunks - len(pages.done)
        what = "the engines start and generate the first" if received == 0 else "engines and rewards work on the next"
        return f"{received} of at most {chunks} chunks have come, {what} (trainer.deadlines.rows)"

    # A split into one is executed by an actor. In this process the execution would print its log, and be a thread that
    # outlives Ctrl-C.
    splits: Any = stream.streaming_split(1, equal=False)
    arriving = iter(splits[0].iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
    blocks = Blocks(arriving, config.trainer.deadlines.rows, waiting)
    while (rows := blocks.next("responses")) is not None:
        _keep(rows, folder, evaluation.summary, speed)
        received += 1
        pace.received.remote(received)
        shown()


def _keep(rows: pa.Table, folder: Folder, summary: Summary, speed: Speed) -> None:
    before = summary.tokens
    folder.add(rows["chunk"][0].as_py(), rows)
    summary.add(rows)
    speed.add(summary.tokens - before, rows["generate_s"][0].as_py())
