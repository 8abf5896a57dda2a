"""Dynamic sampling, oversampling and the order of groups, and what they cannot be together with.

Part of `checks.py`, which reports every sentence at once.
"""

from collections.abc import Iterator

from pipeline.config import Config
from pipeline.overlap import chosen_otherwise
from pipeline.stages import uses_engines


def problems(config: Config) -> Iterator[str]:
    """One sentence per problem."""
    yield from _oversampling(config)
    if config.stream.order == "first_come" and uses_engines(config) and (other := chosen_otherwise(config)):
        yield (
            f"stream.order=first_come with {other}: that chooses the groups of an iteration already; set one of them "
            "back"
        )
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


def _oversampling(config: Config) -> Iterator[str]:
    rollout, algorithm = config.rollout, config.algorithm
    if not uses_engines(config):
        return
    yield from _interruption(config)
    if not rollout.oversample:
        return
    if rollout.oversample_policy == "carry":
        on = "rollout.oversample_policy=carry: groups that are carried over go on with the weights of the next version"
        if algorithm.max_staleness == 0:
            yield f"{on}, and with algorithm.max_staleness=0 no row may be older than that; set it to 1 or more"
        if rollout.update != "in_flight" and not rollout.partial_tokens:
            yield (
                f"{on}, and rollout.update={rollout.update} would wait for them to end; set rollout.update=in_flight, "
                "or rollout.partial_tokens to interrupt them"
            )
    if algorithm.filter_groups.enable and algorithm.filter_groups.surplus == "carry":
        yield (
            f"rollout.oversample={rollout.oversample:g} with algorithm.filter_groups.surplus=carry: which prompts the "
            "groups of a chunk belong to depends on the clock, so a resumed run could not go on behind those that are "
            "used up; set surplus=discard"
        )


def _interruption(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.partial_tokens:
        return
    on = f"rollout.partial_tokens={rollout.partial_tokens}: responses that are interrupted go on in a later iteration"
    if not rollout.oversample or rollout.oversample_policy != "carry":
        yield (
            f"{on}, and others take their places, so that chunks must begin with more groups than they give; set "
            "rollout.oversample above 0 and rollout.oversample_policy=carry"
        )
    if rollout.stop:
        yield f"{on}, and a text of rollout.stop could begin before the interruption; use one of the two"
    length = config.data.max_prompt_length + config.data.max_response_length
    if rollout.engine_kwargs.get("max_model_len", length) < length:
        yield (
            f"{on}, and rollout.engine_kwargs.max_model_len={rollout.engine_kwargs['max_model_len']} would end them "
            f"before data.max_prompt_length + data.max_response_length={length} tokens; leave it out, or lower these"
        )
