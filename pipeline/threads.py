"""How many compute threads a process may use."""


def compute_threads(num_threads: int, num_cpus: float) -> int:
    """Compute threads of a process on CPUs: as many as were asked for, or for 0 as many as it has Ray CPUs."""
    return num_threads or max(1, round(num_cpus))
