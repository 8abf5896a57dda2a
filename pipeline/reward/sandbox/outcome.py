"""Result of one run of a program in a sandbox."""

import signal
from dataclasses import dataclass

MAX_REASON = 200  # characters
LIMITS = {
    "time": "time limit exceeded",
    "output": "output limit exceeded",
    "memory": "memory limit exceeded",
    "processes": "process limit exceeded",
}


@dataclass(frozen=True)
class ProgramRun:
    """Result of one run of a program."""

    ended: str
    """`exit`, or the limit that ended the program: `time`, `output`, `memory`, `processes`."""
    returncode: int | None = None
    """Exit code, or the negative number of the signal that ended the program; None if the sandbox killed it."""
    stdout: str = ""
    stderr: str = ""
    """Text that the program wrote to stdout and to stderr, each cut to `output_kb` KiB. Bytes that are not UTF-8 are
    replaced."""
    seconds: float = 0.0
    """Wall-clock time in seconds."""
    result: bytes = b""
    """Results of calls, one line of JSON per call (`inside/driver.py`). The program's process writes them, so they may
    be any bytes."""

    @property
    def failure(self) -> str:
        """Reason why the program failed (a limit, a signal or an exit code), in a few words; "" if it did not fail."""
        if self.ended in LIMITS:
            return LIMITS[self.ended]
        if self.returncode is None or self.returncode == 0:
            return ""
        if self.returncode < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"ended by {names.get(-self.returncode, f'signal {-self.returncode}')}"
        lines = self.stderr.strip().splitlines()
        reason = f"exit status {self.returncode}" + (f": {lines[-1].strip()}" if lines else "")
        return reason[:MAX_REASON]
