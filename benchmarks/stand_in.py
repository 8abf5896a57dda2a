"""Stand-ins for the ends of the stream: an instant engine, the trainer's side of the protocol, a memory watch.

The stages in between, the policy store and the schedule are a run's.
"""

import contextlib
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.data import Dataset

from pipeline import rows, stream
from pipeline.agent.ray_hosts import Hosts
from pipeline.config import Config
from pipeline.config.agent import AgentConfig
from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.config.trainer import TrainerConfig
from pipeline.derived import chunk_prompts, uses_filter
from pipeline.generation import Generation
from pipeline.models.tokenizer import load_tokenizer
from pipeline.prompts.stage import Schedule
from pipeline.rollout.occupancy import Occupancy
from pipeline.rollout.order import InOrder
from pipeline.rollout.policy_source import PolicySource
from pipeline.rollout.stage import Rollout, decoded
from pipeline.store.admission import Admission
from pipeline.store.client import ANSWER_S, StoreClient
from pipeline.store.cursor import PromptCursor
from pipeline.store.events import Event
from pipeline.store.policy_store import PolicyStore
from pipeline.store.status import TrainerState
from pipeline.store.versions import POLICY
from pipeline.train.feed import RowsFeed, TimedIterator
from pipeline.weights.load import Shard

RANKS = 2
SHORTEST, LONGEST = 4, 32


def shard(rank: int = 0) -> Shard:
    """Make a rank's part of empty weights, so that only the protocol takes time; Ray must be running."""
    return Shard(rank, [], [ray.put(np.zeros(1, np.uint8))], [zlib.crc32(bytes(1))])


class InstantRollout(Rollout):
    """The rollout stage without an engine: random responses of 4 to 32 tokens, at once."""

    def __init__(
        self,
        data: DataConfig,
        model: ModelConfig,
        rollout: RolloutConfig,
        agent: AgentConfig,
        trainer: TrainerConfig,
        greedy: bool,
        policy: PolicySource,
        hosts: Hosts,
    ):
        self._rollout, self._policy, self._greedy = rollout, policy, greedy
        self._tokenizer = load_tokenizer(model)
        self._random = np.random.default_rng(trainer.seed)
        self._order, self._occupancy, self._acknowledged = InOrder(), Occupancy(), None
        self._version = -1
        self.name = f"instant:{os.getpid()}"

    async def __call__(self, table: pa.Table) -> pa.Table:
        ticket = await self._admit(table)
        if ticket is None:
            return rows.without_rows(table, rows.ROLLOUT)
        if ticket.version > self._version:
            self._version = ticket.version
            self._acknowledge(ticket, 0.0)
        table = table.filter(pc.not_equal(table["split"], "pad"))
        count = len(table) * (self._rollout.n + self._greedy)
        generations = self._generations(count, ticket.version)
        texts = decoded(self._tokenizer, [generation.token_ids.tolist() for generation in generations])
        generated = self._rows(table, generations, texts, None, 0.0, 0.0)
        await self._wait_acknowledged()
        return generated

    def _generations(self, count: int, version: int) -> list[Generation]:
        ends = np.cumsum(self._random.integers(SHORTEST, LONGEST, count))
        tokens = np.split(self._random.integers(0, 100, ends[-1], dtype=np.int32), ends[:-1])
        log_probs = np.split(-self._random.random(ends[-1], dtype=np.float32), ends[:-1])
        return [
            Generation(ids, chances, "stop", ((version, len(ids)),))
            for ids, chances in zip(tokens, log_probs, strict=True)
        ]


class StandInTrainer:
    """A stand-in for the train workers: it begins, publishes and reads rows as they do, without training.

    Args:
        config: the run's configuration.
        iterations: iterations of the schedule; each call of `iterate` reads one.
        run_dir: folder of the trajectories.
        rollout: class of the rollout stage.
        shards: the weights that every version publishes.
        build: function that makes the stream.
        ranks: number of splits that rows are read from.
    """

    def __init__(
        self,
        config: Config,
        iterations: int,
        run_dir: str,
        rollout: type[Rollout],
        shards: Sequence[Shard],
        build: Callable[..., Dataset] = stream.build,
        ranks: int = RANKS,
    ) -> None:
        self.schedule = Schedule.of(config, iterations)
        self._shards, self._version = shards, 0
        sizes = chunk_prompts(config), config.data.train_batch_size, config.algorithm.max_staleness
        admission = Admission(*sizes, iterations if uses_filter(config) else None)
        self.actor: Any = ray.remote(PolicyStore).options(num_cpus=0, max_concurrency=10_000).remote(admission)
        begun = time.perf_counter()
        dataset = build(config, self.schedule, self.actor, run_dir, rollout_stage=rollout)
        splits: list[Any] = list(dataset.streaming_split(ranks, equal=True))
        self.build_s = time.perf_counter() - begun
        self.store = StoreClient(self.actor, StoreClient(self.actor).ask(PolicyStore.current_attempt))
        self.store.call(PolicyStore.register_trainer, TrainerState(0, PromptCursor(), False), len(shards))
        chunks = self.schedule.chunks_per_iteration // ranks
        self._feeds = [
            RowsFeed(
                TimedIterator(
                    iter(split.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)),
                    config.trainer.deadlines.rows,
                    lambda: str(self.store.ask(PolicyStore.status)),
                ),
                chunks,
                chunks,
            )
            for split in splits
        ]

    def iterate(self, seconds: float = 0.0, early: bool = False) -> list[pa.Table]:
        """Publish the current version and read the rows of the next iteration, one table for each rank.

        Args:
            seconds: time of the training, which only sleeps.
            early: true to train on each chunk as it comes, for its share of the seconds; else after all have come.
        """
        self._publish()
        self._version += 1
        parts: list[list[pa.Table]] = [[] for _ in self._feeds]
        chunks = self._feeds[0].parts
        for number in range(chunks):
            for own, feed in zip(parts, self._feeds, strict=True):
                table = feed.next(self._version, number)
                if table is None:
                    raise RuntimeError(f"the stream ended before iteration {self._version}")
                own.append(table)
            if early:
                time.sleep(seconds / chunks)
        if not early:
            time.sleep(seconds)
        return [pa.concat_tables(own) for own in parts]

    def finish(self) -> None:
        """Publish the last version and read the end of the stream."""
        self._publish()
        for feed in self._feeds:
            feed.drain()

    def close(self) -> None:
        """End the stream: all calls that wait in the store now belong to an older attempt, and fail."""
        self.store.ask(PolicyStore.new_attempt)
        for feed in self._feeds:
            with contextlib.suppress(ray.exceptions.RayError):
                while feed.next(self._version + 1) is not None:
                    pass

    def events(self, after: int) -> tuple[int, list[Event]]:
        """Read the events that the stream has posted, as the driver does."""
        return self.store.ask(PolicyStore.read_events, after, 0.0)

    def _publish(self) -> None:
        """Publish a version from all ranks at once, as in a run."""
        publish, now = self.actor.publish.remote, time.time()
        published = [publish(self.store.attempt, self._version, {POLICY: shard}, now) for shard in self._shards]
        ray.get(published, timeout=ANSWER_S)


@dataclass
class Sample:
    """One moment of a run. Memory in MiB, by kind of process."""

    second: float
    chunks: int
    private: dict[str, float]
    """Resident memory without pages shared with other processes; the object store counts separately."""
    cpu_s: dict[str, float]
    """CPU seconds so far of the processes that are alive."""
    object_store: float
    handles: dict[str, int]
    """Open files, sockets and the like, and threads."""


class Watch:
    """Samples the driver, Ray's processes and the object store in a thread.

    Args:
        chunks: function that returns the number of chunks read so far.
        every: seconds between samples.
    """

    def __init__(self, chunks: Callable[[], int], every: float = 2.0) -> None:
        self.samples: list[Sample] = []
        self._chunks, self._every, self._begun = chunks, every, time.perf_counter()
        self._capacity = ray.cluster_resources().get("object_store_memory", 0.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> list[Sample]:
        self._stop.set()
        self._thread.join(timeout=30.0)
        return self.samples

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            used = self._capacity - ray.available_resources().get("object_store_memory", 0.0)
            second = time.perf_counter() - self._begun
            private, cpu_s, handles = _processes()
            self.samples.append(Sample(second, self._chunks(), private, cpu_s, used / 2**20, handles))


def _processes() -> tuple[dict[str, float], dict[str, float], dict[str, int]]:
    """Private MiB, CPU seconds and handles of this process and of everything it started, by kind."""
    driver = psutil.Process()
    private: Counter[str] = Counter()
    cpu_s: Counter[str] = Counter()
    handles: Counter[str] = Counter()
    for process in [driver, *driver.children(recursive=True)]:
        try:
            memory, cpu, title = process.memory_info(), process.cpu_times(), " ".join(process.cmdline())
            open_now = process.num_fds() + process.num_threads()
        except psutil.Error:
            continue
        kind = "driver" if process == driver else _kind(title)
        private[kind] += (memory.rss - memory.shared) / 2**20
        cpu_s[kind] += cpu.user + cpu.system
        handles[kind] += open_now
    return dict(private), dict(cpu_s), dict(handles)


def _kind(title: str) -> str:
    kinds = {
        "ray::MapWorker(MapBatches(Prompts": "prompts",
        "ray::MapWorker": "rollout",
        "ray::PolicyStore": "policy store",
        "ray::SplitCoordinator": "stream executor",
        "ray::MapBatches": "tasks of other stages",
        "ray::Streaming": "tasks of other stages",
        "ray::ReadRange": "tasks of other stages",
        "ray::IDLE": "tasks of other stages",
    }
    return next((kind for start, kind in kinds.items() if title.startswith(start)), "Ray itself")
