"""A Python command (`agent.command`) as a fork of a process that has imported its modules (`agent.preload`).

Needs Python 3.9 and nothing but the standard library. The script finds what a fresh interpreter gives it: arguments,
environment variables, standard streams, `sys.path`, its module as `__main__`; threads that it waits for, functions of
`atexit` and the exit code at its end. It does not find modules of this package, nor descriptors of the episode.

The process ends without the end of the interpreter, which touches all memory that it shares with the others: 30 ms of
CPU with the package `openai`. So objects that only imported modules hold are not deleted at the end.
"""

from __future__ import annotations

import _io
import atexit
import builtins
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, NoReturn

THREAD_S = 0.2  # seconds in which a thread that has ended is gone
_held: list[Any] = []  # files that imported modules hold, which the collector does not show in a fork (`gc.freeze`)


def prepare(script: str, path: Sequence[str]) -> None:
    """Have this process import modules as the script would.

    Args:
        script: file of the command.
        path: `sys.path` of an interpreter that has no script.
    """
    sys.path[:] = [os.path.dirname(os.path.realpath(script)), *path]
    # The user's code may have a package of the same name.
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]:
        del sys.modules[name]


def write_out() -> None:
    """Write files that imported modules hold to their end, which every fork would do again."""
    _held[:] = [*_files(), sys.stdout, sys.stderr]
    _flush(_held)


def is_alone() -> bool:
    """Whether this process has one thread."""
    deadline = time.monotonic() + THREAD_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def fork(
    leave: Callable[[], None],
    command: list[str],
    variables: dict[str, str],
    outputs: tuple[int, int],
    others: tuple[int, ...],
) -> int:
    """Start interpreter, script and arguments in a fork of this process (`command.Start`).

    Args:
        leave: frees in the fork what belongs to the episode.
    """
    process = os.fork()
    if process:
        return process
    try:
        leave()
        streams = (os.open(os.devnull, os.O_RDWR), *outputs)
        for standard, descriptor in enumerate(streams):
            os.dup2(descriptor, standard)
        for descriptor in (*streams, *others):
            os.close(descriptor)
        os.environ.update(variables)
        # They have the episode's seed, which all episodes of a group may have; a fork seeds `random` again.
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        if "torch" in sys.modules:
            sys.modules["torch"].seed()
        _run(command)
    finally:
        # Whatever happens, this process must not go on as a second episode.
        os._exit(1)


def _run(command: list[str]) -> NoReturn:
    script = command[1]
    sys.argv = command[1:]
    if hasattr(sys, "orig_argv"):  # from Python 3.10 on
        sys.orig_argv = [*command]
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", script)
    vars(main).update(__file__=os.path.abspath(script), __builtins__=builtins, __loader__=loader)
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        # multiprocessing made it of what was `__main__` when it was imported.
        sys.modules["__mp_main__"] = main
    code: Any = None
    interrupted = False
    try:
        exec(loader.source_to_code(loader.get_data(script), script), vars(main))
    except SystemExit as left:
        code = left.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:  # noqa: BLE001
        trace = _of_script(error.__traceback__, script)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    # As multiprocessing ends its forks.
    threading._shutdown()  # type: ignore[attr-defined]
    with suppress(BaseException):
        atexit._run_exitfuncs()
    # The collector may close what a file writes to before the file is written to its end.
    _flush([*_held, *_files(), sys.stdout, sys.stderr])
    for name in [name for name, module in sys.modules.items() if module is main]:
        del sys.modules[name]
    del main
    gc.collect()
    with suppress(Exception):
        sys.stdout.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 255)


def _files() -> list[Any]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), _io._IOBase)]


def _flush(files: Sequence[Any]) -> None:
    for file in files:
        # It may be closed.
        with suppress(Exception):
            file.flush()


def _of_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """The part of a traceback that a fresh interpreter would show."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace
