"""The outcome of one run of a program in a sandbox."""

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
    """Exit status, negative for a signal; None if the program did not end by itself."""
    stdout: str = ""
    stderr: str = ""
    """Output, up to `output_kb`; bytes that are not UTF-8 are replaced."""
    seconds: float = 0.0
    """Wall-clock time in seconds."""
    result: bytes = b""
    """Answers of calls, a line of JSON for each (`inside/driver.py`). They come from the program's process and may be
    any bytes."""

    @property
    def failure(self) -> str:
        """Reason for an end before the program was done, in a few words; "" without one."""
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
