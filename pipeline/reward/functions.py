"""The functions that score a row: the rule of its `data_source`, a function of the user, or several with weights.

Only `load` imports user code, and only in reward workers (`program.py`).
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
"""Columns of episodes that a function gets if its parameters name them: the conversation as a list of messages `{role,
content}`, and the number of answers. Batch functions get a list of each."""
TABLE = "table"  # parameter of a batch function that takes the rows as one Arrow table

ONLY = ""  # name of a function without others

SANDBOX_LAG_S = 45.0  # seconds that a sandbox may need beyond its limit, to start and to end


@dataclass(frozen=True)
class Function:
    """A rule or a function of the user, as the settings describe it."""

    name: str
    """The name under `reward.functions`; `ONLY` without that section."""
    key: str
    """The key that errors name."""
    timeout_s: float
    path: str | None = None
    """File or module of the function; None is the rule of the row's `data_source`."""
    attribute: str = "compute_score"
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight: float = 1.0
    batch: bool = False


def functions(config: RewardConfig) -> tuple[Function, ...]:
    """List the functions that score rows, in the order of `reward.functions`; none if only a reward model scores."""
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
    """Return the time limit (s) of a call of `function` for a row of `data_source`; the sandbox has limits of its
    own."""
    if function.path is not None or data_source not in DATA_SOURCES:
        return function.timeout_s
    sandbox = config.sandbox
    return (sandbox.total_timeout_s if sandbox.url is None else sandbox.url_timeout_s) + SANDBOX_LAG_S


def budget_for(function: Function, data_source: str) -> Budget | None:
    """Return the budget of the rule that `function` calls for a row of `data_source`, if it has one."""
    if function.path is not None or data_source in DATA_SOURCES:
        return None
    try:
        return budget_of(rule_of(data_source))
    except ValueError:
        # The row's error reports the missing rule.
        return None


def load(function: Function) -> Callable[..., Any]:
    """Load the user's function.

    Raises:
        ValueError: the file or module is missing or fails to load, has no such function, or the function does not take
            verl's keyword arguments and the configured ones. The sentence names the key to set.
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
    """Return the names of the arguments that the rows fill."""
    if not batch:
        return KEYWORDS
    return (TABLE,) if TABLE in inspect.signature(function).parameters else BATCH_KEYWORDS


def episode_keywords(loaded: Callable[..., Any], function: Function) -> tuple[str, ...]:
    """Return the `EPISODE_KEYWORDS` that the loaded function has as parameters and its settings do not fill."""
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
