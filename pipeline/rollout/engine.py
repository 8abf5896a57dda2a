"""The engine loop: one thread steps one engine; other threads submit chunks of requests.

Only the loop's thread touches the engine. Callers give it commands, which run between two steps in the order in which
they came. A command with `when_idle` waits until no request is running, and later commands wait for that command: this
is how weights change between chunks. An `update` changes weights while chunks run; it waits only for chunks that were
submitted with `one_version`. Finished requests are collected by chunk, so chunks overlap freely and the engine's batch
stays full.

A chunk of episodes holds a lease from its first turn to its last. Between two turns, while all episodes wait for their
environments, no request runs, but the lease keeps a command with `when_idle` waiting. Requests of a granted lease run
ahead of waiting commands: the commands wait for the episodes, and never the episodes for the commands.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pipeline.generation import EngineOutput, EngineRequest, Generation
from pipeline.rollout.engines import Engine


class EngineDead(RuntimeError):
    """The engine's thread has failed, so the engine cannot generate any more."""


@dataclass(eq=False)
class Lease:
    """The right to generate whole episodes with one policy version.

    Only the loop's thread sets `granted`.
    """

    one_version: bool
    """True if no `update` may run while the lease is held."""
    granted: bool = False


@dataclass
class _Command:
    run: Callable[[Engine], Any] | None
    """Function that gets the engine; None ends the loop."""
    when_idle: bool = False
    updates: bool = False
    lease: Lease | None = None
    """The lease under which the command runs. Once the lease is granted, the command runs before waiting ones."""
    future: Future = field(default_factory=Future)


@dataclass
class _Chunk:
    one_version: bool
    future: Future = field(default_factory=Future)
    order: list[str] = field(default_factory=list)
    done: dict[str, Generation] = field(default_factory=dict)


class EngineLoop:
    """A thread that drives an engine.

    Args:
        build: makes the engine; called in the loop's own thread.
        start_timeout: maximum seconds for the engine to start.

    Raises:
        TimeoutError: the engine did not start in time.
        Exception: the error that `build` raised.
    """

    def __init__(self, build: Callable[[], Engine], start_timeout: float):
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._waiting: deque[_Command] = deque()
        self._chunk_of: dict[str, _Chunk] = {}
        self._one_version = 0
        """Number of running requests during which no `update` may run."""
        self._leases: set[Lease] = set()
        """The granted leases."""
        self._next_id = 0
        self._error: BaseException | None = None
        self.steps = 0
        self.busy_s = 0.0
        started: Future = Future()
        self._thread = threading.Thread(target=self._main, args=(build, started), name="engine", daemon=True)
        self._thread.start()
        try:
            started.result(timeout=start_timeout)
        except TimeoutError:
            raise TimeoutError(
                f"the rollout engine did not start within {start_timeout:.0f} s (trainer.deadlines.engine_start)"
            ) from None

    def call(self, run: Callable[[Engine], Any], when_idle: bool = False) -> Future:
        """Run `run(engine)` between two steps, and return a future of the result.

        Args:
            run: function that gets the engine.
            when_idle: true to wait until no request is running and no lease is held.
        """
        return self._put(_Command(run, when_idle))

    def update(self, run: Callable[[Engine], Any]) -> Future:
        """Run `run(engine)`, which changes the weights, between two steps, after the steps that the engine has begun
        ahead.

        If it fails, the running chunks fail too, because it is not known which weights the engine then has. Returns a
        future of the result.
        """
        return self._put(_Command(run, updates=True))

    def lease(self, one_version: bool = False) -> Lease:
        """Take a lease: until it is given back, calls with `when_idle=True` wait, and with `one_version` weight updates
        too.

        Commands that were given before the lease run before it.
        """
        lease = Lease(one_version)

        def grant(engine: Engine) -> None:
            lease.granted = True
            self._leases.add(lease)
            # Its first commands may have come after another command `when_idle`, which waits for them from now on.
            ahead = [command for command in self._waiting if command.lease is lease]
            others = [command for command in self._waiting if command.lease is not lease]
            self._waiting.clear()
            self._waiting.extend([*ahead, *others])

        self.call(grant)
        return lease

    def give_back(self, lease: Lease) -> None:
        """End a lease. None of the lease's requests may be running."""
        self._put(_Command(lambda engine: self._leases.discard(lease), lease=lease))

    def submit(
        self, requests: Sequence[EngineRequest], one_version: bool = False, lease: Lease | None = None
    ) -> Future:
        """Add one chunk of requests, and return a future of their generations in the same order.

        Args:
            requests: the requests.
            one_version: true to let no `update` run before the chunk is done.
            lease: lease of the requests; they run ahead of commands that wait for the lease.
        """
        chunk = _Chunk(one_version)
        # A running future cannot be cancelled, so no caller sets its result while the loop is about to.
        chunk.future.set_running_or_notify_cancel()
        if not requests:
            chunk.future.set_result([])
            return chunk.future

        def add(engine: Engine) -> None:
            for request in requests:
                request_id = str(self._next_id)
                self._next_id += 1
                engine.add(request_id, request)
                chunk.order.append(request_id)
                self._chunk_of[request_id] = chunk
                self._one_version += one_version

        def failed(future: Future) -> None:
            error = future.exception()
            if error is not None and not chunk.future.done():
                chunk.future.set_exception(error)

        self._put(_Command(add, lease=lease)).add_done_callback(failed)
        return chunk.future

    def abort(self, future: Future, lease: Lease | None = None) -> None:
        """Abort the requests of the chunk that has this `future`; the future then never gets a result."""

        def drop(engine: Engine) -> None:
            ids = [request_id for request_id, chunk in self._chunk_of.items() if chunk.future is future]
            for request_id in ids:
                self._one_version -= self._chunk_of.pop(request_id).one_version
            if ids:
                engine.abort(ids)

        self._put(_Command(drop, lease=lease))

    def close(self, timeout: float = 30.0) -> None:
        """Stop the thread. Running requests are dropped, and their futures raise `EngineDead`."""
        self._commands.put(_Command(None))
        self._thread.join(timeout)

    def _put(self, command: _Command) -> Future:
        self._commands.put(command)
        if self._error is not None:
            self._fail_everything()
        return command.future

    def _main(self, build: Callable[[], Engine], started: Future) -> None:
        try:
            engine = build()
        except BaseException as error:  # noqa: BLE001 (raised in the caller)
            self._error = error
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._loop(engine)
        except BaseException as error:  # noqa: BLE001 (raised in every caller)
            self._error = error
            for command in self._waiting:
                self._commands.put(command)
            self._fail_everything()
        finally:
            engine.close()

    def _loop(self, engine: Engine) -> None:
        waiting = self._waiting
        while True:
            while not self._commands.empty() or self._nothing_to_do():
                command = self._commands.get()
                if command.run is None or (command.lease is not None and command.lease.granted):
                    self._run(engine, command)
                else:
                    waiting.append(command)
            while waiting and not self._must_wait(waiting[0]):
                self._run(engine, waiting.popleft())
            if self._chunk_of:
                begun = time.perf_counter()
                outputs = engine.step()
                self.busy_s += time.perf_counter() - begun
                self.steps += 1
                self._collect(outputs)

    def _nothing_to_do(self) -> bool:
        return not self._chunk_of and not (self._waiting and not self._must_wait(self._waiting[0]))

    def _must_wait(self, command: _Command) -> bool:
        if command.when_idle:
            return bool(self._chunk_of or self._leases)
        return command.updates and (self._one_version > 0 or any(lease.one_version for lease in self._leases))

    def _run(self, engine: Engine, command: _Command) -> None:
        if command.run is None:
            raise RuntimeError("it was closed")
        if not command.future.set_running_or_notify_cancel():
            return
        try:
            if command.updates:
                self._collect(engine.drain())
            command.future.set_result(command.run(engine))
        except BaseException as error:  # noqa: BLE001 (raised in the caller)
            if command.updates and self._chunk_of:
                engine.abort(self._fail_running(error))
            command.future.set_exception(error)

    def _collect(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            chunk = self._chunk_of.pop(output.request_id, None)
            if chunk is None:
                continue
            self._one_version -= chunk.one_version
            chunk.done[output.request_id] = output.generation
            if len(chunk.done) == len(chunk.order) and not chunk.future.done():
                chunk.future.set_result([chunk.done[request_id] for request_id in chunk.order])

    def _fail_running(self, error: BaseException) -> list[str]:
        """Set `error` on the futures of all running chunks; returns the ids of their requests."""
        running, self._chunk_of, self._one_version = self._chunk_of, {}, 0
        for chunk in running.values():
            if not chunk.future.done():
                chunk.future.set_exception(error)
        return list(running)

    def _fail_everything(self) -> None:
        error = EngineDead(f"the rollout engine died: {type(self._error).__name__}: {self._error}")
        error.__cause__ = self._error
        self._fail_running(error)
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if not command.future.done():
                command.future.set_exception(error)
