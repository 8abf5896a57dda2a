"""Engines that give their memory back, and engines that die: the order of what they are told, on a recording stand-in.

No GPU is used, and no memory: that sleeping frees any is vLLM's own business.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.errors import FinalError
from pipeline.generation import EngineOutput, EngineRequest
from pipeline.rollout import engines
from pipeline.rollout import stage as stage_module
from pipeline.rollout.stage import Rollout
from pipeline.store.versions import Ticket
from tests.rollout.test_stage import FakeEngine, Make, chunk, generate, make  # noqa: F401 (a fixture)


class Recording(FakeEngine):
    """Knows whether it is awake and holds weights, and refuses what a real one could not do."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.asleep = self.weights = False
        self.dies = ""

    def sleep(self) -> None:
        assert not self._running and not self.asleep
        self.log.append("sleep")
        self.asleep, self.weights = True, False

    def wake(self, shards: list[Any], timeout: float, version: int) -> None:
        assert self.asleep
        self.log.append("wake")
        self.asleep, self.weights, self.version = False, True, version

    def load(self, shards: list[Any], timeout: float, version: int) -> None:
        assert not self.asleep
        if self.dies == "load":
            raise MemoryError("no room for the weights")
        if self.dies == "divide":
            raise ZeroDivisionError
        self.log.append("load")
        self.weights, self.version = True, version

    def add(self, request_id: str, request: EngineRequest) -> None:
        assert not self.asleep and self.weights
        super().add(request_id, request)

    def step(self) -> list[EngineOutput]:
        if self.dies == "step":
            raise RuntimeError("CUDA error: an illegal memory access")
        self.log.append("step")
        return super().step()


@pytest.fixture
def sleepy(make: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rollout]:  # noqa: F811
    """A stage with `rollout.sleep` whose engine records; it is at `.fake`."""

    def made(*tickets: Ticket, sleep: bool = True) -> Rollout:
        made_stage = make("grpo", *tickets)
        made_stage._rollout.sleep = sleep
        engine = Recording()
        monkeypatch.setattr(engines, "build", lambda *args: engine)
        rebuilt = Rollout(*made_stage.args)  # type: ignore[attr-defined]
        rebuilt.fake = engine  # type: ignore[attr-defined]
        return rebuilt

    return made


def test_an_engine_sleeps_from_its_start_and_whenever_it_returns_its_last_chunk(sleepy: Callable[..., Rollout]) -> None:
    stage = sleepy(Ticket(0, []), Ticket(1, []))
    assert stage.fake.log == ["sleep"], "before any chunk came"
    versions = []
    for _ in range(2):
        stage.fake.log.clear()
        versions += generate(stage, chunk())["policy_version"].to_pylist()
        assert stage.fake.log == ["wake", "step", "sleep"] and stage.fake.asleep, "it sleeps when the rows come"
    assert versions == [0] * 6 + [1] * 6


def test_a_further_chunk_of_the_same_version_finds_its_weights_again(sleepy: Callable[..., Rollout]) -> None:
    stage = sleepy(Ticket(3, []), Ticket(3, []))
    generate(stage, chunk("val"))
    stage.fake.log.clear()
    assert set(generate(stage, chunk())["policy_version"].to_pylist()) == {3}
    assert stage.fake.log == ["wake", "step", "sleep"]


def test_chunks_together_wake_it_once_and_the_last_one_lets_it_sleep(sleepy: Callable[..., Rollout]) -> None:
    stage = sleepy(*[Ticket(0, [])] * 3)
    stage.fake.log.clear()
    awake_at_return = []

    async def one() -> None:
        await stage(chunk())
        awake_at_return.append(not stage.fake.asleep)

    async def all_of_them() -> None:
        await asyncio.wait_for(asyncio.gather(one(), one(), one()), 30.0)

    asyncio.run(all_of_them())
    told = [what for what in stage.fake.log if what != "step"]
    assert told == ["wake", "sleep"]
    assert awake_at_return[-1] is False


def test_a_chunk_that_waits_for_its_version_keeps_nobody_awake(sleepy: Callable[..., Rollout]) -> None:
    stage = sleepy(Ticket(0, []))
    published = asyncio.Event()
    first, admit = iter([True]), stage._policy.admit

    async def one_version(split: str, number: int, version: int) -> Ticket:
        if next(first, False):
            return await admit(split, number, version)
        await published.wait()
        return Ticket(1, [])

    stage._policy.admit = one_version  # type: ignore[method-assign]

    async def iterate() -> None:
        ahead = [asyncio.ensure_future(stage(chunk())) for _ in range(2)]
        done, _ = await asyncio.wait(ahead, timeout=30.0, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1 and stage.fake.asleep, "the trainer computes now"
        published.set()
        await asyncio.wait_for(asyncio.gather(*ahead), 30.0)

    asyncio.run(iterate())
    assert stage.fake.log == ["sleep", "wake", "step", "sleep", "wake", "step", "sleep"]


def test_without_the_setting_nobody_sleeps(sleepy: Callable[..., Rollout]) -> None:
    stage = sleepy(Ticket(0, []), Ticket(0, []), sleep=False)
    for _ in range(2):
        generate(stage, chunk())
    assert stage.fake.log == ["load", "step", "step"]


class Ended(BaseException):
    """The process would be gone."""


@pytest.mark.parametrize("dies", ["step", "load"])
@pytest.mark.parametrize("again", [False, True])
def test_a_dead_engine_is_started_again_unless_that_was_of_no_use(
    sleepy: Callable[..., Rollout], monkeypatch: pytest.MonkeyPatch, dies: str, again: bool
) -> None:
    def end() -> None:
        raise Ended

    monkeypatch.setattr(stage_module, "end_process", end)
    monkeypatch.setattr(stage_module, "restarted", lambda: again)
    stage = sleepy(Ticket(0, []), sleep=False)
    stage.fake.dies = dies
    reason = "illegal memory access" if dies == "step" else "no room for the weights"
    if again:
        with pytest.raises(FinalError, match=f"was started again and died before it had finished a chunk: .*{reason}"):
            generate(stage, chunk())
    else:
        with pytest.raises(Ended):
            generate(stage, chunk())
    # One chunk is proof enough that starting it again is of use.
    stage = sleepy(Ticket(0, []), Ticket(1, []), sleep=False)
    generate(stage, chunk())
    stage.fake.dies = dies
    with pytest.raises(Ended):
        generate(stage, chunk())


def test_an_error_of_another_kind_is_an_error(sleepy: Callable[..., Rollout]) -> None:
    stage = sleepy(Ticket(0, []), sleep=False)
    stage.fake.dies = "divide"
    with pytest.raises(ZeroDivisionError):
        generate(stage, chunk())
