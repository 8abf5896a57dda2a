"""Which process is killed when: drawn from a seed, so that a run of kills can be had again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

EARLY_SHARE = 0.2
"""Share of the kills that do not wait until the run has recovered from the one before."""
EARLY_S = (1.0, 15.0)
"""Seconds after the kill before at which such a one comes."""
LATER_S = (0.0, 4.0)
"""Seconds after the next iteration at which any other one comes."""


@dataclass(frozen=True)
class Kill:
    """One kill to come."""

    kind: str
    early: bool
    """Whether it comes while the run still recovers from the one before (the first: while it starts)."""
    delay_s: float
    """Seconds after the kill before (`early`) or after the next iteration."""


def schedule(kinds: Sequence[str], count: int, seed: int) -> list[Kill]:
    """`count` kills in random order; every kind comes as often as any other, give or take one.

    Raises:
        ValueError: there are fewer kills than kinds.
    """
    if count < len(kinds):
        raise ValueError(f"--kills {count} is fewer than the {len(kinds)} kinds of processes: {', '.join(kinds)}")
    random_ = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < count:
        drawn += random_.sample(list(kinds), min(len(kinds), count - len(drawn)))
    random_.shuffle(drawn)
    kills = []
    for kind in drawn:
        early = random_.random() < EARLY_SHARE
        kills.append(Kill(kind, early, round(random_.uniform(*(EARLY_S if early else LATER_S)), 2)))
    return kills
