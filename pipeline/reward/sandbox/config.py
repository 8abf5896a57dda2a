"""Settings of the code sandbox (`reward.sandbox.*`)."""

from dataclasses import dataclass

ISOLATIONS = ("auto", "bubblewrap", "namespaces", "none")
SCORES = ("share", "all")


@dataclass
class SandboxConfig:
    """Where and within which limits the code of a response runs."""

    isolation: str = "auto"
    """`bubblewrap`, `namespaces`, `auto` (the first of these two that works here; the run is refused where none does),
    or `none`: resource limits and a system call filter only. With `none` the code reads and writes every file that
    the worker may, and can read the environment of other processes of the same user."""

    url: str | None = None
    """Address of a SandboxFusion server's `/run_code`; the code then runs there, and `isolation` is not used."""

    url_timeout_s: float = 300.0
    """Seconds that the server may take for all tests of one response, waiting and repeated attempts included; then
    the reward has failed."""

    score: str = "share"
    """`share`: the score is the share of tests passed. `all`: 1.0 if every test passes, else 0.0; the first test that
    fails ends the run."""

    timeout_s: float = 10.0
    """Wall-clock seconds of one test."""

    total_timeout_s: float = 60.0
    """Wall-clock seconds of all tests of one response; tests that do not start within them count as failed."""

    cpu_s: int = 10
    """CPU seconds of one process of a test."""

    memory_mb: int = 1024
    """Address space of one process, and resident memory of all processes of a response together."""

    max_processes: int = 32
    """Processes and threads at one time."""

    file_mb: int = 16
    """Largest file that the code may write."""

    temp_mb: int = 64
    """Size of the folder the code may write to, which is in memory and empty at the start of each test. Not enforced
    by `isolation=none`."""

    output_kb: int = 1024
    """Largest output of one test on each of stdout and stderr; a test that prints more fails."""

    packages: bool = True
    """Let the code import the packages installed beside this Python (numpy, ...); otherwise the standard library
    alone."""


def problems(config: SandboxConfig) -> list[str]:
    """Sentences on values that mean nothing, each with its key."""
    found = []
    for name, known in (("isolation", ISOLATIONS), ("score", SCORES)):
        if getattr(config, name) not in known:
            found.append(f"reward.sandbox.{name} is {getattr(config, name)!r}, but must be one of {', '.join(known)}")
    for name in ("url_timeout_s", "timeout_s", "total_timeout_s"):
        if not 0 < getattr(config, name) < float("inf"):
            found.append(f"reward.sandbox.{name} is {getattr(config, name)}, but must be a time in seconds above 0")
    for name in ("cpu_s", "memory_mb", "max_processes", "file_mb", "temp_mb", "output_kb"):
        if getattr(config, name) < 1:
            found.append(f"reward.sandbox.{name} is {getattr(config, name)}, but must be at least 1")
    if config.url is not None and not config.url.startswith(("http://", "https://")):
        found.append(f"reward.sandbox.url is {config.url!r}, but must begin with http:// or https://")
    return found
