"""SGLang's server as a child of the engine's process, in an environment of its own.

The server listens on 127.0.0.1, with a key that is made at random. The kernel kills it when the thread that started it
ends or is killed, and SGLang's other processes die with the server.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

LAUNCH = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started the server has ended")
sys.argv[:2] = ["sglang.launch_server"]
sys.argv += ["--api-key", os.environ.pop("SLIPSTREAM_SGLANG_KEY")]
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""
"""Code of the child, which sets its death with its parent (PR_SET_PDEATHSIG) before it becomes the server. The key
comes by the environment, since every user of the machine can read command lines."""
INSIDE = Path(__file__).parent / "inside"
TAKEN = "address already in use"
TRIES = 3
POLL_S = 0.5
SHOWN = 600
"""Last characters of the log in an error."""


class ServerProcess:
    """A running server.

    Args:
        python: interpreter of SGLang's environment.
        arguments: arguments of the server, without address, port and key.
        environment: further environment variables.
        log: file for the output of the server.
        timeout: seconds in which it must answer.

    Raises:
        TimeoutError: it did not answer in time.
        RuntimeError: it ended; the text has the end of its log.
    """

    def __init__(
        self, python: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, timeout: float
    ) -> None:
        self._log, self.key = log, secrets.token_hex(16)
        self._scratch = tempfile.mkdtemp(prefix="slipstream-sglang-")
        own = {"PYTHONPATH": str(INSIDE), "TMPDIR": self._scratch, "SLIPSTREAM_SGLANG_KEY": self.key}
        environment = {**os.environ, **environment, **own}
        end = time.monotonic() + timeout
        for attempt in range(TRIES):
            self.port = free_port()
            where = ["--host", "127.0.0.1", "--port", str(self.port)]
            command = [python, "-P", "-c", LAUNCH, str(os.getpid()), *where, *arguments]
            with log.open("ab") as output:
                self._begin = output.tell()
                self._child = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
                )
            try:
                self._wait(end, timeout)
                return
            except BaseException:
                taken = TAKEN in self._tail(10_000) and attempt + 1 < TRIES
                self._kill()
                if not taken:
                    shutil.rmtree(self._scratch, ignore_errors=True)
                    raise

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._child.pid

    def death(self) -> str:
        """Return a sentence on the end of the server; "" while it runs."""
        code = self._child.poll()
        if code is None:
            return ""
        return (
            f"the SGLang server (process {self.pid}) ended with code {code}; its log {self._log} ends: {self._tail()}"
        )

    def close(self) -> None:
        """End the server and all of its processes."""
        self._kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill(self) -> None:
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _wait(self, end: float, timeout: float) -> None:
        while not self._answers():
            if death := self.death():
                raise RuntimeError(death)
            if time.monotonic() > end:
                raise TimeoutError(
                    f"the SGLang server (process {self.pid}) did not answer within {timeout:.0f} s "
                    f"(trainer.deadlines.engine_start); its log {self._log} ends: {self._tail()}"
                )
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _tail(self, characters: int = SHOWN) -> str:
        with self._log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")[-characters:].strip() or "(empty)"


def free_port() -> int:
    """Return the number of a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
