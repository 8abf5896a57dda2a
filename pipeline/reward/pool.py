"""The reward workers of this process: the assignment of calls to workers, and the end of calls that hang.

    reward stage ─► pool ─► worker (plain functions, one call at a time)
                       ├──► worker (another one, when the first is stuck)
                       └──► worker (`async def` functions, all calls at once)

A pool lives as long as its process (a Ray worker), so modules stay loaded and clients connected between chunks. One
thread sends calls, reads answers, checks deadlines and memory every `TICK_S`, and starts and ends workers.
"""

import atexit
import dataclasses
import itertools
import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait

from pipeline.config.reward import RewardConfig
from pipeline.reward.functions import budget_for, functions
from pipeline.reward.program import NO_SCORE
from pipeline.reward.rate_limit import RateLimit
from pipeline.reward.result import Answer, answer_from, failed
from pipeline.reward.worker import RewardCall, RewardWorker, WorkerLost

TICK_S = 0.05
START_S = 120.0  # seconds in which a worker must have loaded the functions
LAG_S = 2.0  # seconds after its limit in which an `async def` function must have been ended by its own event loop
GRACE_S = 1.0  # seconds without a free worker after which more are started; less if the limit of a call is short
AHEAD_S = 0.02  # seconds of work with cheap rules that a worker is given at once, judged by the rows before
MAX_AHEAD = 64  # rows of cheap rules that a worker is given at once
IDLE_S = 60.0
"""Seconds without need of all workers for plain functions after which free ones are closed; one always stays."""

CLOSED = "reward: the pool of reward workers was closed"


class Pool:
    """The workers of this process for one `reward` section; `run` may be called from several threads.

    Raises:
        ValueError: as `functions`.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        made = functions(config)
        self._limit = RateLimit(config.rate_limit.max_concurrent, config.rate_limit.max_per_minute)
        self._grace = min([GRACE_S, *(function.timeout_s / 10 for function in made)])
        self._ids = itertools.count()
        self._waiting: dict[str, deque[RewardCall]] = {function.name: deque() for function in made}
        self._workers: list[RewardWorker] = []
        self._asynchronous: frozenset[str] = frozenset()
        """Names of the `async def` functions; known once a worker has loaded them."""
        self._shared: RewardWorker | None = None  # the worker that calls `async def` functions
        self._ahead = 1  # rows of cheap rules that a worker is given at once
        self._free_at = 0.0  # when a worker was last free, or nothing waited
        self._needed_at = 0.0  # when all workers for plain functions last had something to do
        self._lock = threading.Lock()  # guards the two below; everything above belongs to the thread
        self._new: list[RewardCall] = []
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="reward-pool", daemon=True)
        self._thread.start()

    def run(self, calls: Sequence[RewardCall]) -> list[list[Answer]]:
        """Make the calls, and return the answers for the rows of each.

        Raises:
            ValueError: the functions cannot be loaded; the sentence names the setting and the reason.
            RuntimeError: the pool was closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(CLOSED)
            if not self._new:
                self._wake.send(b"x")
            self._new += calls
        return [call.answers.result() for call in calls]

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._wake.send(b"x")
        self._thread.join(timeout=10)

    # Everything below runs in the thread.

    def _serve(self) -> None:
        while not self._closed:
            try:
                self._step()
            except Exception as error:  # noqa: BLE001 (callers wait for answers)
                self._end_all(error)
        self._end_all(RuntimeError(CLOSED))
        self._wake.close()
        self._woken.close()

    def _end_all(self, error: Exception) -> None:
        """End all workers, and let every call fail."""
        with self._lock:
            calls, self._new = self._new, []
        for queue in self._waiting.values():
            calls += queue
            queue.clear()
        for worker in self._workers:
            worker.kill()
            for call in worker.calls.values():
                calls.append(call)
                if not call.by_rule:
                    self._limit.end()
        self._workers.clear()
        self._shared = None
        for call in calls:
            call.answers.set_exception(error)

    def _step(self) -> None:
        """Take in new calls, serve every worker once, and wait until something happens."""
        now = time.monotonic()
        with self._lock:
            new, self._new = self._new, []
        if new and not any(self._waiting.values()):
            self._free_at = now
        for call in new:
            self._waiting[call.function.name].append(call)
        for worker in list(self._workers):
            try:
                self._attend(worker)
            except WorkerLost as lost:
                self._drop(worker, lost)
        self._resize()
        busy = any(self._waiting.values()) or any(worker.calls or worker.loading for worker in self._workers)
        ready = wait([self._woken, *(worker.connection for worker in self._workers)], TICK_S if busy else IDLE_S)
        if self._woken in ready:
            self._woken.recv(4096)

    def _attend(self, worker: RewardWorker) -> None:
        """Read a worker's answers and give it the calls that it can begin.

        Raises:
            WorkerLost: the worker ended, or has to be ended.
            ValueError: it cannot load the functions.
        """
        loading = worker.loading
        for call, answers in worker.receive():
            self._finish(worker, call, answers, time.monotonic())
        now = time.monotonic()
        # Answers are read first, so the row in progress is the one that fills the memory or is late.
        worker.check_memory(now)
        late = next((call for call in worker.calls.values() if call.deadline < now), None)
        if late is not None:
            blocked = "; an async function blocked the event loop, which all rows share"
            raise WorkerLost(
                f"TimeoutError: {NO_SCORE.format(late.limit_s)}{blocked if self._shared is worker else ''}"
            )
        if worker.loading:
            if now > worker.began_at + START_S:
                raise ValueError(f"importing the reward functions took longer than {START_S:g} s")
            return
        if loading:
            self._asynchronous = frozenset(worker.asynchronous)
            self._free_at = self._needed_at = now
        calls = self._take(worker, now)
        if calls:
            worker.began_at, worker.given = now, len(calls)
            worker.begin({next(self._ids): call for call in calls})

    def _take(self, worker: RewardWorker, now: float) -> list[RewardCall]:
        """Take the waiting calls that a worker can begin: one, or several of cheap rules, or all for the shared
        worker."""
        if worker.calls and worker is not self._shared:
            return []
        if self._shared is None and any(self._waiting[name] for name in self._asynchronous):
            self._shared = worker
        shared = worker is self._shared
        calls: list[RewardCall] = []
        for name, queue in self._waiting.items():
            if (name in self._asynchronous) != shared:
                continue
            while queue and self._may_begin(queue[0], now):
                first = not calls
                if not shared and not first and not (calls[-1].cheap and queue[0].cheap and len(calls) < self._ahead):
                    break
                call = queue.popleft()
                calls.append(call)
                if shared or first:
                    # The others get their deadlines as soon as the rows before them are answered.
                    call.deadline = now + call.limit_s + (LAG_S if shared else 0.0)
                if not call.by_rule:
                    self._limit.begin(now)
        return calls

    def _may_begin(self, call: RewardCall, now: float) -> bool:
        return call.by_rule or self._limit.may_begin(now)

    def _finish(self, worker: RewardWorker, call: RewardCall, answers: list[Answer], now: float) -> None:
        """Handle a worker's answers to a call."""
        self._set(call, answers)
        following = next(iter(worker.calls.values()), None)
        if following is None or worker is self._shared:
            self._free_at = now
            if call.cheap:
                took = max(now - worker.began_at, 1e-4)
                self._ahead = max(1, min(MAX_AHEAD, int(worker.given * AHEAD_S / took)))
        else:
            following.deadline = now + following.limit_s

    def _set(self, call: RewardCall, answers: list[Answer]) -> None:
        if not call.by_rule:
            self._limit.end()
        call.answers.set_result(answers)

    def _resize(self) -> None:
        """Start workers if calls wait and none has become free for a while; close unneeded workers."""
        now = time.monotonic()
        plain = [worker for worker in self._workers if worker is not self._shared]
        busy = all(worker.calls for worker in plain)
        queues = [queue for name, queue in self._waiting.items() if name not in self._asynchronous]
        for_shared = self._shared is None and any(self._waiting[name] for name in self._asynchronous)
        if (not plain and any(queues)) or (busy and for_shared):
            self._workers.append(RewardWorker(self._config))
        elif plain and busy:
            self._needed_at = now
            waits = any(queue and self._may_begin(queue[0], now) for queue in queues)
            if waits and now >= self._free_at + self._grace:
                # The number doubles: among rows that hang, each new worker soon meets another one.
                for _ in range(min(len(plain), self._config.max_processes - len(plain))):
                    self._workers.append(RewardWorker(self._config))
        elif now > self._needed_at + IDLE_S:
            loaded = [worker for worker in plain if not worker.loading]
            free = [worker for worker in loaded if not worker.calls]
            for worker in free[::-1][: len(loaded) - 1]:
                self._workers.remove(worker)
                worker.kill()

    def _drop(self, worker: RewardWorker, lost: WorkerLost) -> None:
        """Remove a worker: answer the calls that it had begun, and put its later calls back.

        The answer is an error, or a wrong answer if the rule has spent its budget.

        Raises:
            ValueError: the worker was lost while it loaded the functions.
        """
        worker.kill()
        self._workers.remove(worker)
        if self._shared is worker:
            self._shared = None
        if worker.loading:
            raise ValueError(f"the reward functions were not loaded: {lost}{worker.last_line()}")
        for call in reversed(worker.calls.values()):
            if call.deadline == math.inf:
                # More of these may hang, one after the other in one worker.
                call.alone = True
                self._waiting[call.function.name].appendleft(call)
                continue
            budget = budget_for(call.function, str(call.rows[0][0]))
            answer = answer_from(budget.wrong) if budget is not None and lost.exhausted else failed(str(lost))
            self._set(call, [answer] * len(call.rows))


_POOLS: dict[str, Pool] = {}  # the one pool of this process, by its settings
_LOCK = threading.RLock()


def pool_for(config: RewardConfig) -> Pool:
    """Return this process's pool for these settings; a pool for other settings is closed.

    Raises:
        ValueError: as `functions`.
    """
    key = json.dumps(dataclasses.asdict(config))
    with _LOCK:
        if key not in _POOLS:
            made = Pool(config)
            close()
            _POOLS[key] = made
        return _POOLS[key]


def close() -> None:
    """End all reward workers of this process."""
    with _LOCK:
        while _POOLS:
            _POOLS.popitem()[1].close()


atexit.register(close)
