"""The reward workers of this process: which worker makes which call, and what happens to calls that hang.

    reward stage ─► pool ─► worker (plain functions, one call at a time)
                       ├──► worker (another one, when the first is stuck)
                       └──► worker (`async def` functions, all calls at once)

A pool lives as long as its process (a Ray worker), so modules stay loaded and clients connected between chunks. Each
worker has a thread, which hands calls over, reads answers, and looks at deadlines and memory every `TICK_S`.
"""

import atexit
import dataclasses
import itertools
import json
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait

from pipeline.config.reward import RewardConfig
from pipeline.reward.functions import budget_for, functions
from pipeline.reward.program import NO_SCORE
from pipeline.reward.rate_limit import RateLimit
from pipeline.reward.result import Answer, answer_from, failed
from pipeline.reward.worker import Call, RewardWorker, WorkerLost

TICK_S = 0.05
START_S = 120.0
"""Seconds in which a worker must have loaded the functions."""
LAG_S = 2.0
"""Seconds after its limit in which an `async def` function must have been ended by its own event loop."""
GRACE_S = 1.0
"""Seconds without a free worker after which more are started; less where the limit of a call is short."""
AHEAD_S = 0.02
"""Seconds of work with cheap rules that a worker is given at once, judged by the rows before."""
MAX_AHEAD = 64
"""Rows of cheap rules that a worker is given at once."""
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
        self._functions = functions(config)
        self._limit = RateLimit(config.rate_limit.max_concurrent, config.rate_limit.max_per_minute)
        self._grace = min([GRACE_S, *(function.timeout_s / 10 for function in self._functions)])
        self._ids = itertools.count()
        self._changed = threading.Condition()
        """Guards everything below."""
        self._waiting: dict[str, deque[Call]] = {function.name: deque() for function in self._functions}
        self._workers: dict[RewardWorker, threading.Thread] = {}
        self._asynchronous: frozenset[str] = frozenset()
        """Names of the `async def` functions; known once a worker has loaded them."""
        self._shared: RewardWorker | None = None
        """The worker that calls them."""
        self._ahead = 1
        """Rows of cheap rules that a worker is given at once."""
        self._free_at = 0.0
        """When a worker was last free, or nothing waited."""
        self._needed_at = 0.0
        """When all workers for plain functions last had something to do."""
        self._closed = False

    def run(self, calls: Sequence[Call]) -> list[list[Answer]]:
        """The answers for the rows of each call.

        Raises:
            ValueError: the functions cannot be loaded; the sentence names the setting and the reason.
            RuntimeError: the pool was closed.
        """
        with self._changed:
            if not any(self._waiting.values()):
                self._free_at = time.monotonic()
            for call in calls:
                self._waiting[call.function.name].append(call)
            self._open_first()
            self._changed.notify_all()
        # The workers' threads hold the deadlines; callers start further workers.
        answers = [call.answers for call in calls]
        while wait(answers, timeout=self._grace).not_done:
            self._open_more()
        return [future.result() for future in answers]

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self._closed = True
            threads = list(self._workers.values())
            self._changed.notify_all()
        for thread in threads:
            thread.join(timeout=10)

    # Everything below is called with `_changed` held, except `_open_more`, `_serve`, `_use` and `_hand_over`.

    def _plain(self) -> list[RewardWorker]:
        """The workers for plain functions, those included that still load."""
        return [worker for worker in self._workers if worker is not self._shared]

    def _open(self) -> None:
        worker = RewardWorker()
        thread = threading.Thread(target=self._serve, args=(worker,), name="reward-worker", daemon=True)
        self._workers[worker] = thread
        thread.start()

    def _open_first(self) -> None:
        """Start a worker if calls wait that no worker will take."""
        if self._closed:
            return self._fail_all(RuntimeError(CLOSED))
        plain = self._plain()
        plain_waits = any(queue for name, queue in self._waiting.items() if name not in self._asynchronous)
        async_waits = self._shared is None and any(self._waiting[name] for name in self._asynchronous)
        if (plain_waits and not plain) or (async_waits and all(worker.calls for worker in plain)):
            self._open()

    def _open_more(self) -> None:
        """Start more workers if calls wait and none has become free for a while."""
        now = time.monotonic()
        with self._changed:
            plain = self._plain()
            queues = [queue for name, queue in self._waiting.items() if name not in self._asynchronous]
            waits = any(queue and self._may_begin(queue[0], now) for queue in queues)
            if not waits or now - self._free_at < self._grace or not all(worker.calls for worker in plain):
                return
            # Twice as many: among rows that hang, each new worker soon meets another one.
            for _ in range(min(len(plain), self._config.max_processes - len(plain))):
                self._open()

    def _serve(self, worker: RewardWorker) -> None:
        """The thread of a worker."""
        end: Exception | None = None
        try:
            self._use(worker)
        except Exception as error:  # noqa: BLE001 (callers wait, and would wait for ever)
            end = error
        worker.kill()
        with self._changed:
            self._workers.pop(worker, None)
            if self._shared is worker:
                self._shared = None
            if isinstance(end, WorkerLost):
                self._replace(worker, end)
            else:
                for call in worker.calls.values():
                    call.answers.set_exception(end or RuntimeError(CLOSED))
                if end is not None:
                    self._fail_all(end)
            self._open_first()
            self._changed.notify_all()

    def _use(self, worker: RewardWorker) -> None:
        """Hand calls to a worker and read its answers, until the pool is closed or the worker is not needed.

        Raises:
            WorkerLost: the worker ended, or has to be ended.
            ValueError: it cannot load the functions.
        """
        worker.start(self._config)
        begun = time.monotonic()
        while worker.asynchronous is None:
            if self._closed:
                return
            if time.monotonic() > begun + START_S:
                raise ValueError(f"importing the reward functions took longer than {START_S:g} s")
            worker.receive(TICK_S)
            worker.check_memory(time.monotonic())
        with self._changed:
            self._asynchronous = frozenset(worker.asynchronous)
            self._free_at = self._needed_at = time.monotonic()
        while self._hand_over(worker):
            answered = worker.receive(TICK_S)
            now = time.monotonic()
            with self._changed:
                for number, answers in answered:
                    self._finish(worker, number, answers, now)
            # Answers are read first, so the row under way is the one that fills the memory or is late.
            worker.check_memory(now)
            late = next((call for call in worker.calls.values() if call.deadline < now), None)
            if late is not None:
                blocked = "; an async function blocked the event loop, which all rows share"
                suffix = blocked if worker is self._shared else ""
                raise WorkerLost(f"TimeoutError: {NO_SCORE.format(late.limit_s)}{suffix}")

    def _hand_over(self, worker: RewardWorker) -> bool:
        """Give a worker what it can begin, and wait for that if it has nothing to do; False if it is to end."""
        with self._changed:
            while True:
                if self._closed:
                    return False
                if worker.dead and not worker.calls:
                    raise worker.lost()
                now = time.monotonic()
                calls = self._take(worker, now)
                others = [other for other in self._plain() if other is not worker]
                if calls:
                    worker.began_at, worker.given = now, len(calls)
                    if all(other.calls for other in others):
                        self._needed_at = now
                if calls or worker.calls:
                    break
                loaded = any(other.asynchronous is not None for other in others)
                if loaded and worker is not self._shared and now > self._needed_at + IDLE_S:
                    del self._workers[worker]
                    return False
                # Calls that a rate limit holds back are tried again.
                self._changed.wait(TICK_S if any(self._waiting.values()) else IDLE_S)
        if calls:
            worker.begin({next(self._ids): call for call in calls})
        return True

    def _take(self, worker: RewardWorker, now: float) -> list[Call]:
        """The waiting calls that a worker can begin: one, or several of cheap rules, or all for the shared worker."""
        if worker.calls and worker is not self._shared:
            return []
        if self._shared is None and any(self._waiting[name] for name in self._asynchronous):
            self._shared = worker
            self._open_first()
        shared = worker is self._shared
        calls: list[Call] = []
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
                    # The others get theirs when the rows before them are answered.
                    call.deadline = now + call.limit_s + (LAG_S if shared else 0.0)
                if not call.by_rule:
                    self._limit.begin(now)
        return calls

    def _may_begin(self, call: Call, now: float) -> bool:
        return call.by_rule or self._limit.may_begin(now)

    def _finish(self, worker: RewardWorker, number: int, answers: list[Answer], now: float) -> None:
        """A worker has answered a call."""
        call = worker.calls.pop(number)
        self._set(call, answers)
        following = next(iter(worker.calls.values()), None)
        if following is None or worker is self._shared:
            self._free_at = now
            if call.cheap:
                took = max(now - worker.began_at, 1e-4)
                self._ahead = max(1, min(MAX_AHEAD, int(worker.given * AHEAD_S / took)))
        else:
            following.deadline = now + following.limit_s

    def _set(self, call: Call, answers: list[Answer]) -> None:
        if not call.by_rule:
            self._limit.end()
        call.answers.set_result(answers)

    def _replace(self, worker: RewardWorker, lost: WorkerLost) -> None:
        """Answer the calls that a lost worker had begun, and put those behind them back.

        The answer is an error, or a wrong answer where the rule has spent its budget.
        """
        if worker.asynchronous is None:
            return self._fail_all(ValueError(f"the reward functions were not loaded: {lost}{worker.last_line()}"))
        for call in reversed(worker.calls.values()):
            if call.deadline == math.inf:
                # More of these may hang, and would do so one after the other in one worker.
                call.alone = True
                self._waiting[call.function.name].appendleft(call)
                continue
            budget = budget_for(call.function, str(call.rows[0][0]))
            answer = answer_from(budget.wrong) if budget is not None and lost.exhausted else failed(str(lost))
            self._set(call, [answer] * len(call.rows))

    def _fail_all(self, error: Exception) -> None:
        """Let every waiting call fail."""
        for queue in self._waiting.values():
            while queue:
                queue.popleft().answers.set_exception(error)


_POOLS: dict[str, Pool] = {}
"""The one pool of this process, by its settings."""
_LOCK = threading.RLock()


def pool_for(config: RewardConfig) -> Pool:
    """This process's pool for these settings; a pool for other settings is closed.

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
