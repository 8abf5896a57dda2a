"""The source of a replay: recorded rows with the positions of the run that trains."""

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.prompts.stage import Schedule
from pipeline.replay.stage import Replay
from pipeline.rows import AGENT, PROMPT, ROLLOUT
from pipeline.store.admission import Admission
from pipeline.store.cursor import PromptCursor
from pipeline.store.policy_store import PolicyStore
from pipeline.store.status import TrainerState
from pipeline.weights.load import Shard
from tests.recordings import BATCH, SAMPLES, record

GROUPS = 3 * BATCH


class Store:
    """The policy store of one attempt, called at once."""

    def __init__(self, admission: Admission, version: int, cursor: PromptCursor) -> None:
        self.store = PolicyStore(admission)
        asyncio.run(self.store.new_attempt())
        self.call(PolicyStore.register_trainer, TrainerState(version, cursor, False), 1)

    def call(self, method: Any, /, *args: Any) -> Any:
        return asyncio.run(method(self.store, 1, *args))

    wait = call


class Replayed:
    """A replay of three recorded iterations, page by page."""

    def __init__(
        self,
        folder: Path,
        batch: int = BATCH,
        iterations: int = 9,
        base: int = 0,
        cursor: PromptCursor | None = None,
        staleness: int = 0,
        baselines: bool = False,
        episodes: bool = False,
        page_prompts: int = 0,
        **changes: Any,
    ) -> None:
        self.recorded = record(folder, [1, 2, 3], **changes)
        config = Config()
        config.data.recorded_run = str(folder)
        config.trainer.deadlines.admission = 0.05
        chunk = 2 if batch % 2 == 0 else batch
        self.store = Store(Admission(chunk, batch, staleness), base, cursor or PromptCursor())
        schedule = Schedule(iterations, batch // chunk, chunk, False, False, -1, staleness, page_prompts=page_prompts)
        deadlines = config.trainer.deadlines
        self.stage = Replay(config.data, baselines, episodes, False, schedule, self.store, deadlines)  # type: ignore[arg-type]
        self.base = base

    def publish(self, version: int) -> None:
        self.store.call(PolicyStore.publish, version, {"policy": Shard(0, [], [], [])}, 0.0)

    def page(self, number: int) -> pa.Table:
        return self.stage(pa.table({"id": [number]}))

    def pages(self, count: int) -> list[list[dict[str, Any]]]:
        made = []
        for number in range(count):
            self.publish(self.base + number)
            made.append(self.page(number).to_pylist())
        return made


def test_tokens_and_log_probs_are_those_of_the_recording(tmp_path: Path) -> None:
    replay = Replayed(tmp_path)
    table = replay.page(0)
    assert table.schema.names == [*PROMPT.names, *ROLLOUT.names]
    assert table.schema.types == [*PROMPT.types, *ROLLOUT.types]
    for row, was in zip(table.to_pylist(), replay.recorded[: BATCH * SAMPLES], strict=True):
        for name in ("uid", "prompt_ids", "ground_truth", "extra_info", "data_source", "prompt_index"):
            assert row[name] == was[name]
        for name in ("sample", "response_ids", "response_mask", "response", "finish_reason", "engine"):
            assert row[name] == was[name]
        # To the last bit of a float32.
        assert row["rollout_log_probs"] == pa.array(was["rollout_log_probs"], pa.float32()).to_pylist()
        assert row["generate_s"] is row["load_s"] is None


@pytest.mark.parametrize(("staleness", "versions"), [(0, [4, 5, 6]), (1, [4, 4, 5])])
def test_positions_and_versions_are_those_of_the_run_that_trains(
    tmp_path: Path, staleness: int, versions: list[int]
) -> None:
    replay = Replayed(tmp_path, base=4, staleness=staleness)
    for done, rows in enumerate(replay.pages(3)):
        assert {row["iteration"] for row in rows} == {5 + done}
        chunks = [chunk for chunk in (2 * done, 2 * done + 1) for _ in range(2 * SAMPLES)]
        assert [row["chunk"] for row in rows] == chunks
        for row in rows:
            assert row["split"] == "train" and row["policy_version"] == versions[done]
            assert row["version_runs"] == [{"version": versions[done], "tokens": len(row["response_ids"])}]
        cursor = replay.store.call(PolicyStore.end_of_iteration, 5 + done)
        epoch, offset = divmod((done + 1) * BATCH, GROUPS)
        assert cursor == PromptCursor(epoch, offset, batch=6 + done)


@pytest.mark.parametrize("batch", [1, 3, 5, 8, GROUPS, GROUPS + 2])
def test_passes_follow_each_other_whatever_the_size_of_an_iteration(tmp_path: Path, batch: int) -> None:
    iterations = 2 * GROUPS // batch
    replay = Replayed(tmp_path, batch, iterations)
    pages = replay.pages(iterations + 1)
    assert [len(rows) for rows in pages] == [batch * SAMPLES] * iterations + [0]
    seen = [(row["uid"], row["epoch"], row["offset"]) for rows in pages for row in rows[::SAMPLES]]
    visits = [divmod(visit, GROUPS) for visit in range(iterations * batch)]
    assert seen == [(f"0-{group}/{epoch}" if epoch else f"0-{group}", epoch, group) for epoch, group in visits]


def test_a_resumed_replay_goes_on_behind_its_cursor(tmp_path: Path) -> None:
    whole = [row["uid"] for rows in Replayed(tmp_path, 5, 8).pages(8) for row in rows]
    for stop in (1, 4):
        cursor = PromptCursor(*divmod(5 * stop, GROUPS))
        rest = Replayed(tmp_path, 5, 8, stop, cursor).pages(8 - stop)
        assert [row["uid"] for rows in rest for row in rows] == whole[5 * stop * SAMPLES :]


def test_rows_are_read_one_iteration_ahead_and_no_further(tmp_path: Path) -> None:
    replay = Replayed(tmp_path)
    replay.publish(0)
    assert len(replay.page(1)) == BATCH * SAMPLES
    with pytest.raises(TimeoutError, match="waited .* for policy version 1 from"):
        replay.page(2)


def test_a_page_may_hold_several_iterations(tmp_path: Path) -> None:
    replay = Replayed(tmp_path, iterations=5, page_prompts=2 * BATCH)
    replay.publish(0)
    assert replay.page(0)["iteration"].unique().to_pylist() == [1, 2]
    replay.publish(1)
    replay.publish(2)
    replay.publish(3)
    assert replay.page(2)["iteration"].unique().to_pylist() == [5]
    assert len(replay.page(3)) == 0


def test_each_iteration_says_where_the_recording_stands(tmp_path: Path) -> None:
    replay = Replayed(tmp_path, iterations=6)
    replay.pages(6)
    _, events = asyncio.run(replay.store.store.read_events(0, 0.0))
    made = [event.metrics for event in events if hasattr(event, "metrics")]
    assert made == [{"prompts/recorded_iteration": number} for number in (1, 2, 3, 1, 2, 3)]


def test_recorded_baselines_come_along_where_the_estimator_reads_them(tmp_path: Path) -> None:
    replay = Replayed(tmp_path, baselines=True, baseline=0.75)
    table = replay.page(0)
    assert table.schema.names[-1] == "baseline" and table["baseline"].unique().to_pylist() == [0.75]
    assert len(table) == BATCH * SAMPLES


def test_episodes_keep_their_contexts_spans_and_rewards(tmp_path: Path) -> None:
    episode = {
        "contexts": [{"prompt": None, "tokens": 1}, {"prompt": [4, 5], "tokens": 2}],
        "spans": [{"kind": 1, "tokens": 3, "reward": 0.5}],
        "messages": "[]",
        "env_score": 0.5,
        "env_parts": "{}",
        "env_error": None,
        "turns": 1,
        "ended": "stop",
        "episode": "{}",
    }
    table = Replayed(tmp_path, episodes=True, **episode).page(0)
    assert table.schema.names == [*PROMPT.names, *ROLLOUT.names, *AGENT.names]
    assert table.schema.types == [*PROMPT.types, *ROLLOUT.types, *AGENT.types]
    assert table.select(AGENT.names).to_pylist() == [episode] * (BATCH * SAMPLES)
