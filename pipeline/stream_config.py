"""Settings of the stream (`stream.*`)."""

from dataclasses import dataclass


@dataclass
class StreamConfig:
    """How rows come from the engines to the trainer."""

    order: str = "auto"
    """Which groups a chunk gives: `kept`, those of its own prompts; or `first_come`, those of its engine that are
    complete first: a complete group of a later chunk changes places with one that still runs, where that makes no row
    older than `algorithm.max_staleness`, or `algorithm.on_stale=correct` allows it. No group is lost or comes twice,
    and each chunk has as many; which iteration trains a prompt depends on the clock. `auto` takes `first_come` where
    engines generate ahead of training (`algorithm.max_staleness` above 0) without `rollout.oversample` and
    `algorithm.filter_groups`, else `kept`."""
