"""Calls of rules and reward functions in processes that can be killed: the lanes.

    reward stage ─► pool ─► lane (plain functions, one call at a time)
                       ├──► lane (another one, where the first is stuck)
                       └──► lane (`async def` functions, all calls at once)

1. A pool lives as long as its process (a Ray worker), so that modules stay loaded and clients connected between chunks.
2. A lane is given one row at a time, of rules as many as it works on for `AHEAD_S`. It answers each before it begins
   the next one, so it is always known which row it died of. A call that takes longer than its function's limit has its
   lane killed, with every process that lane started, and its row becomes an error; the rows behind it go elsewhere.
3. Others do not wait behind it: when no lane has become free for a while, another one is opened, up to
   `reward.max_processes`. Rows that hang cost a chunk one limit together, not one each.
4. Lanes inherit no descriptors (Ray's sockets in particular), have a session of their own, and are killed by the kernel
   when the thread that started them ends: it is one thread, which ends with the process.

One thread runs all of this on an event loop. Everything with a time in it is looked at by `_watch`, every `TICK_S`.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.reward.config import RewardConfig
from pipeline.reward.functions import Function, functions
from pipeline.reward.lane import MAX_ERROR, Answer, no_score_after
from pipeline.reward.limits import RateLimit
from pipeline.reward.process import Call, Job, Lane, ending, trusted

TICK_S = 0.05
START_S = 120.0
"""Seconds in which a lane must have loaded the functions."""
LAG_S = 2.0
"""Seconds after its limit in which an `async def` function must have been ended by its own event loop."""
GRACE_S = 1.0
"""Seconds without a free lane after which another one is opened; less where the limit of a call is short."""
AHEAD_S = 0.02
"""Seconds of work with rules that a lane is given at once, going by the rows before."""
SOON_S = 1e-5
"""Seconds that any row counts as taking: answers that were read together seem to take none."""
IDLE_S = 60.0
"""Seconds after which a lane that was not needed is closed."""


class Pool:
    """The lanes of this process for one set of functions; `run` may be called from several threads.

    Args:
        called: what can be called.
        settings: what each lane loads.
        max_processes: most lanes for plain functions.
        limit: of calls of the user's own functions.
    """

    def __init__(self, called: Sequence[Function], settings: Any, max_processes: int, limit: RateLimit) -> None:
        self.users = 0
        """Callers that hold it; see `using`."""
        self._functions = {function.name: function for function in called}
        self._settings, self._max_processes, self._limit = settings, max_processes, limit
        self._grace = min(GRACE_S, min(function.timeout_s for function in called) / 10)
        self._ids = itertools.count()
        self._lanes: list[Lane] = []
        self._killed: list[subprocess.Popen[bytes]] = []
        self._waiting: dict[str, deque[Job]] = {name: deque() for name in self._functions}
        self._asynchronous: frozenset[str] = frozenset()
        """Names of the `async def` functions; known once a lane has loaded them."""
        self._pace: dict[str | None, float] = {}
        """Seconds that a row took a rule of late, by data source."""
        self._refused: str | None = None
        """Why the functions cannot be loaded."""
        self._free_at = 0.0
        """When a lane was last free, or nobody waited for one."""
        self._watcher: asyncio.Task[None] | None = None
        # Ray's workers make loops of uvloop, whose transports are no `asyncio.Transport`.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward", daemon=True)
        self._thread.start()

    def run(self, calls: Sequence[Call]) -> list[list[Answer]]:
        """What became of each row of each call.

        Raises:
            ValueError: the functions cannot be loaded; the sentence names the setting and the reason.
            RuntimeError: the thread of the pool has ended.
        """
        return self._wait(asyncio.run_coroutine_threadsafe(self._run(calls), self._loop))

    def start(self) -> None:
        """Load the functions, if that has not been done. Raises as `run`."""
        self._wait(asyncio.run_coroutine_threadsafe(self._start(), self._loop))

    def close(self) -> None:
        """End all lanes and the thread."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        for process in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)

    def _wait(self, future: "concurrent.futures.Future[Any]") -> Any:
        # Every call has its deadline in the thread; here it is enough to see that the thread lives.
        while True:
            try:
                return future.result(timeout=10)
            except TimeoutError:
                if future.done():
                    return future.result()
                if not self._thread.is_alive():
                    raise RuntimeError("reward: the thread that calls the reward functions has ended") from None

    # Everything below runs in the pool's thread.

    async def _close(self) -> None:
        for lane in list(self._lanes):
            self.ended(lane, "the pool was closed")
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def _run(self, calls: Sequence[Call]) -> list[list[Answer]]:
        now = time.monotonic()
        self._close_unused(now)
        if not any(self._waiting.values()):
            self._free_at = now
        jobs = [Job(call, self._loop.create_future()) for call in calls]
        for job in jobs:
            self._waiting[job.call.function].append(job)
        self._hand_out()
        self._watch_on()
        return await asyncio.gather(*(job.answers for job in jobs))

    async def _start(self) -> None:
        if not self._lanes:
            self._open()
        self._watch_on()
        while not any(lane.ready for lane in self._lanes):
            if self._refused:
                raise ValueError(self._refused)
            await asyncio.sleep(TICK_S / 5)

    def _hand_out(self) -> None:
        """Give waiting jobs to lanes while there are both."""
        now = time.monotonic()
        for name, queue in self._waiting.items():
            while queue and self._may_begin(name, now):
                lane = self._lane_for(name)
                if lane is None:
                    break
                self._begin(lane, self._next(queue), now)

    def _may_begin(self, name: str, now: float) -> bool:
        return self._functions[name].path is None or self._limit.may_begin(now)

    def _lane_for(self, name: str) -> Lane | None:
        if name in self._asynchronous:
            return next((lane for lane in self._lanes if lane.shared and lane.ready and not lane.dead), None)
        return next((lane for lane in self._lanes if lane.free), None)

    def _next(self, queue: deque[Job]) -> deque[Job]:
        """What one lane is given at once: a job, or several for one rule that is soon done with them."""
        jobs = deque([queue.popleft()])
        source = _source(jobs[0])
        if self._is_rule(jobs[0]):
            most = AHEAD_S / self._pace.get(source, AHEAD_S)
            while queue and len(jobs) < most and _source(queue[0]) == source:
                jobs.append(queue.popleft())
        return jobs

    def _begin(self, lane: Lane, jobs: deque[Job], now: float) -> None:
        number, call = next(self._ids), jobs[0].call
        jobs[0].deadline = now + call.limit_s + (LAG_S if lane.shared else 0.0)
        lane.jobs[number], lane.used_at = jobs, now
        if not self._is_rule(jobs[0]):
            self._limit.begin(now)
        rows = [row for job in jobs for row in job.call.rows]
        lane.send({"id": number, "function": call.function, "rows": rows, "limit_s": call.limit_s})

    def received(self, lane: Lane, content: Any) -> None:
        """A frame from a lane: what it has loaded, or an answer.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        if lane not in self._lanes:
            return
        now = time.monotonic()
        if not lane.ready:
            if "refused" in content:
                self._drop(lane)
                return self._refuse(str(content["refused"]))
            self._asynchronous = frozenset(content["asynchronous"])
            lane.ready, lane.shared = True, lane.shared or len(self._asynchronous) == len(self._functions)
        else:
            jobs = lane.jobs[content["id"]]
            answers = trusted(content["answers"], len(jobs[0].call.rows))
            job = jobs.popleft()
            self._finish(job, answers)
            if self._is_rule(job):
                took, before = max(now - lane.used_at, SOON_S), self._pace.get(_source(job), AHEAD_S)
                self._pace[_source(job)] = (took + before) / 2
            if jobs:
                lane.used_at, jobs[0].deadline = now, now + jobs[0].call.limit_s
                return
            del lane.jobs[content["id"]]
        lane.used_at = self._free_at = now
        self._hand_out()

    def _is_rule(self, job: Job) -> bool:
        return self._functions[job.call.function].path is None

    def _finish(self, job: Job, answers: list[Answer]) -> None:
        if not self._is_rule(job):
            self._limit.end()
        if not job.answers.done():
            job.answers.set_result(answers)

    def ended(self, lane: Lane, reason: str) -> None:
        """A lane is of no use any more; `reason` becomes the error of what it worked on."""
        if lane not in self._lanes:
            return
        self._drop(lane)
        given, lane.jobs = lane.jobs, {}
        for jobs in given.values():
            job = jobs.popleft()
            self._finish(job, [(0.0, "{}", reason[:MAX_ERROR])] * len(job.call.rows))
            # It has not begun those. More of them may hang: they are handed out one by one until they prove fast.
            self._pace.pop(_source(job), None)
            self._waiting[job.call.function].extendleft(reversed(jobs))
        if not lane.ready:
            words = lane.last_words()
            said = f"; the last that it wrote: {words}" if words else ""
            self._refuse(f"the process of the reward functions did not load them: {reason}{said}")

    def _drop(self, lane: Lane) -> None:
        self._lanes.remove(lane)
        lane.kill()
        self._killed.append(lane.process)

    def _refuse(self, sentence: str) -> None:
        """The functions cannot be loaded: all that waits fails."""
        self._refused = sentence
        for queue in self._waiting.values():
            while queue:
                job = queue.popleft()
                if not job.answers.done():
                    job.answers.set_exception(ValueError(sentence))

    def _open(self, shared: bool = False) -> None:
        """Start another lane; it reports when it has loaded the functions."""
        self._refused = None
        lane = Lane(self, self._settings, shared, time.monotonic())
        self._lanes.append(lane)
        lane.connecting = self._loop.create_task(lane.connect())

    def _close_unused(self, now: float) -> None:
        free = [lane for lane in self._lanes if lane.free]
        for lane in free[1:]:
            if now - lane.used_at > IDLE_S:
                self.ended(lane, "not needed")

    def _watch_on(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        """While anything is under way: end what is late, see what has died, open a lane where one is missing."""
        try:
            while any(self._waiting.values()) or any(lane.jobs or not lane.ready for lane in self._lanes):
                self._look(time.monotonic())
                await asyncio.sleep(TICK_S)
        except Exception as error:  # noqa: BLE001 (a caller waits, and would for ever)
            given = [jobs for lane in self._lanes for jobs in lane.jobs.values()]
            for job in itertools.chain(*self._waiting.values(), *given):
                if not job.answers.done():
                    job.answers.set_exception(RuntimeError(f"reward: {type(error).__name__}: {error}"))
            for queue in self._waiting.values():
                queue.clear()

    def _look(self, now: float) -> None:
        self._killed = [process for process in self._killed if process.poll() is None]
        for lane in list(self._lanes):
            late = [jobs[0] for jobs in lane.jobs.values() if jobs[0].deadline < now]
            if late:
                blocked = "; an async function blocked the event loop, which all rows share" if lane.shared else ""
                self.ended(lane, f"TimeoutError: {no_score_after(late[0].call.limit_s)}{blocked}")
            elif not lane.ready and now > lane.begun_at + START_S:
                self.ended(lane, f"importing them took longer than {START_S:g} s")
            # A copy that the function forked may hold the connection open.
            elif (code := lane.process.poll()) is not None:
                if lane.dead or not lane.jobs:
                    self.ended(lane, ending(code))
                lane.dead = True
        # A minute may have gone by for the rate limit.
        self._hand_out()
        self._open_missing(now)

    def _open_missing(self, now: float) -> None:
        """Open the lanes that what waits now cannot do without."""
        plain = [lane for lane in self._lanes if not lane.shared]
        for name, queue in self._waiting.items():
            if not queue or not self._may_begin(name, now):
                continue
            if name in self._asynchronous:
                if len(plain) == len(self._lanes):
                    self._open(shared=True)
            elif not plain:
                return self._open()
            elif len(plain) < self._max_processes and now - self._free_at >= self._grace:
                # One that is still loading, or free by now, comes first. Twice as many, then twice as many again:
                # where some rows hang, each new lane soon meets another one.
                if all(lane.jobs for lane in plain):
                    for _ in range(min(len(plain), self._max_processes - len(plain))):
                        self._open()
                return


def _source(job: Job) -> str | None:
    """The data source of a call's first row, by which rules are chosen."""
    return job.call.rows[0][0]


_POOLS: dict[str, Pool] = {}
_LOCK = threading.Lock()


@contextlib.contextmanager
def using(config: RewardConfig) -> Iterator[Pool]:
    """This process's pool for the functions of `config`, made where there is none; pools of others are closed.

    Raises:
        ValueError: as `functions`.
    """
    called = functions(config)
    settings = {
        "functions": [dataclasses.asdict(function) for function in called],
        "rule_kwargs": config.rule_kwargs,
        "sandbox": dataclasses.asdict(config.sandbox),
    }
    limits = config.rate_limit
    key = json.dumps([settings, config.max_processes, dataclasses.asdict(limits)])
    with _LOCK:
        for other in [name for name, pool in _POOLS.items() if name != key and not pool.users]:
            _POOLS.pop(other).close()
        if key not in _POOLS:
            limit = RateLimit(limits.max_concurrent, limits.max_per_minute)
            _POOLS[key] = Pool(called, settings, config.max_processes, limit)
        pool = _POOLS[key]
        pool.users += 1
    try:
        yield pool
    finally:
        with _LOCK:
            pool.users -= 1


def close() -> None:
    """End all lanes of this process that nobody uses."""
    with _LOCK:
        for key in [key for key, pool in _POOLS.items() if not pool.users]:
            _POOLS.pop(key).close()


atexit.register(close)
