"""The code that environment processes run: one process for each episode, forked from one that has the user's files.

    run ─► keeper ─► zygote (imports the user's files once) ─► episode
                                                          └──► episode

Needs Python 3.9 on Linux and nothing but the standard library.

1. The keeper runs no foreign code. It waits for the end of the run, of its connection or of the zygote, and then kills
   all processes below it, daemons included: orphans come to it, because it is a child subreaper.
2. The zygote forks a process for each episode when the run sends it that episode's connection. It reaps the processes
   of ended episodes, and kills the processes that they left. If the imports of the user's files left threads, which a
   fork would not have, it starts a fresh process instead, which imports the files again.
3. An episode answers the run's requests on its connection (`replies.py`).
"""

from __future__ import annotations

import array
import ctypes
import gc
import importlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

from pipeline.agent.inside import frames, load, own_process
from pipeline.agent.inside.replies import LATE, THREAD_S, Replies, children

MEMORY = 4 << 30
"""Memory limit of an episode process, in bytes, in addition to the memory used after the imports."""
LOOK_S = 1.0  # seconds between two checks of the keeper that the run lives
END_S = 10.0  # seconds that killed processes have to end
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)

START = """
import sys
if sys.version_info < (3, 9):
    sys.exit("it is Python %d.%d, but environments need Python 3.9 or later" % sys.version_info[:2])
import importlib.util, json, os, types
descriptor = int(sys.argv[2])
settings = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode())
if settings["path"]:
    sys.path[:] = settings["path"]
else:
    sys.modules["pipeline"] = package = types.ModuleType("pipeline")
    package.__path__ = []
    for name in ("pipeline.imports", "pipeline.agent", "pipeline.reward.sandbox.inside"):
        folder = settings["package"] + name[len("pipeline"):].replace(".", "/")
        spec = importlib.util.spec_from_file_location(
            name, folder + "/__init__.py", submodule_search_locations=[folder])
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    package.agent, package.imports = sys.modules["pipeline.agent"], sys.modules["pipeline.imports"]
from pipeline.agent.inside import main
getattr(main, sys.argv[1])(settings, *map(int, sys.argv[2:]))
"""
"""Code with which every interpreter is started, also an old one: `python -c START FUNCTION SETTINGS DESCRIPTOR...`. If
`path` is not set, the interpreter is not the run's own, and can import only the parts of `pipeline` that it needs."""


def keep(settings: dict[str, Any], given: int, control: int, life: int, run: int) -> NoReturn:
    """Start the zygote and become the keeper.

    Args:
        settings: `path`; `package`, the folder of `pipeline`; `isolation` and `home`; and `code`, the arguments of
            `load.load`.
        given: descriptor of the file that holds the settings.
        control: descriptor of the zygote's connection to the run.
        life: descriptor of a connection that closes when the run ends.
        run: process id of the run.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake = _wake_on_child()
    # A crash would leave a dump in the current folder.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keeper = os.getpid()
    zygote = os.fork()
    if zygote == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (life, *wake):
            os.close(descriptor)
        _die_with(keeper)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        Zygote(settings, given, socket.socket(fileno=control)).serve()
    for descriptor in (given, control):
        os.close(descriptor)
    own_process.silence(1, 2)
    poll = select.poll()
    poll.register(life, select.POLLIN)
    poll.register(wake[0], select.POLLIN)
    ended = (0, 0)
    # A copy that the run forked may hold the connection open.
    while not ended[0] and os.getppid() == run:
        ready = [descriptor for descriptor, _ in poll.poll(LOOK_S * 1000)]
        ended = os.waitpid(zygote, os.WNOHANG)
        if life in ready:
            break
        if wake[0] in ready:
            os.read(wake[0], 4096)
    _kill_all()
    code = os.waitstatus_to_exitcode(ended[1]) if ended[0] else 0
    # The keeper ends in the same way as the zygote, for the run to read.
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def _kill_all() -> None:
    """Kill all processes below this one, also orphans that become its children when their parent ends."""
    deadline = time.monotonic() + END_S
    try:
        while time.monotonic() < deadline:
            for child in children():
                os.kill(child, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.002)
    except ChildProcessError:
        return


class Zygote:
    """The process from which the processes of episodes are forked.

    The constructor imports the user's files, and sends the run a description of them, or an error message.
    """

    def __init__(self, settings: dict[str, Any], given: int, control: socket.socket) -> None:
        self._control = control
        self._given = given
        self._episodes: dict[int, int] = {}  # process id: number of the episode
        self._numbers: dict[int, int] = {}  # number of the episode: process id
        process, refused = os.getpid(), ""
        try:
            if settings["isolation"] != "none":
                from pipeline.agent.inside import isolation

                isolation.enter(settings)
                process = os.getpid()  # it is process 1 now
            self._code = load.load(**settings["code"])
        except ValueError as error:
            refused = str(error)
        if os.getpid() != process:
            # A fork that the user's files did not end.
            os._exit(0)
        if refused:
            self._send({"refused": refused})
            os._exit(0)
        self._alone = _is_alone()
        self._own = set(children())  # processes that the imports of the user's files started
        self._limit = _memory_limit()
        self._former = signal.getsignal(signal.SIGCHLD)
        self._wake, self._woken = _wake_on_child()
        own_process.silence(1, 2)
        if "numpy" in sys.modules:
            # numpy imports it at its first use, so each episode would import it (`replies.py`).
            importlib.import_module("numpy.random")
        # Frozen objects stay in memory that all processes share.
        gc.collect()
        gc.freeze()
        tools = list(self._code.tools.values())
        self._send(
            {
                "environment": self._code.environment is not None,
                "closes": self._code.closes,
                "tools": [tool.schema for tool in tools],
                "timeouts": {tool.name: tool.timeout_s for tool in tools},
                "forks": self._alone,
                "client": self._code.client,
                "note": self._code.note,
            }
        )

    def _send(self, event: dict[str, Any]) -> None:
        self._control.sendall(frames.encode(event))

    def serve(self) -> NoReturn:
        """Start and end episodes until the run closes the connection."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while True:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if self._wake in ready:
                    os.read(self._wake, 4096)
                    self._reap()
                if self._control.fileno() in ready:
                    self._obey()
        except (EOFError, OSError):
            # The keeper kills the remaining processes.
            os._exit(0)

    def _obey(self) -> None:
        """Read and execute one command of the run.

        Raises:
            EOFError: the run closed the connection.
        """
        header, ancillary, _, _ = self._control.recvmsg(frames.HEADER.size, socket.CMSG_SPACE(4))
        command = frames.read(self._control, header)
        if command is None:
            raise EOFError
        if "open" in command:
            (connection,) = array.array("i", ancillary[0][2][:4])
            self._open(command["open"], connection)
            return
        process = self._numbers.get(command["number"])
        if process is not None:
            os.kill(process, LATE if command["signal"] == "late" else signal.SIGKILL)

    def _open(self, number: int, connection: int) -> None:
        """Start the process of the episode `number`; `connection` is the descriptor of its connection to the run."""
        try:
            process = self._fork(connection) if self._alone else self._fresh(connection)
        except OSError as error:
            self._send({"ended": number, "error": f"no process could be started ({error.strerror})"})
            return
        finally:
            os.close(connection)
        self._episodes[process] = number
        self._numbers[number] = process

    def _fork(self, connection: int) -> int:
        zygote = os.getpid()
        process = os.fork()
        if process:
            return process
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, self._former)
            for descriptor in (self._control.detach(), self._wake, self._woken, self._given):
                os.close(descriptor)
            os.setsid()
            _die_with(zygote)
            _serve(socket.socket(fileno=connection), self._code, self._limit)
        finally:
            # In any case, this process must not go on as a second zygote.
            os._exit(1)

    def _fresh(self, connection: int) -> int:
        command = [sys.executable, "-c", START, "begin", str(self._given), str(connection), str(os.getpid())]
        # `_reap` reaps it like the others, and no other code may.
        process = subprocess.Popen(command, pass_fds=[self._given, connection], start_new_session=True)
        process.returncode = 0
        return process.pid

    def _reap(self) -> None:
        """Report episode processes that ended, and kill the processes that they left."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                break
            number = self._episodes.pop(found.si_pid, None)
            if number is not None:
                # Not yet reaped, so that the number of the group is its own.
                _kill_group(found.si_pid)
                del self._numbers[number]
            code = os.waitstatus_to_exitcode(os.waitpid(found.si_pid, 0)[1])
            if number is not None:
                self._send({"ended": number, "code": code})
        # Episodes are subreapers, so orphans that come here are left over from an ended one.
        for orphan in children():
            if orphan not in self._episodes and orphan not in self._own:
                os.kill(orphan, signal.SIGKILL)


def begin(settings: dict[str, Any], given: int, connection: int, zygote: int) -> NoReturn:
    """Run the process of an episode as a fresh interpreter, if processes cannot be forked."""
    os.close(given)
    _die_with(zygote)
    ours = socket.socket(fileno=connection)
    try:
        code = load.load(**settings["code"])
    except ValueError as error:
        # The files loaded at the start of the run, so the run expects no refusal here.
        request = frames.read(ours)
        ours.sendall(frames.encode({"id": request["id"] if request else 0, "error": str(error)}))
        os._exit(0)
    _serve(ours, code, _memory_limit())


def _serve(connection: socket.socket, code: load.Code, memory: int) -> NoReturn:
    """Handle the requests of episodes on a connection until it closes; `memory` is the process's limit in bytes."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        memory = min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    own_process.first_to_go()
    Replies(connection, code).serve()
    os._exit(0)


def _is_alone() -> bool:
    """Return True if this process has only one thread, after a short wait for ending threads."""
    deadline = time.monotonic() + THREAD_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _memory_limit() -> int:
    """Return the limit of the private memory of an episode's process (RLIMIT_DATA), in bytes."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[5])
    return pages * resource.getpagesize() + MEMORY


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _wake_on_child() -> tuple[int, int]:
    """Make a pipe that becomes readable when a child of this process has ended. Returns (read end, write end)."""
    wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    return wake, woken


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _kill_group(process: int) -> None:
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        return
