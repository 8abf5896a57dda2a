"""Division of a model's layers among the stages of a pipeline. Does not load torch."""

from collections.abc import Sequence
from itertools import accumulate


def deal_layers(costs: Sequence[int], first: int, last: int, stages: int) -> list[int]:
    """Divide layers among stages so that the largest stage is as small as possible, and the others about equal.

    Args:
        costs: number of parameters of each layer.
        first, last: further parameters of the first and the last stage (embedding, head).
        stages: number of stages.

    Returns:
        [stages + 1] bounds: stage s has the layers from bounds[s] to bounds[s + 1] - 1. At least one each.

    Raises ValueError for fewer layers than stages.
    """
    if len(costs) < stages:
        raise ValueError(f"a model of {len(costs)} layers has fewer than {stages} stages need")
    totals = [0, *accumulate(costs)]
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    """End of the layers dealt so far, to (largest stage, sum of squares, bounds) of the best way."""
    for stage in range(stages):
        more, left = first * (stage == 0) + last * (stage == stages - 1), stages - 1 - stage
        found: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for end in range(stage + 1 if left else len(costs), len(costs) - left + 1):
            tried = []
            for begin, (largest, squares, bounds) in best.items():
                if begin < end:
                    size = totals[end] - totals[begin] + more
                    tried.append((max(largest, size), squares + size**2, (*bounds, end)))
            found[end] = min(tried)
        best = found
    return list(best[len(costs)][2])
