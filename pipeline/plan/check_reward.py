"""Check the settings of rewards. Part of `checks.check`. The user's code is not run here, but in `reward/dry.py`."""

import inspect
import math
import re
from collections.abc import Iterator

from pipeline.config import Config
from pipeline.config.bounds import sentences
from pipeline.config.reward import FunctionConfig, RewardConfig
from pipeline.derived import chunk_prompts
from pipeline.reward.functions import functions
from pipeline.reward.rules import rule_of
from pipeline.reward.sandbox.rule import DATA_SOURCES

TAKEN = (
    *("score", "acc", "pred", "rm_score", "env_score", "raw_score"),
    *("overlong_penalty", "length_penalty", "repetition_penalty"),
)
"""Names of parts of a reward that have a fixed meaning. A function in `reward.functions` must not have such a name."""

_RULE_OPTIONS = "its options are in reward.rule_kwargs"
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def problems(config: Config) -> Iterator[str]:
    """Yield one sentence per problem with the settings of rewards."""
    reward, longest = config.reward, config.data.max_response_length
    yield from sentences(config, reward.problems())
    yield from _functions(reward)
    yield from _rule_kwargs(reward)
    buffer = reward.overlong_buffer
    if buffer.enable and not 1 <= buffer.len <= longest:
        yield f"reward.overlong_buffer.len={buffer.len} must lie between 1 and data.max_response_length={longest}"
    yield from _rate_limit(config)


def _functions(reward: RewardConfig) -> Iterator[str]:
    for name, settings in reward.functions.items():
        key = f"reward.functions.{name}"
        if not _NAME.fullmatch(name) or name in TAKEN:
            yield (
                f"{key}: {name!r} names a column, so it must be letters, digits and _, and not one of "
                f"{', '.join(TAKEN)}"
            )
        one = FunctionConfig(**settings)
        if not math.isfinite(one.weight) or one.weight == 0:
            yield (
                f"{key}.weight={one.weight:g} must be a number other than 0; to leave the reward out, remove the entry"
            )
        if one.timeout_s is not None and not 0 < one.timeout_s < math.inf:
            yield f"{key}.timeout_s={one.timeout_s:g} must be above 0, or null"
        if one.path is None and (one.batch or one.kwargs):
            inner, instead = ("batch", "rules take one row at a time") if one.batch else ("kwargs", _RULE_OPTIONS)
            yield f"{key}.{inner} is set but {key}.path is not, so the rule of the data_source scores: {instead}"


def _rule_kwargs(reward: RewardConfig) -> Iterator[str]:
    for source, kwargs in reward.rule_kwargs.items():
        key = f"reward.rule_kwargs.{source}"
        if source in DATA_SOURCES:
            yield f"{key}: the rule of {source!r} is the sandbox; its settings are in reward.sandbox"
            continue
        if source.endswith("*"):
            yield f"{key}: options are found by the exact data_source; write one entry for each that the data has"
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


def _rate_limit(config: Config) -> Iterator[str]:
    limits = config.reward.rate_limit
    if not limits.used:
        return
    try:
        own = [function for function in functions(config.reward) if function.path is not None]
    except ValueError:
        return
    if not own:
        yield "reward.rate_limit limits functions of your own, but none is set; rules are not counted; leave it out"
        return
    if limits.max_per_minute:
        batch = config.data.train_batch_size
        rows, chunks = batch * config.rollout.n, batch // max(1, chunk_prompts(config))
        calls = sum(chunks if function.batch else rows for function in own)
        minutes, deadline = calls / limits.max_per_minute, config.trainer.deadlines.rows
        if minutes * 60 > deadline:
            yield (
                f"an iteration makes {calls} calls of your functions, which take {minutes:.0f} minutes at "
                f"reward.rate_limit.max_per_minute={limits.max_per_minute}, longer than trainer.deadlines.rows="
                f"{deadline:g} seconds; raise one of them or lower data.train_batch_size"
            )
