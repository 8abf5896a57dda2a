"""Settings of the code sandbox (`reward.sandbox.*`)."""

from dataclasses import dataclass

from pipeline.config.bounds import setting


@dataclass
class SandboxConfig:
    """Where and within which limits the code of a response runs."""

    isolation: str = setting("auto", choices=("auto", "namespaces", "none"))
    """`namespaces` (of Linux), `auto` (the same), or `none`: limits and a system call filter only, so code reads every
    file that the worker can. A run whose isolation does not work here is refused."""

    url: str | None = None
    """Address of a SandboxFusion server's `/run_code`, which then runs the code instead."""

    url_timeout_s: float = setting(300.0, above=0)
    """Seconds of the server for all tests of a response, attempts included; then the reward has failed."""

    score: str = setting("share", choices=("share", "all"))
    """`share`: the share of tests passed. `all`: 1.0 if every test passes, else 0.0, decided by the first failure."""

    timeout_s: float = setting(10.0, above=0)
    """Wall-clock seconds of one test."""

    total_timeout_s: float = setting(60.0, above=0)
    """Wall-clock seconds of all tests of a response; tests that have not started then have failed."""

    cpu_s: int = setting(10, at_least=1)
    """CPU seconds of one process of a test."""

    memory_mb: int = setting(1024, at_least=1)
    """MB of address space of a process, and of resident memory of all processes of a response together."""

    max_processes: int = setting(32, at_least=1)
    """Processes and threads at one time."""

    file_mb: int = setting(16, at_least=1)
    """MB of the largest file that the code may write."""

    temp_mb: int = setting(64, at_least=1)
    """MB of the folder that the code may write to: in memory, and empty before each test. With `isolation=none` it is
    on disk and unlimited."""

    output_kb: int = setting(1024, at_least=1)
    """KB of a test's stdout, and of its stderr; a test that prints more fails. A function's result may be 16 MB of
    JSON."""

    packages: bool = True
    """Let the code import installed packages (numpy, ...), not the standard library alone."""
