"""The stream on a real Ray, from parquet to the train workers' ends of it, with an instant stand-in for the engine.

Every stage but the engine is the run's own, the trainer's side is played by the test. Four streams are run in all.
"""

import asyncio
import contextlib
import copy
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import ray
from ray.data import DataContext

from pipeline import stream
from pipeline.config import Config
from pipeline.prompts.chat import load_tokenizer
from pipeline.prompts.source import START
from pipeline.prompts.stage import LOOKAHEAD, Schedule, sources
from pipeline.rollout.stage import Policy, Rollout
from pipeline.rollout.vllm import Generation
from pipeline.rollout.weights import Shard, checksum
from pipeline.store import Admission, PolicyStore
from pipeline.track.trajectories import read_trajectories
from pipeline.train.feed import Blocks, RowsFeed

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

RANKS = 2
CHUNK, CHUNKS, SAMPLES = 2, 4, 3
BATCH = CHUNK * CHUNKS
ANSWER_S = 30.0
WAIT_S = 120.0
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] % 5 == 0:
        raise ArithmeticError(f"no score for {extra_info['index']}")
    return float(len(solution_str) % 3)
"""


class StandIn(Rollout):
    """The rollout stage without an engine: tokens that follow from the prompt, and a log of what was admitted."""

    SECONDS = 0.05

    def __init__(self, config: Config, policy: Policy) -> None:
        self._config, self._policy = config, policy
        self._tokenizer = load_tokenizer(config.model)
        self._version = -1
        self.name = f"stand-in:{os.getpid()}"
        self._log = Path(config.trainer.default_local_dir) / f"engine-{os.getpid()}.jsonl"
        self._write(event="start")

    async def __call__(self, table: pa.Table) -> pa.Table:
        split, chunk, iteration = (table[name][0].as_py() for name in ("split", "chunk", "iteration"))
        self._write(event="asked", split=split, chunk=chunk, iteration=iteration)
        ticket = await self._policy.admit(split, chunk, iteration)
        self._write(event="admitted", split=split, chunk=chunk, iteration=iteration, version=ticket.version)
        if ticket.version > self._version:
            self._version = ticket.version
            await self._policy.acknowledge(self.name, ticket.version, checksum(ticket.shards), 0.0)
        await asyncio.sleep(self.SECONDS)
        table = table.filter(pc.not_equal(table["split"], "pad"))
        n = SAMPLES if split == "train" else 1
        generations = [self._generation(ids, sample) for ids in table["prompt_ids"].to_pylist() for sample in range(n)]
        return self._rows(table, generations, n, ticket.version, 0.1, 0.0)

    def _generation(self, prompt: list[int], sample: int) -> Generation:
        length = 1 + (sum(prompt) + sample) % 5
        return Generation(np.full(length, 70 + sample, np.int32), np.full(length, -0.5, np.float32), "stop")

    def _write(self, **event: Any) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps(event | {"time": time.time()}) + "\n")


@dataclass(frozen=True)
class Paged(Schedule):
    """A schedule whose pages hold two iterations, as those of a very long run do."""

    page_iterations: int = 2  # type: ignore[assignment]


@dataclass
class Run:
    """One stream and the trainer's side of it."""

    config: Config
    schedule: Schedule
    folder: Path
    base: int = 0
    start: tuple[int, int] = (0, 0)
    published: dict[int, float] = field(default_factory=dict)
    iterations: dict[int, list[pa.Table]] = field(default_factory=dict)
    """What each rank received."""
    _read: int = 0

    def __post_init__(self) -> None:
        admission = Admission(CHUNK, BATCH, 0)
        self.store = ray.remote(PolicyStore).options(num_cpus=0, max_concurrency=1000).remote(admission)
        dataset = stream.build(self.config, self.schedule, self.store, str(self.folder), rollout_stage=StandIn)
        splits = dataset.streaming_split(RANKS, equal=True)
        self.generation = ray.get(self.store.current.remote(), timeout=ANSWER_S)
        self.ask("begin", self.base, 1, self.start)
        self.feeds = [
            RowsFeed(Blocks(blocks, WAIT_S, self.describe), CHUNKS // RANKS)
            for blocks in (
                iter(split.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))
                for split in splits
            )
        ]

    def ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.store, method).remote(self.generation, *args), timeout=ANSWER_S)

    def describe(self) -> str:
        return str(ray.get(self.store.status.remote(), timeout=ANSWER_S))

    def publish(self, version: int) -> None:
        self.published[version] = time.time()
        self.ask("publish", version, {"policy": Shard(0, [], [], [])}, time.time())

    def train(self, first: int, last: int) -> None:
        """Iterations `first` to `last`, the version that generates `first` included."""
        for iteration in range(first, last + 1):
            self.publish(iteration - 1)
            tables = [feed.next(iteration) for feed in self.feeds]
            assert all(table is not None for table in tables), f"the stream ended before iteration {iteration}"
            self.iterations[iteration] = [table for table in tables if table is not None]

    def finish(self, version: int) -> None:
        """Publish the last version and read what is left: nothing."""
        self.publish(version)
        for feed in self.feeds:
            feed.drain()

    def close(self) -> None:
        """End what may still wait after a failure."""
        ray.get(self.store.new_generation.remote(), timeout=ANSWER_S)
        for feed in self.feeds:
            with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
                feed.drain()

    def messages(self, kind: str) -> list[dict[str, Any]]:
        _, found = ray.get(self.store.read.remote(0, 0.0), timeout=ANSWER_S)
        return [message for message in found if message["kind"] == kind]

    def events(self, event: str) -> list[dict[str, Any]]:
        """What all stand-ins logged of a kind, in time."""
        lines = [
            json.loads(line) for log in self.folder.glob("engine-*.jsonl") for line in log.read_text().splitlines()
        ]
        return sorted((line for line in lines if line["event"] == event), key=lambda line: line["time"])

    def uids(self, iteration: int) -> list[str]:
        """Prompts of an iteration in the order of its chunks."""
        parts = pa.concat_tables(self.iterations[iteration]).sort_by([("chunk", "ascending")])
        return list(dict.fromkeys(parts["uid"].to_pylist()))


@pytest.fixture(scope="module", autouse=True)
def context(ray_session: None) -> Iterator[None]:
    """`stream.build` sets this process's context; other tests get their own back."""
    before = copy.deepcopy(DataContext.get_current())
    yield
    DataContext._set_current(before)


@pytest.fixture(scope="module")
def config(tiny_model: Path, prompt_files: Any, tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = Config()
    config.data.train_files, config.data.val_files = prompt_files.train, prompt_files.val
    config.data.train_batch_size, config.data.max_prompt_length = BATCH, 64
    config.data.max_response_length = 8
    config.model.path = str(tiny_model)
    config.rollout.n, config.rollout.chunk_prompts, config.rollout.num_cpus = SAMPLES, CHUNK, 0.2
    config.rollout.max_num_seqs = 8
    config.reward.num_cpus = 0.2
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    config.reward.custom_reward_function.path = str(reward)
    config.trainer.total_training_steps = 1  # the schedule below counts
    config.trainer.deadlines.engine_start = config.trainer.deadlines.admission = WAIT_S
    return config


def changed(config: Config, folder: Path) -> Config:
    own = copy.deepcopy(config)
    own.trainer.default_local_dir = str(folder)
    return own


def expected(config: Config, iterations: int, start: Any = START) -> list[list[str]]:
    """Prompts of each iteration, straight from the source."""
    source, _ = sources(config)
    chunks = source.chunks(BATCH, start)
    return [next(chunks)["uid"].to_pylist() for _ in range(iterations)]


# One run with everything: eleven iterations over more than two epochs, validation every fourth version.

ITERATIONS, TEST_FREQ = 11, 4
HOLD_S = 3.0


@pytest.fixture(scope="module")
def whole(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("whole")
    run = Run(changed(config, folder), Schedule(ITERATIONS, CHUNKS, CHUNK, True, True, TEST_FREQ), folder)
    try:
        run.train(1, 1)
        # The trainer thinks about version 1 for a while.
        time.sleep(HOLD_S)
        run.held = {  # type: ignore[attr-defined]
            "asked": {event["iteration"] for event in run.events("asked")},
            "admitted": {(event["split"], event["iteration"]) for event in run.events("admitted")},
            "positions": [known(run, iteration) for iteration in range(1, 5)],
        }
        run.train(2, ITERATIONS)
        run.finish(ITERATIONS)
        yield run
    finally:
        run.close()


def known(run: Run, iteration: int) -> bool:
    """Whether the prompts of an iteration have been made."""
    try:
        run.ask("position", iteration)
    except KeyError:
        return False
    return True


def test_each_rank_gets_its_rows_in_order(whole: Run) -> None:
    for iteration in range(1, ITERATIONS + 1):
        first = (iteration - 1) * CHUNKS
        for rank, table in enumerate(whole.iterations[iteration]):
            assert len(table) == BATCH * SAMPLES // RANKS
            chunks = [first + rank + RANKS * i for i in range(CHUNKS // RANKS)]
            assert table["chunk"].to_pylist() == [chunk for chunk in chunks for _ in range(CHUNK * SAMPLES)]
            assert table["sample"].to_pylist() == list(range(SAMPLES)) * (len(table) // SAMPLES)


def test_prompts_are_those_of_the_source(whole: Run, prompt_files: Any) -> None:
    seen = [whole.uids(iteration) for iteration in range(1, ITERATIONS + 1)]
    assert seen == expected(whole.config, ITERATIONS)
    first_epoch = [uid for uids in seen[: prompt_files.train_rows // BATCH] for uid in uids]
    assert sorted(first_epoch) == sorted(f"0-{i}" for i in range(prompt_files.train_rows))


def test_strictly_on_policy(whole: Run) -> None:
    for iteration, tables in whole.iterations.items():
        assert {v for table in tables for v in table["policy_version"].to_pylist()} == {iteration - 1}
    admitted = whole.events("admitted")
    assert len(admitted) >= ITERATIONS * CHUNKS
    for event in admitted:
        wanted = event["iteration"] - 1 if event["split"] == "train" else event["iteration"]
        assert event["version"] == wanted
        assert event["time"] >= whole.published[wanted], f"{event} before version {wanted} was published"


def test_nothing_starts_while_a_version_is_awaited(whole: Run) -> None:
    held = whole.held  # type: ignore[attr-defined]
    assert 2 in held["asked"], "the next iteration's chunks do wait at the engine"
    assert held["admitted"] == {("val", 0), ("train", 1)}


def test_prompts_are_made_at_most_one_iteration_ahead(whole: Run) -> None:
    made = [True] * (1 + LOOKAHEAD) + [False] * (3 - LOOKAHEAD)
    assert whole.held["positions"] == made  # type: ignore[attr-defined]


def test_failed_rewards_keep_their_place(whole: Run) -> None:
    failed = 0
    for tables in whole.iterations.values():
        for row in pa.concat_tables(tables).to_pylist():
            length = len(row["response_ids"])
            assert length and len(row["response_mask"]) == len(row["advantages"]) == length
            if json.loads(row["extra_info"])["index"] % 5 == 0:
                failed += 1
                assert row["reward_error"].startswith("ArithmeticError: no score for")
                assert row["response_mask"] == [0] * length and row["advantages"] == [0.0] * length
            else:
                assert row["reward_error"] is None and row["response_mask"] == [1] * length
                assert row["score"] == len(row["response"]) % 3
    # Two whole epochs have eight such prompts each.
    assert failed >= 2 * 8 * SAMPLES
    spread = {max(row) for tables in whole.iterations.values() for t in tables for row in t["advantages"].to_pylist()}
    assert len(spread) > 1, "advantages are estimated"


def test_validation_rows_leave_before_the_trainer(whole: Run, prompt_files: Any) -> None:
    versions = [0, 4, 8, ITERATIONS]
    assert [message["version"] for message in whole.messages("validation")] == versions
    assert {message["prompts"] for message in whole.messages("validation")} == {prompt_files.val_rows}
    reported: dict[int, list[str]] = {version: [] for version in versions}
    for message in whole.messages("validated"):
        for row in message["rows"].to_pylist():
            reported[row["iteration"]].append(row["uid"])
    prompts = sorted(f"val-{i}" for i in range(prompt_files.val_rows))
    for version in versions:
        assert sorted(reported[version]) == prompts
        recorded = read_trajectories(str(whole.folder), version, "val")
        assert sorted(recorded["uid"].to_pylist()) == prompts
        assert set(recorded["policy_version"].to_pylist()) == {version}
    assert all(set(t["split"].to_pylist()) == {"train"} for tables in whole.iterations.values() for t in tables)


def test_every_row_is_recorded_as_the_trainer_got_it(whole: Run) -> None:
    for iteration, tables in whole.iterations.items():
        got = pa.concat_tables(tables).sort_by([("chunk", "ascending")])
        recorded = read_trajectories(str(whole.folder), iteration)
        for name in ("uid", "sample", "response_ids", "score", "advantages", "policy_version"):
            assert recorded[name].to_pylist() == got[name].to_pylist(), name


def test_one_engine_serves_the_whole_run(whole: Run) -> None:
    assert len(whole.events("start")) == 1
    assert [message["version"] for message in whole.messages("loaded")] == list(range(ITERATIONS + 1))


# The end of the data.


def test_stream_ends_with_the_epochs_and_validates_the_last_version(
    config: Config, tmp_path: Path, prompt_files: Any
) -> None:
    """Footers promise five iterations; a quarter of the prompts is too long, so three come."""
    table = pq.read_table(prompt_files.train).to_pylist()
    for row in table[::4]:
        row["prompt"][0]["content"] *= 9
    long = tmp_path / "long.parquet"
    pq.write_table(pa.Table.from_pylist(table, pq.read_schema(prompt_files.train)), long)
    own = changed(config, tmp_path)
    own.data.train_files, own.data.filter_overlong_prompts = str(long), True
    own.trainer.total_training_steps, own.trainer.total_epochs = None, 1

    run = Run(own, Schedule(5, CHUNKS, CHUNK, True, False, -1), tmp_path)
    try:
        run.train(1, 3)
        run.publish(3)
        assert [feed.next(4) for feed in run.feeds] == [None, None]
        assert run.ask("ended") == 3
        assert [message["version"] for message in run.messages("validation")] == [3]
        rows = sum(len(message["rows"]) for message in run.messages("validated"))
        assert rows == prompt_files.val_rows
        counts = [message["metrics"]["prompts/filtered_overlong"] for message in run.messages("prompts")]
        assert counts == sorted(counts) and 0 < counts[-1] <= 10
        seen = [uid for iteration in (1, 2, 3) for uid in run.uids(iteration)]
        assert len(set(seen)) == 3 * BATCH
    finally:
        run.close()


# Resumed, in pages of several iterations.


def test_resumed_stream_goes_on_behind_the_checkpoint(config: Config, tmp_path: Path) -> None:
    own, base, last = changed(config, tmp_path), 4, 9
    source, _ = sources(own)
    _, position = source.draw(BATCH * base)
    start = position[:2]
    schedule = Paged(last, CHUNKS, CHUNK, True, True, 2)
    assert schedule.pages == 6
    run = Run(own, schedule, tmp_path, base, start)
    try:
        run.train(base + 1, last)
        run.finish(last)
        assert [run.uids(iteration) for iteration in range(base + 1, last + 1)] == expected(own, last)[base:]
        for iteration, tables in run.iterations.items():
            assert {v for table in tables for v in table["policy_version"].to_pylist()} == {iteration - 1}
        # Version 4 was validated before the interruption.
        assert [message["version"] for message in run.messages("validation")] == [6, 8, 9]
    finally:
        run.close()


# Processes that die.


def workers(stage: str) -> list[psutil.Process]:
    """This session's actor processes of a stage; never those of another Ray on the machine."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if f"MapBatches({stage})" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.slow
def test_killed_actors_lose_and_repeat_no_prompt(config: Config, tmp_path: Path) -> None:
    own, last = changed(config, tmp_path), 7
    run = Run(own, Schedule(last, CHUNKS, CHUNK, True, False, 3), tmp_path)
    try:
        run.train(1, 2)
        for stage in ("Prompts", "StandIn"):
            (victim,) = workers(stage)
            victim.send_signal(signal.SIGKILL)
            victim.wait(timeout=ANSWER_S)
            first = max(run.iterations) + 1
            run.train(first, first + 1)
        run.train(last, last)
        run.finish(last)
        assert [run.uids(iteration) for iteration in range(1, last + 1)] == expected(own, last)
        for iteration, tables in run.iterations.items():
            rows = pa.concat_tables(tables)
            assert len(rows) == BATCH * SAMPLES
            assert set(rows["policy_version"].to_pylist()) == {iteration - 1}
        assert len(run.events("start")) == 2, "the engine was started again, once"
        for version in (3, 6, last):
            assert len(read_trajectories(str(tmp_path), version, "val")) == 7
    finally:
        run.close()
