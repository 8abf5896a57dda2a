"""Weights that change while responses run, on an engine that takes as many steps as a test lets it."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from pipeline import rows
from pipeline.generation import EngineOutput, EngineRequest
from pipeline.rollout import engines
from pipeline.rollout.stage import Rollout
from pipeline.store.versions import Ticket
from tests.rollout.test_stage import FakeEngine, Make, chunk, generated, make  # noqa: F401 (a fixture)


class Slow(FakeEngine):
    """A response has as many tokens as its prompt says, one a step; a token is the version that generated it."""

    def __init__(self, permits: threading.Semaphore) -> None:
        super().__init__()
        self.permits = permits
        self.recomputed: list[bool] = []
        self.broken = False
        self.aborted: list[str] = []
        self._tokens: dict[str, tuple[int, list[int]]] = {}

    def add(self, request_id: str, request: EngineRequest) -> None:
        self.asked.append(request)
        self._tokens[request_id] = request.prompt_ids[0], []

    def step(self) -> list[EngineOutput]:
        assert self.permits.acquire(timeout=30.0)
        done = []
        for request_id, (length, tokens) in list(self._tokens.items()):
            tokens.append(self.version)
            if len(tokens) == length:
                del self._tokens[request_id]
                done.append(EngineOutput(request_id, generated(tokens, tokens)))
        return done

    def drain(self) -> list[EngineOutput]:
        return []

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def update(self, shards: list[Any], timeout: float, version: int, recompute: bool) -> None:
        if self.broken:
            raise ValueError("weights bucket 1 of train rank 0 arrived damaged")
        self.load(shards, timeout, version)
        self.recomputed.append(recompute)


@pytest.fixture
def slow(make: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rollout]:  # noqa: F811
    """A stage with a `Slow` engine, which takes as many steps as it has permits; both are in `.fake`."""

    def made(*tickets: Ticket, **settings: str) -> Rollout:
        first = make("grpo", *tickets, n=1)
        for name, value in settings.items():
            assert hasattr(first._rollout, name)
            setattr(first._rollout, name, value)
        engine = Slow(threading.Semaphore(0))
        monkeypatch.setattr(engines, "build", lambda *args: engine)
        rebuilt = Rollout(*first.args)  # type: ignore[attr-defined]
        rebuilt.fake = engine  # type: ignore[attr-defined]
        return rebuilt

    return made


def of_lengths(*lengths: int, split: str = "train") -> pa.Table:
    table = chunk(split).slice(0, len(lengths))
    column = table.column_names.index("prompt_ids")
    return table.set_column(column, rows.PROMPT.field(column), pa.array([[n] for n in lengths], rows.INTS))


async def heard(stage: Rollout) -> None:
    """Time for the engine to be asked for something; it looks after its step, which waits for a permit."""
    for _ in range(500):
        if stage.engine._commands.qsize():
            return
        await asyncio.sleep(0.001)


async def overlapping(stage: Rollout, first: pa.Table, second: pa.Table, steps: int) -> list[pa.Table]:
    """`second` is asked for when the engine has made so many steps for `first`, and then everything ends."""
    running = asyncio.ensure_future(stage(first))
    stage.fake.permits.release(steps)
    while stage.engine.steps < steps:
        if running.done():
            running.result()
        await asyncio.sleep(0.001)
    behind = asyncio.ensure_future(stage(second))
    await heard(stage)
    stage.fake.permits.release(1000)
    return list(await asyncio.wait_for(asyncio.gather(running, behind), 30.0))


TWO = (Ticket(4, []), Ticket(5, []))


@pytest.mark.parametrize(("update_kv", "recompute"), [("recompute", True), ("keep", False)])
def test_running_responses_go_on_with_new_weights(
    slow: Callable[..., Rollout], update_kv: str, recompute: bool
) -> None:
    stage = slow(*TWO, weight_update="in_flight", update_kv=update_kv)
    old, new = asyncio.run(overlapping(stage, of_lengths(2, 9), of_lengths(3), 2))
    # One step may have begun before the weights came.
    (short,), (before, after) = (
        [(run["version"], run["tokens"]) for run in runs] for runs in old["version_runs"].to_pylist()
    )
    assert short == (4, 2)
    assert (before[0], after[0]) == (4, 5) and before[1] in (2, 3) and before[1] + after[1] == 9
    assert new["version_runs"].to_pylist() == [[{"version": 5, "tokens": 3}]]
    # A row is as old as its oldest token.
    assert old["policy_version"].to_pylist() == [4, 4] and new["policy_version"].to_pylist() == [5]
    for table in (old, new):
        assert rows.token_versions(table).tolist() == table["response_ids"].combine_chunks().flatten().to_pylist()
    assert stage.fake.recomputed == [recompute] * 2


def test_between_chunks_new_weights_wait(slow: Callable[..., Rollout]) -> None:
    stage = slow(*TWO)
    old, new = asyncio.run(overlapping(stage, of_lengths(2, 9), of_lengths(3), 2))
    assert old["version_runs"].to_pylist() == [[{"version": 4, "tokens": 2}], [{"version": 4, "tokens": 9}]]
    assert new["policy_version"].to_pylist() == [5] and stage.fake.recomputed == []


def test_a_validation_is_of_one_version(slow: Callable[..., Rollout]) -> None:
    stage = slow(*TWO, weight_update="in_flight")
    validation, new = asyncio.run(overlapping(stage, of_lengths(2, 9, split="val"), of_lengths(3), 2))
    assert {run["version"] for runs in validation["version_runs"].to_pylist() for run in runs} == {4}
    assert new["policy_version"].to_pylist() == [5]


def test_weights_that_do_not_arrive_in_flight_fail_the_running_rows_too(slow: Callable[..., Rollout]) -> None:
    stage = slow(*TWO, Ticket(5, []), weight_update="in_flight")

    async def one_after_the_other() -> None:
        running = asyncio.ensure_future(stage(of_lengths(9)))
        stage.fake.permits.release(2)
        while stage.engine.steps < 2:
            await asyncio.sleep(0.001)

        stage.fake.broken = True
        behind = asyncio.ensure_future(stage(of_lengths(3)))
        await heard(stage)
        stage.fake.permits.release(1)
        with pytest.raises(ValueError, match="arrived damaged"):
            await asyncio.wait_for(behind, 30.0)
        with pytest.raises(ValueError, match="arrived damaged"):
            await asyncio.wait_for(running, 30.0)
        assert stage.fake.aborted == ["0"]
        # The next chunk loads the version again, whatever is left of it in the engine.
        stage.fake._tokens.clear()
        stage.fake.broken = False
        stage.fake.permits.release(1000)
        table = await asyncio.wait_for(stage(of_lengths(3)), 30.0)
        assert table["policy_version"].to_pylist() == [5]

    asyncio.run(one_after_the_other())
