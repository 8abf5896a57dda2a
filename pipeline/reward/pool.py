"""The reward workers of this process: which worker makes which call, and what happens to calls that hang.

    reward stage ─► pool ─► worker (plain functions, one call at a time)
                       ├──► worker (another one, when the first is stuck)
                       └──► worker (`async def` functions, all calls at once)

1. A pool lives as long as its process (a Ray worker), so modules stay loaded and clients connected between chunks.
2. A worker is given one row at a time, of cheap rules as many as take it `AHEAD_S`. It answers each row before it
   begins the next one, so the pool knows which row is under way.
3. A worker is killed with all that it started when a call passes its deadline or the worker holds too much memory. The
   row under way becomes an error, or a wrong answer where its rule has a budget (`rules/budget.py`). The rows behind it
   have not begun, and go to other workers.
4. When no worker has become free for a while, more are started, up to `reward.max_processes`, so that rows that hang
   cost a chunk one limit together and not one each.

Each worker has a thread, which hands calls over, reads answers, and looks at deadlines and memory every `TICK_S`.
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
from pipeline.reward.sandbox.rule import DATA_SOURCES
from pipeline.reward.worker import Call, RewardWorker, WorkerLost

TICK_S = 0.05
START_S = 120.0
"""Seconds in which a worker must have loaded the functions."""
LAG_S = 2.0
"""Seconds after its limit in which an `async def` function must have been ended by its own event loop."""
GRACE_S = 1.0
"""Seconds without a free worker after which more are started; less where the limit of a call is short."""
AHEAD_S = 0.02
"""Seconds of work with cheap rules that a worker is given at once, going by the rows before."""
MAX_AHEAD = 64
"""Rows of cheap rules that a worker is given at once."""
IDLE_S = 60.0
"""Seconds without need of all workers after which those that are free are closed; one always stays."""

CLOSED = "reward: the pool of reward workers was closed"


class Pool:
    """The workers of this process for one `reward` section; `run` may be called from several threads.

    Raises:
        ValueError: as `functions`.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._functions = {function.name: function for function in functions(config)}
        self._limit = RateLimit(config.rate_limit.max_concurrent, config.rate_limit.max_per_minute)
        self._grace = min([GRACE_S, *(function.timeout_s / 10 for function in self._functions.values())])
        self._ids = itertools.count()
        self._changed = threading.Condition()
        """Guards everything below."""
        self._waiting: dict[str, deque[Call]] = {name: deque() for name in self._functions}
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
        """When all workers last had something to do."""
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
                self._waiting[call.function].append(call)
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

    # Everything below is called with `_changed` held, except `_serve` and `_use`.

    def _open(self) -> None:
        worker = RewardWorker()
        thread = threading.Thread(target=self._serve, args=(worker,), name="reward-worker", daemon=True)
        self._workers[worker] = thread
        thread.start()

    def _open_first(self) -> None:
        """Start a worker for plain functions if something waits and there is none."""
        if self._closed:
            self._fail_all(RuntimeError(CLOSED))
        elif any(self._waiting.values()) and self._workers.keys() <= {self._shared}:
            self._open()

    def _open_more(self) -> None:
        """Start more workers if calls wait and none has become free for a while."""
        now = time.monotonic()
        with self._changed:
            plain = [worker for worker in self._workers if worker is not self._shared]
            names = self._waiting.keys() - self._asynchronous
            waits = any(self._waiting[name] and self._may_begin(name, now) for name in names)
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
                self._settle(worker, end)
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
        worker.start(self._functions.values(), self._config)
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
            while not self._closed:
                if worker.dead and not worker.calls:
                    raise worker.lost()
                now = time.monotonic()
                calls = self._take(worker, now)
                if calls:
                    worker.began_at, worker.given = now, len(calls)
                    if all(other.calls for other in self._workers if other not in (worker, self._shared)):
                        self._needed_at = now
                if calls or worker.calls:
                    break
                if now > self._needed_at + IDLE_S and len(self._workers) > 1:
                    del self._workers[worker]
                    return False
                # Calls that a rate limit holds back are tried again.
                self._changed.wait(TICK_S if any(self._waiting.values()) else IDLE_S)
            else:
                return False
        if calls:
            worker.begin({next(self._ids): call for call in calls})
        return True

    def _take(self, worker: RewardWorker, now: float) -> list[Call]:
        """The waiting calls that a worker can begin."""
        calls: list[Call] = []
        for name, queue in self._waiting.items():
            if name in self._asynchronous:
                if self._shared is None and not worker.calls and queue:
                    self._shared = worker
                    self._open_first()
                while worker is self._shared and queue and self._may_begin(name, now):
                    calls.append(self._next(queue, now))
            elif worker is not self._shared and not worker.calls and queue and self._may_begin(name, now):
                calls.append(self._next(queue, now))
                while self._is_cheap(calls[-1]) and queue and self._is_cheap(queue[0]) and len(calls) < self._ahead:
                    calls.append(queue.popleft())
                break
        return calls

    def _next(self, queue: deque[Call], now: float) -> Call:
        call = queue.popleft()
        call.deadline = now + call.limit_s
        if call.function in self._asynchronous:
            call.deadline += LAG_S
        if not self._is_rule(call.function):
            self._limit.begin(now)
        return call

    def _is_rule(self, name: str) -> bool:
        return self._functions[name].path is None

    def _may_begin(self, name: str, now: float) -> bool:
        return self._is_rule(name) or self._limit.may_begin(now)

    def _is_cheap(self, call: Call) -> bool:
        return self._is_rule(call.function) and not call.alone and call.rows[0][0] not in DATA_SOURCES

    def _finish(self, worker: RewardWorker, number: int, answers: list[Answer], now: float) -> None:
        """A worker has answered a call."""
        call = worker.calls.pop(number)
        self._set(call, answers)
        following = next(iter(worker.calls.values()), None)
        if following is None or worker is self._shared:
            self._free_at = now
            if self._is_cheap(call):
                took = max(now - worker.began_at, 1e-4)
                self._ahead = max(1, min(MAX_AHEAD, int(worker.given * AHEAD_S / took)))
        else:
            following.deadline = now + following.limit_s

    def _set(self, call: Call, answers: list[Answer]) -> None:
        if not self._is_rule(call.function):
            self._limit.end()
        call.answers.set_result(answers)

    def _settle(self, worker: RewardWorker, lost: WorkerLost) -> None:
        """Answer the rows that were under way in a lost worker, and put the rows behind them back."""
        if worker.asynchronous is None:
            return self._fail_all(ValueError(f"the reward functions were not loaded: {lost}{worker.last_line()}"))
        for call in reversed(worker.calls.values()):
            if call.deadline == math.inf:
                # More of these may hang, and would do so one after the other in one worker.
                call.alone = True
                self._waiting[call.function].appendleft(call)
                continue
            budget = budget_for(self._functions[call.function], str(call.rows[0][0]))
            answer = answer_from(budget.wrong) if budget is not None and lost.exhausted else failed(str(lost))
            self._set(call, [answer] * len(call.rows))

    def _fail_all(self, error: Exception) -> None:
        """Let every waiting call fail."""
        for queue in self._waiting.values():
            while queue:
                queue.popleft().answers.set_exception(error)


_POOLS: dict[str, Pool] = {}
_LOCK = threading.Lock()


def pool_for(config: RewardConfig) -> Pool:
    """This process's pool for these settings; a pool for other settings is closed.

    Raises:
        ValueError: as `functions`.
    """
    key = json.dumps(dataclasses.asdict(config))
    with _LOCK:
        if key not in _POOLS:
            made = Pool(config)
            _close_all()
            _POOLS[key] = made
        return _POOLS[key]


def close() -> None:
    """End all reward workers of this process."""
    with _LOCK:
        _close_all()


def _close_all() -> None:
    while _POOLS:
        _POOLS.popitem()[1].close()


atexit.register(close)
