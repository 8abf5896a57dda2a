"""Where verl's GPUs go: train workers, engines and scoring replicas of their own, instead of sharing each."""

from dataclasses import dataclass

MAX_CHUNK = 16
"""Most prompts in a chunk; smaller chunks let training begin earlier and spread the work better."""

CHUNKS_PER_ENGINE = 2
"""Chunks of an iteration that each engine should get at least, so that none waits for long."""

WORKERS_PER_REPLICA = 4
"""A scoring replica makes one forward pass where a train worker makes a forward pass and a training step."""


@dataclass(frozen=True)
class Layout:
    """How many of each, and the chunk that suits them."""

    workers: int
    """Train workers, one GPU each."""
    engines: int
    """Engines, of as many GPUs each as they are split over."""
    replicas: int
    """Replicas of each scoring pool; 0 without pools."""
    share: float
    """GPUs of one replica: the pools share theirs."""
    chunk: int
    """Prompts in a chunk."""
    gpus: int
    """GPUs in all."""


def lay_out(gpus: int, batch: int, mini: int, pools: int, split: int = 1) -> Layout:
    """Half of the GPUs train; the others generate and, where there are scoring pools, score.

    The chunk times the workers divides `mini`, and so the batch: every worker gets whole chunks of every mini-batch.
    There is at least one of each, so that a single GPU of verl's becomes two or three. GPUs that are too few for one
    engine more become replicas, or stay free without scoring pools.

    Args:
        gpus: at least 1.
        batch: prompts of an iteration, a multiple of `mini`.
        mini: prompts of a mini-batch; the greatest common divisor where there are several sizes.
        pools: scoring pools.
        split: GPUs of one engine.
    """
    workers = max(count for count in range(1, max(1, gpus // 2) + 1) if mini % count == 0)
    rest = gpus - workers
    replicas = max(1, rest // WORKERS_PER_REPLICA) if pools else 0
    engines = max(1, (rest - replicas) // split)
    if pools:
        replicas = max(replicas, rest - engines * split)
    fitting = [size for size in range(1, MAX_CHUNK + 1) if mini // workers % size == 0]
    busy = [size for size in fitting if batch // size >= CHUNKS_PER_ENGINE * engines]
    share = round(1 / pools, 2) if pools else 0.0
    return Layout(workers, engines, replicas, share, max(busy, default=1), workers + engines * split + replicas)
