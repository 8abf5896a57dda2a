"""Pool of the reward workers of this process: gives calls to workers, and ends calls that hang.

    reward stage ─► pool ─► worker (plain functions, one call at a time)
                       ├──► worker (another one, when the first is stuck)
                       └──► worker (`async def` functions, all calls at once)

A pool lives as long as its process (a Ray worker), so modules stay loaded and clients connected between chunks. One
thread sends calls, reads results, checks deadlines and memory every `TICK_S` seconds, and starts and ends workers.
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
START_S = 120.0  # time limit for a worker to load the functions, in seconds
LAG_S = 2.0  # seconds after its time limit in which the worker's event loop must have ended an `async def` function
GRACE_S = 1.0  # seconds without a free worker after which more are started; less if the limit of a call is short
AHEAD_S = 0.02  # a worker gets rows of cheap rules for this many seconds at once, estimated from earlier rows
MAX_AHEAD = 64  # maximum number of rows of cheap rules that a worker gets at once
IDLE_S = 60.0
"""Seconds after which idle workers for plain functions are closed, if not all workers were needed; one is kept."""

CLOSED = "reward: the pool of reward workers was closed"


class Pool:
    """The reward workers of this process for one section `reward`. `run` may be called from several threads."""

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
        self._ahead = 1  # number of rows of cheap rules that a worker gets at once
        self._free_at = 0.0  # time at which a worker was last free, or no call waited
        self._needed_at = 0.0  # time at which all workers for plain functions were last busy
        self._lock = threading.Lock()  # guards `_new` and `_closed`; only the thread uses the attributes above
        self._new: list[RewardCall] = []
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="reward-pool", daemon=True)
        self._thread.start()

    def run(self, calls: Sequence[RewardCall]) -> list[list[Answer]]:
        """Make the calls and wait for them. Returns, for each call, one result per row.

        Raises:
            ValueError: the functions cannot be loaded; the text names the setting and the reason.
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
        """End all workers, and let every waiting or running call raise `error`."""
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
        """Queue new calls, serve every worker once, and wait until a result, a new call or the next check is due."""
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
        """Read a worker's results, check its memory and deadlines, and give it waiting calls.

        Raises:
            WorkerLost: the worker ended, or must be ended.
            ValueError: the worker cannot load the functions.
        """
        loading = worker.loading
        for call, answers in worker.receive():
            self._finish(worker, call, answers, time.monotonic())
        now = time.monotonic()
        # Results are read first, so only the row in progress can be the one that fills the memory or exceeds its time.
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
        """Remove from the queues the calls that a worker can begin: one call, or several calls of cheap rules, or all
        calls of `async def` functions if it is the shared worker."""
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
                    # The other calls get their deadlines when the rows before them are done.
                    call.deadline = now + call.limit_s + (LAG_S if shared else 0.0)
                if not call.by_rule:
                    self._limit.begin(now)
        return calls

    def _may_begin(self, call: RewardCall, now: float) -> bool:
        return call.by_rule or self._limit.may_begin(now)

    def _finish(self, worker: RewardWorker, call: RewardCall, answers: list[Answer], now: float) -> None:
        """Set the results of a call, and the deadline of the worker's next call."""
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
        """Start workers if calls wait and no worker has become free for a while; close workers that are not needed."""
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
        """Kill and remove a worker. Calls that it had begun get an error; its other calls are queued again.

        If the rule has exceeded its CPU budget or the memory limit, the call gets the rule's wrong result instead.

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
                # Several of these calls may hang, so each gets a worker of its own.
                call.alone = True
                self._waiting[call.function.name].appendleft(call)
                continue
            budget = budget_for(call.function, str(call.rows[0][0]))
            answer = answer_from(budget.wrong) if budget is not None and lost.exhausted else failed(str(lost))
            self._set(call, [answer] * len(call.rows))


_POOLS: dict[str, Pool] = {}  # holds at most one pool; the key is the JSON of its settings
_LOCK = threading.RLock()


def pool_for(config: RewardConfig) -> Pool:
    """Return the pool of this process for the settings `config`. A pool with other settings is closed."""
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
