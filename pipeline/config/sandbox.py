"""Settings of the code sandbox (`reward.sandbox.*`)."""

from dataclasses import dataclass

ISOLATIONS = ("auto", "namespaces", "none")
SCORES = ("share", "all")


@dataclass
class SandboxConfig:
    """Where and within which limits the code of a response runs."""

    isolation: str = "auto"
    """`namespaces` (of Linux), `auto` (the same), or `none`: limits and a system call filter only, so code reads every
    file that the worker can. A run whose isolation does not work here is refused."""

    url: str | None = None
    """Address of a SandboxFusion server's `/run_code`, which then runs the code instead."""

    url_timeout_s: float = 300.0
    """Seconds of the server for all tests of a response, attempts included; then the reward has failed."""

    score: str = "share"
    """`share`: the share of tests passed. `all`: 1.0 if every test passes, else 0.0, decided by the first failure."""

    timeout_s: float = 10.0
    """Wall-clock seconds of one test."""

    total_timeout_s: float = 60.0
    """Wall-clock seconds of all tests of a response; tests that have not started then have failed."""

    cpu_s: int = 10
    """CPU seconds of one process of a test."""

    memory_mb: int = 1024
    """MB of address space of a process, and of resident memory of all processes of a response together."""

    max_processes: int = 32
    """Processes and threads at one time."""

    file_mb: int = 16
    """MB of the largest file that the code may write."""

    temp_mb: int = 64
    """MB of the folder that the code may write to: in memory, and empty before each test. With `isolation=none` it is
    on disk and unlimited."""

    output_kb: int = 1024
    """KB of a test's stdout, and of its stderr; a test that prints more fails. A function's result may be 16 MB of
    JSON."""

    packages: bool = True
    """Let the code import installed packages (numpy, ...), not the standard library alone."""


def problems(config: SandboxConfig) -> list[str]:
    """Sentences on values that mean nothing, each with its key."""
    found = []
    if config.isolation == "bubblewrap":
        found.append("reward.sandbox.isolation=bubblewrap is gone: namespaces isolates as much without that program")
        return found
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
