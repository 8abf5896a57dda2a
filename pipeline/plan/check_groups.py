"""Dynamic sampling, and what it cannot be together with.

Part of `checks.py`, which reports every sentence at once.
"""

from collections.abc import Iterator

from pipeline.config import Config
from pipeline.derived import uses_engines


def problems(config: Config) -> Iterator[str]:
    """One sentence per problem."""
    groups, staleness = config.algorithm.filter_groups, config.algorithm.max_staleness
    if not groups.enable:
        return
    on = "algorithm.filter_groups.enable=true"
    if not uses_engines(config):
        yield f"{on}: a replay trains on the groups of its recording and can generate no others; set it to false"
    if config.rollout.n == 1:
        yield f"{on} compares the responses of a group, and with rollout.n=1 there is one; set rollout.n to 2 or more"
    if not groups.metric:
        yield f"{on} needs algorithm.filter_groups.metric: `score`, or a part of the reward such as `acc`"
    if groups.surplus == "carry" and staleness == 0:
        yield (
            "algorithm.filter_groups.surplus=carry trains groups an iteration later, when they are a version old; with "
            "algorithm.max_staleness=0 none may be: set it to 1 or more, or surplus=discard"
        )
    if config.data.generator is not None:
        yield f"{on}: data.generator makes the prompts of an iteration, whose number is not known then; use one of them"
    if config.data.sampler == "solve_rate":
        yield (
            f"{on}: data.sampler=solve_rate learns from recorded rows, and groups that agree are not recorded; use one "
            "of them"
        )
