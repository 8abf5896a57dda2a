"""Number of compute threads of a process."""


def compute_threads(num_threads: int, num_cpus: float) -> int:
    """Return the number of compute threads of a process on CPUs: `num_threads`, or the number of its Ray CPUs if that
    is 0."""
    return num_threads or max(1, round(num_cpus))
