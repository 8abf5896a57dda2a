"""The driver of an evaluation: it stores each chunk of scored responses that arrives, and adds it to the metrics.

existing parts ─► summary        stream ─► chunk ─► part ─► summary ─► next chunk
"""

import time
from typing import TYPE_CHECKING, Any

from pipeline.agent.ray_hosts import Hosts
from pipeline.evaluate.stream import build
from pipeline.rollout.stage import Rollout
from pipeline.track.console import THROUGHPUT, RunConsole
from pipeline.track.history import REWARD
from pipeline.train.feed import TimedIterator

if TYPE_CHECKING:
    from pipeline.evaluate.prepare import Evaluation

SHOWN_EVERY_S = 5.0


def generate(evaluation: "Evaluation", console: RunConsole, rollout_stage: type[Rollout] = Rollout) -> None:
    """Generate and score the missing chunks, store them in the evaluation's folder, and add them to its summary.

    Ray must be running.

    Args:
        evaluation: the evaluation.
        console: the progress on the terminal.
        rollout_stage: class of the rollout stage; tests replace it.

    Raises:
        TimeoutError: no chunk arrived within `trainer.deadlines.rows`.
        Exception: any exception of a stage.
    """
    hosts = Hosts.start(evaluation.config.agent, evaluation.config.trainer)
    try:
        _generate(evaluation, console, rollout_stage, hosts)
    finally:
        hosts.end()


def _generate(evaluation: "Evaluation", console: RunConsole, rollout_stage: type[Rollout], hosts: Hosts) -> None:
    config, pages, summary = evaluation.config, evaluation.pages, evaluation.summary
    stream = build(config, pages, evaluation.iteration, str(evaluation.folder.path), rollout_stage, hosts)
    missing = pages.chunks - len(pages.done)
    tokens_before = summary.tokens
    arrived, began, shown = 0, None, 0.0

    def waiting() -> str:
        work = "engines and rewards work on the next" if arrived else "the engines start and generate the first"
        return f"{arrived} of at most {missing} chunks have come, {work} (trainer.deadlines.rows)"

    # A split into one is executed by an actor. An execution in this process would print its log, and would be a thread
    # that outlives Ctrl-C.
    splits: Any = stream.streaming_split(1, equal=False)
    arriving = iter(splits[0].iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
    blocks = TimedIterator(arriving, config.trainer.deadlines.rows, waiting)
    while (rows := blocks.next("responses")) is not None:
        evaluation.folder.add(rows["chunk"][0].as_py(), rows)
        summary.add(rows)
        arrived += 1
        now = time.monotonic()
        # The clock starts when the first engine begins to generate, which is long after the request.
        began = now - rows["generate_s"][0].as_py() if began is None else began
        if now > began:
            evaluation.tokens_per_s = (summary.tokens - tokens_before) / (now - began)
        if arrived == missing or now - shown >= SHOWN_EVERY_S:
            shown = now
            figures = {REWARD: summary.overall().get("mean"), THROUGHPUT: evaluation.tokens_per_s}
            known = {name: value for name, value in figures.items() if value is not None}
            console.update(len(pages.done) + arrived, known)
