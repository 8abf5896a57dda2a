"""Settings of rewards that cannot be, or that mean nothing together.

Part of `checks.py`, which reports every sentence at once. What only the user's own code or the data can tell is found
by the dry call (`pipeline/reward/dry.py`).
"""

import inspect
import math
import re
from collections.abc import Iterator

from pipeline.config import Config, sandbox
from pipeline.config.reward import RewardConfig
from pipeline.reward.functions import Function, function_config, functions
from pipeline.reward.rules import rule_of
from pipeline.reward.sandbox.rule import DATA_SOURCES

TAKEN = ("score", "acc", "pred", "rm_score", "raw_score", "overlong_penalty", "length_penalty", "repetition_penalty")
"""Parts of a reward that have a meaning, so that no function may have their names."""

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def problems(config: Config) -> Iterator[str]:
    """One sentence per problem."""
    reward = config.reward
    yield from _functions(reward)
    yield from _rule_kwargs(reward)
    yield from _shaping(config)
    yield from _rate_limit(config)
    yield from sandbox.problems(reward.sandbox)


def _functions(reward: RewardConfig) -> Iterator[str]:
    if reward.model.path is not None and (not math.isfinite(reward.model.weight) or reward.model.weight == 0):
        yield (
            f"reward.model.weight={reward.model.weight:g} must be a number other than 0; without a reward model, unset "
            "reward.model.path"
        )
    if reward.timeout_s == math.inf:
        yield "reward.timeout_s must be finite: a reward that hangs has to end some time"
    if reward.functions and reward.custom_reward_function.path:
        yield (
            "reward.functions and reward.custom_reward_function.path are both set; write the one function as another "
            "entry of reward.functions, or remove the others"
        )
    for name, settings in reward.functions.items():
        key = f"reward.functions.{name}"
        if not _NAME.fullmatch(name) or name in TAKEN:
            yield f"{key}: {name!r} names a column, so it must be letters, digits and _, and none of {', '.join(TAKEN)}"
        try:
            one = function_config(name, settings)
        except ValueError as error:
            yield str(error)
            continue
        if not math.isfinite(one.weight) or one.weight == 0:
            yield f"{key}.weight={one.weight:g} must be a number other than 0; remove the entry if it is not to count"
        if one.timeout_s is not None and not 0 < one.timeout_s < math.inf:
            yield f"{key}.timeout_s={one.timeout_s:g} must be above 0, or null"
        if one.path is None:
            yield from (
                f"{key}.{inner} is set and {key}.path is not, so that the rule of the data_source scores: {instead}"
                for inner, given, instead in (
                    ("batch", one.batch, "rules take one row at a time"),
                    ("kwargs", one.kwargs, "its options stand in reward.rule_kwargs"),
                )
                if given
            )


def _rule_kwargs(reward: RewardConfig) -> Iterator[str]:
    for source, kwargs in reward.rule_kwargs.items():
        key = f"reward.rule_kwargs.{source}"
        if source in DATA_SOURCES:
            yield f"{key}: the rule of {source!r} is the sandbox; its settings stand in reward.sandbox"
            continue
        if source.endswith("*"):
            yield f"{key}: options are looked up by the whole data_source; write one entry for each that the data has"
            continue
        try:
            signature = inspect.signature(rule_of(source))
        except ValueError as error:
            yield f"{key}: {error}"
            continue
        try:
            signature.bind("", None, **kwargs)
        except TypeError as error:
            options = ", ".join(list(signature.parameters)[2:]) or "no options"
            yield f"{key}={kwargs}: {error}; the rule takes {options}"


def _shaping(config: Config) -> Iterator[str]:
    reward, longest = config.reward, config.data.max_response_length
    buffer = reward.overlong_buffer
    if buffer.enable and not 1 <= buffer.len <= longest:
        yield (
            f"reward.overlong_buffer.len={buffer.len} must lie between 1 and data.max_response_length={longest}: it is "
            "the end of it over which the penalty grows"
        )
    for name in ("length_penalty", "repetition_penalty.factor", "overlong_buffer.penalty_factor"):
        section, _, last = name.rpartition(".")
        value = getattr(getattr(reward, section) if section else reward, last)
        if not 0 <= value < math.inf:
            yield f"reward.{name}={value:g} must be at least 0; it is taken from the score"
    if reward.clip is not None and (len(reward.clip) != 2 or not reward.clip[0] < reward.clip[1]):
        yield f"reward.clip={reward.clip} must be two numbers, the lower one first, or null"
    for source, pair in reward.normalize.items():
        if len(pair) != 2 or not math.isfinite(pair[0]) or not 0 < pair[1] < math.inf:
            yield (
                f"reward.normalize.{source}={pair} must be a mean and a standard deviation above 0, measured on scores "
                "of this data_source"
            )
    for source, factor in reward.source_scale.items():
        if not math.isfinite(factor):
            yield f"reward.source_scale.{source}={factor} must be a finite number"


def _rate_limit(config: Config) -> Iterator[str]:
    limits = config.reward.rate_limit
    per_minute = limits.max_per_minute
    if not limits.used:
        return
    try:
        own = [function for function in functions(config.reward) if function.path is not None]
    except ValueError:
        return
    if not own:
        yield "reward.rate_limit is set and there is no function of your own to call; rules are not counted"
        return
    if not per_minute:
        return
    groups, chunks = config.data.train_batch_size, config.data.train_batch_size // config.rollout.chunk_prompts
    calls = sum(_calls(function, groups * config.rollout.n, chunks) for function in own)
    minutes, deadline = calls / per_minute, config.trainer.deadlines.rows
    if minutes * 60 > deadline:
        yield (
            f"an iteration makes {calls} calls of your functions, which take {minutes:.0f} minutes at "
            f"reward.rate_limit.max_per_minute={per_minute}, longer than trainer.deadlines.rows={deadline:g} seconds; "
            "raise one of them or lower data.train_batch_size"
        )


def _calls(function: Function, rows: int, chunks: int) -> int:
    return chunks if function.batch else rows
