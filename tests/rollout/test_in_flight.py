"""Weights that change while responses run, on an engine that takes as many steps as a test lets it."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipeline import rows
from pipeline.rollout import vllm
from pipeline.rollout.stage import Rollout
from pipeline.store.versions import Ticket
from tests.rollout.test_stage import FakeEngine, Make, chunk, make  # noqa: F401 (a fixture)


class Slow(FakeEngine):
    """A response has as many tokens as its prompt says, one a step; a token is the version that generated it."""

    def __init__(self, permits: threading.Semaphore) -> None:
        super().__init__()
        self.permits = permits
        self.resets: list[bool] = []
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=None))
        self._tokens: dict[str, tuple[int, list[int]]] = {}

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        self.asked.append((prompt, params))
        self._tokens[request_id] = prompt["prompt_token_ids"][0], []

    def step(self) -> list[Any]:
        assert self.permits.acquire(timeout=30.0)
        done = []
        for request_id, (length, tokens) in list(self._tokens.items()):
            tokens.append(int(self.version))
            if len(tokens) == length:
                del self._tokens[request_id]
                done.append(self._output(request_id, tokens))
        return done

    def _output(self, request_id: str, tokens: list[int]) -> SimpleNamespace:
        starts = [place for place in range(len(tokens)) if place == 0 or tokens[place] != tokens[place - 1]]
        spans = [
            SimpleNamespace(version=str(tokens[start]), start=start, end=end)
            for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)
        ]
        log_probs = SimpleNamespace(logprobs=[-0.5] * len(tokens))
        completion = SimpleNamespace(
            token_ids=tokens, logprobs=log_probs, finish_reason="length", weight_versions=spans
        )
        return SimpleNamespace(request_id=request_id, finished=True, outputs=[completion])

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self.resets.append(reset_running_requests)


@pytest.fixture
def slow(make: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rollout]:  # noqa: F811
    """A stage with a `Slow` engine, which takes as many steps as it has permits; both are in `.fake`."""

    def made(*tickets: Ticket, **settings: str) -> Rollout:
        first = make("grpo", *tickets, n=1)
        for name, value in settings.items():
            assert hasattr(first._rollout, name)
            setattr(first._rollout, name, value)
        engine = Slow(threading.Semaphore(0))
        monkeypatch.setattr(vllm, "build", lambda *args: engine)
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


@pytest.mark.parametrize(("update_kv", "resets"), [("recompute", [True, True]), ("keep", [])])
def test_running_responses_go_on_with_new_weights(
    slow: Callable[..., Rollout], update_kv: str, resets: list[bool]
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
    assert [prompt["cache_salt"] for prompt, _ in stage.fake.asked] == ["v4", "v4", "v5"]
    assert stage.fake.resets == resets


def test_between_chunks_new_weights_wait(slow: Callable[..., Rollout]) -> None:
    stage = slow(*TWO)
    old, new = asyncio.run(overlapping(stage, of_lengths(2, 9), of_lengths(3), 2))
    assert old["version_runs"].to_pylist() == [[{"version": 4, "tokens": 2}], [{"version": 4, "tokens": 9}]]
    assert new["policy_version"].to_pylist() == [5] and stage.fake.resets == []


def test_a_validation_is_of_one_version(slow: Callable[..., Rollout]) -> None:
    stage = slow(*TWO, weight_update="in_flight")
    validation, new = asyncio.run(overlapping(stage, of_lengths(2, 9, split="val"), of_lengths(3), 2))
    assert {run["version"] for runs in validation["version_runs"].to_pylist() for run in runs} == {4}
    assert new["policy_version"].to_pylist() == [5]


def test_weights_that_do_not_arrive_in_flight_fail_the_running_rows_too(slow: Callable[..., Rollout]) -> None:
    stage = slow(*TWO, Ticket(5, []), weight_update="in_flight")
    stage.fake.aborted = []
    stage.fake.abort_request = stage.fake.aborted.extend
    whole = stage.fake.collective_rpc

    async def one_after_the_other() -> None:
        running = asyncio.ensure_future(stage(of_lengths(9)))
        stage.fake.permits.release(2)
        while stage.engine.steps < 2:
            await asyncio.sleep(0.001)

        def broken(method: str, kwargs: Any = None) -> None:
            raise ValueError("weights bucket 1 of train rank 0 arrived damaged")

        stage.fake.collective_rpc = broken
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
        stage.fake.collective_rpc = whole
        stage.fake.permits.release(1000)
        table = await asyncio.wait_for(stage(of_lengths(3)), 30.0)
        assert table["policy_version"].to_pylist() == [5]

    asyncio.run(one_after_the_other())
