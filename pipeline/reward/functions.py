"""Functions that score a row: the built-in rule for its `data_source`, a function of the user, or several with weights.

User code is imported only by `load`, and only in reward workers (`program.py`).
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pipeline import imports
from pipeline.config.reward import FunctionConfig, RewardConfig
from pipeline.reward.rules import rule_of
from pipeline.reward.rules.budget import Budget, budget_of
from pipeline.reward.sandbox.rule import DATA_SOURCES

KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_KEYWORDS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
EPISODE_KEYWORDS = ("messages", "turns")
"""Columns of episodes that a function gets if it has parameters of these names: the conversation as a list of messages
`{role, content}`, and the number of turns. Batch functions get a list of each."""
TABLE = "table"  # parameter of a batch function that takes the rows as one Arrow table

ONLY = ""  # name of the function if there is only one

SANDBOX_LAG_S = 45.0  # seconds that a sandbox may need in addition to its time limit, to start and to end


@dataclass(frozen=True)
class Function:
    """A function that scores rows, as the settings describe it: a function of the user, or the built-in rules."""

    name: str
    """Name in `reward.functions`; `ONLY` if that section is empty."""
    key: str
    """Setting that errors name."""
    timeout_s: float
    """Time limit of one call, in seconds."""
    path: str | None = None
    """File or module of the function; None: the built-in rule for the row's `data_source`."""
    attribute: str = "compute_score"
    """Name of the function in its module."""
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight: float = 1.0
    batch: bool = False


def functions(config: RewardConfig) -> tuple[Function, ...]:
    """Return the functions that score rows, in the order of `reward.functions`; empty if only a reward model scores."""
    made = []
    for name, settings in config.functions.items():
        one = FunctionConfig(**settings)
        timeout_s = config.timeout_s if one.timeout_s is None else one.timeout_s
        key = f"reward.functions.{name}"
        made.append(Function(name, key, timeout_s, one.path, one.name, one.kwargs, weight=one.weight, batch=one.batch))
    custom = config.custom_reward_function
    if made or (custom.path is None and config.model.path is not None):
        return tuple(made)
    key = "reward.custom_reward_function"
    return (Function(ONLY, key, config.timeout_s, custom.path, custom.name, custom.reward_kwargs),)


def limit_of(function: Function, data_source: str, config: RewardConfig) -> float:
    """Return the time limit, in seconds, of a call of `function` for a row of `data_source`.

    Rows that the sandbox scores have the sandbox's time limit.
    """
    if function.path is not None or data_source not in DATA_SOURCES:
        return function.timeout_s
    sandbox = config.sandbox
    return (sandbox.total_timeout_s if sandbox.url is None else sandbox.url_timeout_s) + SANDBOX_LAG_S


def budget_for(function: Function, data_source: str) -> Budget | None:
    """Return the CPU budget of the rule that scores a row of `data_source`; None for rules without a budget and for
    functions of the user."""
    if function.path is not None or data_source in DATA_SOURCES:
        return None
    try:
        return budget_of(rule_of(data_source))
    except ValueError:
        # There is not a rule for this data source. The row's own error reports that.
        return None


def load(function: Function) -> Callable[..., Any]:
    """Import the user's function.

    Raises:
        ValueError: the file or module is missing or fails to load, does not have the function, or the function does not
            take verl's keyword arguments and the configured ones. The text names the setting to change.
    """
    key = function.key
    kwargs_key = f"{key}.reward_kwargs" if function.name == ONLY else f"{key}.kwargs"
    reserved = (TABLE, *BATCH_KEYWORDS) if function.batch else KEYWORDS
    taken = sorted(set(function.kwargs) & set(reserved))
    if taken:
        raise ValueError(f"{kwargs_key} may not hold {', '.join(taken)}: the rows fill these parameters")
    module = _module(function)
    loaded = getattr(module, function.attribute, None)
    if not callable(loaded):
        names = sorted(name for name, value in vars(module).items() if inspect.isfunction(value)) or ["none"]
        raise ValueError(
            f"{key}.name is {function.attribute!r}, but {function.path} has no such function "
            f"(it has: {', '.join(names)})"
        )
    try:
        signature = inspect.signature(loaded)
    except ValueError as error:
        raise ValueError(
            f"{key}: {function.attribute} in {function.path} is built in, and does not say what it takes ({error}); "
            "name a function of your own that calls it"
        ) from error
    keywords = (*keywords_of(loaded, function.batch), *episode_keywords(loaded, function))
    try:
        signature.bind(**dict.fromkeys(keywords), **function.kwargs)
    except TypeError as error:
        call = f"{function.attribute}({', '.join([*keywords, *function.kwargs])})"
        raise ValueError(
            f"{key}: {function.attribute} in {function.path} cannot be called as {call}: {error}; change its "
            f"parameters or {kwargs_key}"
        ) from error
    return loaded


def keywords_of(function: Callable[..., Any], batch: bool) -> tuple[str, ...]:
    """Return the names of the keyword arguments with which `function` gets columns of rows.

    Args:
        function: the loaded function.
        batch: True if the function gets all rows of a chunk in one call.
    """
    if not batch:
        return KEYWORDS
    return (TABLE,) if TABLE in inspect.signature(function).parameters else BATCH_KEYWORDS


def episode_keywords(loaded: Callable[..., Any], function: Function) -> tuple[str, ...]:
    """Return the names in `EPISODE_KEYWORDS` that are parameters of `loaded` and not set by `function.kwargs`."""
    named = inspect.signature(loaded).parameters
    return tuple(name for name in EPISODE_KEYWORDS if name in named and name not in function.kwargs)


def _module(function: Function) -> ModuleType:
    path, key = str(function.path), f"{function.key}.path"
    try:
        return imports.load(path)
    except imports.NotCode as error:
        raise ValueError(f"{key} is {path!r}, which {error}") from error
    # A module may raise anything as it is loaded.
    except BaseException as error:
        raise ValueError(f"{key}: importing {path} failed with {type(error).__name__}: {error}") from error
