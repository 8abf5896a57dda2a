"""Settings of the code sandbox (`reward.sandbox.*`)."""

from dataclasses import dataclass

from pipeline.config.bounds import setting


@dataclass
class SandboxConfig:
    """Isolation and limits for running the code in a response."""

    isolation: str = setting("auto", choices=("auto", "namespaces", "none"))
    """Isolation of the code. `namespaces`: namespaces of Linux. `auto`: the same. `none`: only limits and a filter of
    system calls, so the code can read every file that the worker can. If the isolation does not work on this machine,
    the run is refused."""

    url: str | None = None
    """URL of a SandboxFusion server's `/run_code`. The server then runs the code, instead of the reward worker. Null:
    the reward worker runs it."""

    url_timeout_s: float = setting(300.0, above=0)
    """Time limit of the server for all tests of a response, in seconds, with repeated attempts. If it is exceeded, the
    row is an error."""

    score: str = setting("share", choices=("share", "all"))
    """Score of a response. `share`: the fraction of tests that pass. `all`: 1.0 if every test passes, else 0.0; no test
    runs after the first failure."""

    timeout_s: float = setting(10.0, above=0)
    """Wall-clock limit of one test, in seconds."""

    total_timeout_s: float = setting(60.0, above=0)
    """Wall-clock limit of all tests of a response, in seconds. Tests that have not started by then fail."""

    cpu_s: int = setting(10, at_least=1)
    """Limit of the CPU time of one process of a test, in seconds."""

    memory_mb: int = setting(1024, at_least=1)
    """Memory limit in MiB, both of the address space of one process and of the resident memory of all processes of a
    response together."""

    max_processes: int = setting(32, at_least=1)
    """Maximum number of processes and threads of a response at the same time."""

    file_mb: int = setting(16, at_least=1)
    """Maximum size of a file that the code writes, in MiB."""

    temp_mb: int = setting(64, at_least=1)
    """Size of the folder that the code may write to, in MiB. It is in memory, and empty before each test. With
    `isolation=none` it is on disk and unlimited."""

    output_kb: int = setting(1024, at_least=1)
    """Output limit of a test, in KiB, for stdout and stderr each; a test that prints more fails. The return value of a
    function may have up to 16 MB as JSON."""

    packages: bool = True
    """Let the code import installed packages (numpy, ...). False: the code can import only the standard library."""
