"""A stream on a real Ray with an instant engine, and the trainer's side of it, played by the test."""

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pyarrow as pa
import ray

from pipeline import stream
from pipeline.config import Config
from pipeline.derived import uses_filter
from pipeline.prompts.loader import PromptLoader
from pipeline.prompts.stage import LOOKAHEAD, Schedule, loaders
from pipeline.rollout.stage import Rollout
from pipeline.sampling import row_limits
from pipeline.store.admission import Admission
from pipeline.store.client import StoreClient
from pipeline.store.cursor import PromptCursor
from pipeline.store.events import Event
from pipeline.store.policy_store import PolicyStore
from pipeline.store.status import TrainerState
from pipeline.train.feed import RowsFeed, TimedIterator
from pipeline.weights.load import Shard
from tests.stages import CHUNK, CHUNKS, SAMPLES, Prompts, StandIn

E = TypeVar("E", bound=Event)
RANKS = 2
BATCH = CHUNK * CHUNKS
ANSWER_S = 30.0
WAIT_S = 240.0
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] % 5 == 0:
        raise ArithmeticError(f"no score for {extra_info['index']}")
    return float(len(solution_str) % 3)
"""


def no_weights(version: int) -> dict[str, Shard]:
    return {"policy": Shard(0, [], [], [])}


@dataclass
class Run:
    """One stream and the trainer's side of it."""

    config: Config
    schedule: Schedule
    folder: Path
    base: int = 0
    start: PromptCursor = PromptCursor()
    weights: Callable[[int], dict[str, Shard]] = no_weights
    """What is published of a version."""
    kl_coef: Callable[[int], float] = float
    """Of a version."""
    stage: type[Rollout] = StandIn
    published: dict[int, float] = field(default_factory=dict)
    iterations: dict[int, list[pa.Table]] = field(default_factory=dict)
    """What each rank received."""
    held: dict[str, Any] = field(default_factory=dict)
    """What had happened while the trainer held a version back."""

    def __post_init__(self) -> None:
        config = self.config
        last = self.schedule.iterations if uses_filter(config) else None
        sizes = config.rollout.chunk_prompts, config.data.train_batch_size, config.algorithm.max_staleness
        admission = Admission(*sizes, last)
        self.actor: Any = ray.remote(PolicyStore).options(num_cpus=0, max_concurrency=1000).remote(admission)
        with patch.object(stream, "Prompts", Prompts):
            dataset = stream.build(self.config, self.schedule, self.actor, str(self.folder), rollout_stage=self.stage)
        splits = dataset.streaming_split(RANKS, equal=True)
        self._coordinator = splits[0]._coord_actor
        client = StoreClient(self.actor)
        self.store = StoreClient(self.actor, client.ask(PolicyStore.current_attempt))
        self.store.call(PolicyStore.register_trainer, TrainerState(self.base, self.start, True), 1)
        self.feeds = [
            RowsFeed(TimedIterator(blocks, WAIT_S, self.describe), CHUNKS // RANKS)
            for blocks in (
                iter(split.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
                for split in splits
            )
        ]

    def end_of(self, iteration: int) -> PromptCursor:
        return self.store.call(PolicyStore.end_of_iteration, iteration)

    def describe(self) -> str:
        return str(self.store.ask(PolicyStore.status))

    def publish(self, version: int) -> None:
        weights = self.weights(version)
        self.published[version] = time.time()
        validates = self.schedule.validates(version, False)
        self.store.call(PolicyStore.publish, version, weights, time.time(), self.kl_coef(version), validates)

    def train(self, first: int, last: int) -> None:
        """Iterations `first` to `last`, the version that generates `first` included."""
        for iteration in range(first, last + 1):
            self.publish(iteration - 1)
            tables = [feed.next(iteration) for feed in self.feeds]
            assert all(table is not None for table in tables), f"the stream ended before iteration {iteration}"
            self.iterations[iteration] = [table for table in tables if table is not None]

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until it is so, and fail where it takes too long."""
        deadline = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < deadline, self.describe()
            time.sleep(0.05)

    def finish(self, version: int) -> None:
        """Publish the last version and read what is left: nothing."""
        self.publish(version)
        for feed in self.feeds:
            feed.drain()

    def close(self) -> None:
        """End what may still wait after a failure."""
        self.store.ask(PolicyStore.new_attempt)
        for feed in self.feeds:
            with contextlib.suppress(ray.exceptions.RayError, RuntimeError, TimeoutError):
                feed.drain()

    def abandon(self) -> None:
        """End a stream that may never end by itself, with all its actors."""
        ray.kill(self._coordinator)

    def told(self, kind: type[E]) -> list[E]:
        """Events of a kind that the driver would read."""
        _, events = self.store.ask(PolicyStore.read_events, 0, 0.0)
        return [event for event in events if isinstance(event, kind)]

    def events(self, event: str) -> list[dict[str, Any]]:
        """What all stand-ins logged of a kind, in time."""
        lines = [
            json.loads(line) for log in self.folder.glob("engine-*.jsonl") for line in log.read_text().splitlines()
        ]
        return sorted((line for line in lines if line["event"] == event), key=lambda line: line["time"])

    def rows(self, iteration: int) -> pa.Table:
        """What all ranks received of an iteration, in the order of its chunks."""
        ranks, size = self.iterations[iteration], CHUNK * SAMPLES
        return pa.concat_tables(rows.slice(i, size) for i in range(0, len(ranks[0]), size) for rows in ranks)

    def uids(self, iteration: int) -> list[str]:
        """Prompts of an iteration in the order of its chunks."""
        return list(dict.fromkeys(self.rows(iteration)["uid"].to_pylist()))


@contextlib.contextmanager
def closing(run: Run) -> Iterator[Run]:
    """`run`, closed at the end whatever happens."""
    try:
        yield run
    finally:
        run.close()


WHOLE, WHOLE_TEST_FREQ = 11, 4
HOLD_S = 1.5


@contextlib.contextmanager
def whole_run(config: Config, folder: Path) -> Iterator[Run]:
    """Eleven iterations over more than two epochs, with validation of every fourth version."""
    run = Run(changed(config, folder), Schedule(WHOLE, CHUNKS, CHUNK, True, True, WHOLE_TEST_FREQ), folder)
    with closing(run):
        run.train(1, 1)
        # The trainer thinks about version 1 for a while after all that may happen before it.
        run.wait(lambda: known(run, 1 + LOOKAHEAD) and any(event["iteration"] == 2 for event in run.events("asked")))
        time.sleep(HOLD_S)
        run.held = {
            "asked": {event["iteration"] for event in run.events("asked")},
            "admitted": {(event["split"], event["iteration"]) for event in run.events("admitted")},
            "positions": [known(run, iteration) for iteration in range(1, 5)],
        }
        run.train(2, WHOLE)
        run.finish(WHOLE)
        yield run


def known(run: Run, iteration: int) -> bool:
    """Whether the prompts of an iteration have been made."""
    try:
        run.end_of(iteration)
    except KeyError:
        return False
    return True


def tiny_config(model: Path, prompt_files: Any, folder: Path) -> Config:
    """A run over `prompt_files`; its reward function is written into `folder`, and fails for every fifth prompt."""
    config = Config()
    config.data.train_files, config.data.val_files = prompt_files.train, prompt_files.val
    config.data.train_batch_size, config.data.max_prompt_length = BATCH, 64
    config.data.max_response_length = 8
    config.model.path = str(model)
    config.rollout.n, config.rollout.chunk_prompts, config.rollout.num_cpus = SAMPLES, CHUNK, 0.2
    config.rollout.max_num_seqs = 8
    config.reward.num_cpus = 0.2
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    config.reward.custom_reward_function.path = str(reward)
    config.trainer.total_training_steps = 1  # the schedule counts
    config.trainer.deadlines.engine_start = config.trainer.deadlines.admission = WAIT_S
    return config


def changed(config: Config, folder: Path) -> Config:
    """A copy of `config` for a run in `folder`."""
    own = copy.deepcopy(config)
    own.trainer.default_local_dir = str(folder)
    return own


def training_loader(config: Config, run_dir: str | None = None, lag: int = 1) -> PromptLoader:
    """What makes the prompts of a run with these settings."""
    loader, _ = loaders(config.data, config.model, row_limits(config), config.trainer.seed, run_dir, lag=lag)
    return loader


def expected_prompts(config: Config, iterations: int) -> list[list[str]]:
    """Prompts of each iteration, straight from the loader."""
    loader = training_loader(config)
    return [[row["uid"] for row in loader.iteration(k, BATCH)] for k in range(1, iterations + 1)]
