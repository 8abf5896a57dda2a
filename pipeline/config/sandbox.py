"""Settings of the code sandbox (`reward.sandbox.*`)."""

from dataclasses import dataclass

from pipeline.config.bounds import setting


@dataclass
class SandboxConfig:
    """Isolation and limits of the code in a response."""

    isolation: str = setting("auto", choices=("auto", "namespaces", "none"))
    """Isolation of the code: `namespaces` (of Linux); `auto`, which means the same; or `none`, with limits and a system
    call filter only, so the code can read every file that the worker can. If the isolation does not work on this
    machine, the run is refused."""

    url: str | None = None
    """Address of a SandboxFusion server's `/run_code` that runs the code instead."""

    url_timeout_s: float = setting(300.0, above=0)
    """Time limit of the server for all tests of a response, attempts included, in seconds. After it the row is an
    error."""

    score: str = setting("share", choices=("share", "all"))
    """Score of a response: `share` is the share of tests that pass; `all` is 1.0 if every test passes, else 0.0, and
    stops at the first failure."""

    timeout_s: float = setting(10.0, above=0)
    """Wall-clock limit of one test, in seconds."""

    total_timeout_s: float = setting(60.0, above=0)
    """Wall-clock limit of all tests of a response, in seconds. Tests that have not started by then fail."""

    cpu_s: int = setting(10, at_least=1)
    """CPU time limit of one process of a test, in seconds."""

    memory_mb: int = setting(1024, at_least=1)
    """Memory limit in MiB: address space of one process, and resident memory of all processes of a response
    together."""

    max_processes: int = setting(32, at_least=1)
    """Most processes and threads at the same time."""

    file_mb: int = setting(16, at_least=1)
    """Largest file that the code may write, in MiB."""

    temp_mb: int = setting(64, at_least=1)
    """Size of the folder that the code may write to, in MiB. It is in memory, and empty before each test. With
    `isolation=none` it is on disk and unlimited."""

    output_kb: int = setting(1024, at_least=1)
    """Output limit of a test, in KiB of stdout and of stderr; a test that prints more fails. The result of a function
    may have 16 MB of JSON."""

    packages: bool = True
    """Let the code import installed packages (numpy, ...). If false, it can import only the standard library."""
