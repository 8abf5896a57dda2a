"""The number of compute threads of a process."""


def compute_threads(num_threads: int, num_cpus: float) -> int:
    """Return the compute threads of a process on CPUs: `num_threads`, or for 0 as many as it has Ray CPUs."""
    return num_threads or max(1, round(num_cpus))
