"""The engine loop on a fake engine: every request runs for as many steps as it says."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.generation import EngineOutput
from pipeline.rollout.engine import EngineDead, EngineLoop

WAIT = 30.0


class FakeEngine:
    """Requests are `(text, steps)`; a finished one answers with its text and the version of the weights.

    With a `gate`, every step waits for one permit, so that a test decides what happens between steps.
    """

    def __init__(self, gate: threading.Semaphore | None = None):
        self.version = 0
        self.running: dict[str, list[Any]] = {}
        self.most = 0
        self.log: list[str] = []
        self.gate = gate
        self.dies = self.drains = False
        self.drained: list[int] = []

    def add(self, request_id: str, request: tuple[str, int]) -> None:
        prompt, steps = request
        if prompt == "bad":
            raise ValueError("prompt is bad")
        assert request_id not in self.running
        self.running[request_id] = [prompt, steps, self.version]
        self.most = max(self.most, len(self.running))
        self.log.append(f"add {prompt}")

    def step(self) -> list[EngineOutput]:
        assert self.running, "a step without requests"
        if self.gate is not None:
            assert self.gate.acquire(timeout=WAIT)
        if self.dies:
            raise RuntimeError("out of memory")
        outputs = []
        for request_id, request in reversed(list(self.running.items())):
            request[1] -= 1
            if request[1] <= 0:
                text: Any = f"{request[0]} v{request[2]}-{self.version}"
                outputs.append(EngineOutput(request_id, text))
                del self.running[request_id]
        return outputs

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.running[request_id]
        self.log.append("abort")

    def drain(self) -> list[EngineOutput]:
        """Takes one step if requests run."""
        self.drained.append(self.version)
        return self.step() if self.drains and self.running else []

    def close(self) -> None:
        self.log.append("close")

    def change(self, version: int) -> int:
        """New weights for requests that run, too."""
        self.version = version
        self.log.append(f"change {version}")
        return version

    def load(self, version: int) -> int:
        assert not self.running, "weights changed under running requests"
        self.version = version
        self.log.append(f"load {version}")
        return version


class Loop:
    """An engine loop, its fake engine and the gate of its steps."""

    def __init__(self, gated: bool):
        self.gate = threading.Semaphore(0)
        self.engine = FakeEngine(self.gate if gated else None)
        self.loop = EngineLoop(lambda: self.engine, WAIT)

    def step(self, count: int = 1) -> None:
        """Let the engine take so many steps."""
        self.gate.release(count)

    def open(self) -> None:
        """Let the engine run freely from now on."""
        self.engine.gate = None
        self.gate.release(1000)


@pytest.fixture
def free() -> Iterator[Loop]:
    made = Loop(gated=False)
    yield made
    made.loop.close()


@pytest.fixture
def gated() -> Iterator[Loop]:
    made = Loop(gated=True)
    yield made
    made.open()
    made.loop.close()


def texts(future: Future) -> list[str]:
    found: list[str] = future.result(WAIT)
    return found


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(1, 6), max_size=8), max_size=8))
def test_each_chunk_gets_its_own_outputs_in_its_own_order(chunks: list[list[int]]) -> None:
    made = Loop(gated=False)
    futures = [
        made.loop.submit([(f"chunk {c} request {r}", steps) for r, steps in enumerate(chunk)])
        for c, chunk in enumerate(chunks)
    ]
    for c, (chunk, future) in enumerate(zip(chunks, futures, strict=True)):
        assert texts(future) == [f"chunk {c} request {r} v0-0" for r in range(len(chunk))]
    made.loop.close()


def test_many_chunks_run_in_one_batch_and_end_on_their_own(gated: Loop) -> None:
    def add(engine: FakeEngine) -> list[Future]:
        return [gated.loop.submit([(f"{steps}a", steps), (f"{steps}b", 1)]) for steps in (6, 2, 4)]

    # Submitted from inside a command, so that all three are there before the first step.
    slow, quick, middle = gated.loop.call(add).result(WAIT)
    gated.step(2)
    assert texts(quick) == ["2a v0-0", "2b v0-0"]
    assert not slow.done() and not middle.done()
    gated.step(2)
    assert texts(middle) == ["4a v0-0", "4b v0-0"]
    assert not slow.done()
    late = gated.loop.submit([("late", 1)])
    gated.step(2)
    assert texts(slow) == ["6a v0-0", "6b v0-0"]
    assert texts(late) == ["late v0-0"]
    assert gated.engine.most == 6
    assert gated.loop.steps == 6
    assert gated.loop.busy_s > 0


def test_weights_change_between_chunks_and_never_inside_one(gated: Loop) -> None:
    first = gated.loop.submit([("a", 3), ("b", 1)])
    load = gated.loop.call(lambda engine: engine.load(1), when_idle=True)
    second = gated.loop.submit([("c", 2), ("d", 1)])
    peek = gated.loop.call(lambda engine: list(engine.log))
    gated.step(1)
    # b has finished and a has not: the load waits, and with it all that was asked for behind it.
    assert not load.done() and not second.done() and not peek.done()
    gated.step(2)
    assert texts(first) == ["a v0-0", "b v0-0"]
    assert load.result(WAIT) == 1
    assert peek.result(WAIT) == ["add a", "add b", "load 1", "add c", "add d"]
    gated.step(2)
    assert texts(second) == ["c v1-1", "d v1-1"]


@settings(max_examples=30)
@given(st.lists(st.one_of(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.none()), max_size=12))
def test_any_mix_of_chunks_and_loads_keeps_one_version_per_chunk(actions: list[list[int] | None]) -> None:
    made = Loop(gated=False)
    version, chunks, loads = 0, [], []
    for action in actions:
        if action is None:
            version += 1
            loads.append(made.loop.call(lambda engine, version=version: engine.load(version), when_idle=True))
        else:
            chunks.append((version, made.loop.submit([("x", steps) for steps in action])))
    for version, future in chunks:
        assert set(texts(future)) == {f"x v{version}-{version}"}
    assert [load.result(WAIT) for load in loads] == list(range(1, len(loads) + 1))
    made.loop.close()


def test_a_command_runs_between_steps_without_waiting_for_idle(gated: Loop) -> None:
    chunk = gated.loop.submit([("a", 2)])
    peek = gated.loop.call(lambda engine: len(engine.running))
    gated.step(1)
    assert peek.result(WAIT) == 1
    assert not chunk.done()
    gated.step(1)
    assert texts(chunk) == ["a v0-0"]


def test_a_failing_command_fails_alone(free: Loop) -> None:
    def fail(engine: FakeEngine) -> None:
        raise KeyError("no such weight")

    failed = free.loop.call(fail, when_idle=True)
    with pytest.raises(KeyError, match="no such weight"):
        failed.result(WAIT)
    assert texts(free.loop.submit([("a", 1)])) == ["a v0-0"]


def test_a_chunk_that_cannot_be_added_fails_alone_and_leaves_the_loop_idle(free: Loop) -> None:
    for prompts in (["bad"], ["good", "bad"], ["good", "bad", "good"]):
        chunk = free.loop.submit([(prompt, 2) for prompt in prompts])
        with pytest.raises(ValueError, match="prompt is bad"):
            chunk.result(WAIT)
        # Nothing of it is left that would keep weights from changing.
        assert free.loop.call(lambda engine: engine.load(1), when_idle=True).result(WAIT) == 1
    assert texts(free.loop.submit([("a", 1)])) == ["a v1-1"]


def test_a_dead_engine_fails_every_waiter_and_every_later_call(gated: Loop) -> None:
    running = gated.loop.submit([("a", 5), ("b", 5)])
    blocked = gated.loop.call(lambda engine: engine.load(1), when_idle=True)
    behind = gated.loop.submit([("c", 1)])
    gated.step(1)
    gated.engine.dies = True
    gated.step(1)
    for future in (running, blocked, behind):
        with pytest.raises(EngineDead, match="the rollout engine died: RuntimeError: out of memory") as error:
            future.result(WAIT)
        assert isinstance(error.value.__cause__, RuntimeError)
    gated.loop._thread.join(WAIT)
    assert gated.engine.log[-1] == "close", "no process of it is left"
    for later in (gated.loop.submit([("d", 1)]), gated.loop.call(lambda engine: 1), gated.loop.call(len, True)):
        with pytest.raises(EngineDead, match="out of memory"):
            later.result(WAIT)


def test_an_engine_that_does_not_start_in_time() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"did not start within 0 s \(trainer.deadlines.engine_start\)"):
        EngineLoop(lambda: release.wait(WAIT), start_timeout=0.05)
    release.set()


def test_an_engine_that_fails_to_start() -> None:
    def build() -> Any:
        raise MemoryError("no room for the KV cache")

    with pytest.raises(MemoryError, match="no room for the KV cache"):
        EngineLoop(build, WAIT)


def test_the_engine_is_built_and_used_in_one_thread(free: Loop) -> None:
    threads = [free.loop.call(lambda engine: threading.current_thread().name).result(WAIT) for _ in range(2)]
    built = []

    def build() -> FakeEngine:
        built.append(threading.get_ident())
        return FakeEngine()

    loop = EngineLoop(build, WAIT)
    used = loop.call(lambda engine: threading.get_ident()).result(WAIT)
    loop.close()
    assert threads == ["engine"] * 2
    assert built == [used] != [threading.get_ident()]


def test_close_ends_the_thread_and_leaves_nobody_waiting() -> None:
    made = Loop(gated=True)
    running = made.loop.submit([("a", 100)])
    made.gate.release(2)
    closing = threading.Thread(target=made.loop.close)
    closing.start()
    made.gate.release(50)
    closing.join(WAIT)
    assert not made.loop._thread.is_alive() and made.engine.log[-1] == "close"
    with pytest.raises(EngineDead, match="it was closed"):
        running.result(WAIT)
    with pytest.raises(EngineDead, match="it was closed"):
        made.loop.submit([("b", 1)]).result(WAIT)


def test_giving_up_on_a_chunk_leaves_the_loop_alive(gated: Loop) -> None:
    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(gated.loop.submit([("slow", 2)])), 0.05)
        load = gated.loop.call(lambda engine: engine.load(1), when_idle=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(load), 0.05)

    asyncio.run(impatient())
    gated.open()
    # The load that nobody waits for any more was not started; the next one is.
    assert gated.loop.call(lambda engine: engine.load(2), when_idle=True).result(WAIT) == 2
    assert gated.engine.log == ["add slow", "load 2"]
    assert texts(gated.loop.submit([("a", 1)])) == ["a v2-2"]


# Updates in flight.


def test_an_update_runs_between_steps_of_running_requests(gated: Loop) -> None:
    first = gated.loop.submit([("a", 3), ("b", 1)])
    gated.step(1)
    gated.loop.call(lambda engine: None).result(WAIT)
    # The first step is over, and the second one may have begun; the third has not.
    update = gated.loop.update(lambda engine: engine.change(1))
    second = gated.loop.submit([("c", 1)])
    gated.step(1)
    assert update.result(WAIT) == 1
    gated.step(2)
    assert texts(first) == ["a v0-1", "b v0-0"], "a goes on with the new weights"
    assert texts(second) == ["c v1-1"]


def test_an_update_waits_for_chunks_of_one_version_and_so_do_those_behind_it(gated: Loop) -> None:
    validation = gated.loop.submit([("val", 3)], one_version=True)
    running = gated.loop.submit([("a", 5)])
    update = gated.loop.update(lambda engine: engine.change(1))
    behind = gated.loop.submit([("b", 1)])
    gated.step(2)
    time.sleep(0.05)
    assert not update.done()
    gated.step(1)
    assert texts(validation) == ["val v0-0"]
    assert update.result(WAIT) == 1
    gated.open()
    assert texts(running) == ["a v0-1"] and texts(behind) == ["b v1-1"]


def test_steps_that_were_begun_ahead_end_before_the_update() -> None:
    """What a GPU engine computes ahead belongs to the weights from before."""
    engine = FakeEngine()
    engine.drains = True
    loop = EngineLoop(lambda: engine, WAIT)

    def together(own: FakeEngine) -> tuple[Future, Future]:
        return loop.submit([("a", 1), ("b", 2)]), loop.update(lambda other: other.change(1))

    chunk, update = loop.call(together).result(WAIT)
    assert update.result(WAIT) == 1
    assert texts(chunk) == ["a v0-0", "b v0-1"], "a ended in the step that had been begun"
    assert engine.drained == [0]
    loop.close()


def test_a_failed_update_takes_the_running_chunks_with_it_and_no_others(gated: Loop) -> None:
    def broken(engine: FakeEngine) -> None:
        raise ValueError("weights arrived damaged")

    def all_of_them(engine: FakeEngine) -> list[Future]:
        running = [gated.loop.submit([("a", 9), ("b", 9)]), gated.loop.submit([("c", 9)])]
        return [*running, gated.loop.update(broken), gated.loop.submit([("d", 1)])]

    *failed, later = gated.loop.call(all_of_them).result(WAIT)
    for future in failed:
        with pytest.raises(ValueError, match="weights arrived damaged"):
            future.result(WAIT)
    gated.open()
    assert texts(later) == ["d v0-0"]
    assert gated.engine.log == ["add a", "add b", "add c", "abort", "add d"]
    # Nothing of them is left that would keep weights from changing.
    assert gated.loop.call(lambda engine: engine.load(1), when_idle=True).result(WAIT) == 1


@settings(max_examples=30)
@given(st.lists(st.one_of(st.tuples(st.booleans(), st.lists(st.integers(1, 4), min_size=1, max_size=4)), st.none())))
def test_any_mix_of_chunks_and_updates_keeps_the_versions_in_order(
    actions: list[tuple[bool, list[int]] | None],
) -> None:
    made = Loop(gated=False)
    version, chunks, updates = 0, [], []
    for action in actions:
        if action is None:
            version += 1
            updates.append(made.loop.update(lambda engine, version=version: engine.change(version)))
        else:
            one_version, steps = action
            pairs = [("x", count) for count in steps]
            chunks.append((version, one_version, made.loop.submit(pairs, one_version)))
    for begun, one_version, future in chunks:
        for text in texts(future):
            first, last = map(int, text.removeprefix("x v").split("-"))
            assert first == begun and (last == begun if one_version else begun <= last <= version)
    assert [update.result(WAIT) for update in updates] == list(range(1, len(updates) + 1))
    made.loop.close()
