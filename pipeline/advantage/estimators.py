"""Advantage estimators: pure functions from rewards to one advantage per response token.

An estimator is `f(data: EstimatorInput, config: AlgorithmConfig) -> Estimate` under
`@register_adv_est("name", scope=...)`. Its scope says how much it must see at once:

- `group`: the samples of one prompt. Chunks stream through one by one.
- `batch`: all rows of an iteration (whitening over the batch, for example).

Rows and tokens are flat: R rows, N response tokens, row i owns the tokens `offsets[i]:offsets[i + 1]`. What an
estimator does not need it does not read: outcome estimators (GRPO, RLOO, ReMax) read `rewards`, `group` and
`baselines`, token estimators (GAE, REINFORCE++) read `token_rewards`, `values` and `mask`. Rows whose reward failed
never reach an estimator. Everything is float64.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from pipeline.advantage.config import AlgorithmConfig

GRPO_EPS = 1e-6


@dataclass(frozen=True)
class EstimatorInput:
    """What an estimator may look at."""

    rewards: np.ndarray
    """[R] float64, reward of the whole response, penalties included."""
    group: np.ndarray
    """[R] int64, number of the row's group (samples of one prompt), from 0."""
    offsets: np.ndarray
    """[R + 1] int64, where each row's tokens begin."""
    mask: np.ndarray
    """[N] bool, true where the policy chose the token; false on tokens of tools and environments."""
    token_rewards: np.ndarray
    """[N] float64, the reward on the row's last true token of the mask, 0 elsewhere."""
    values: np.ndarray | None = None
    """[N] float64, the critic's value before each token; None without a critic."""
    baselines: np.ndarray | None = None
    """[R] float64, reward of the prompt's greedy response; None where the rollout made none."""

    @property
    def lengths(self) -> np.ndarray:
        """[R] int64, response tokens of each row."""
        return np.diff(self.offsets)

    def per_token(self, rows: np.ndarray) -> np.ndarray:
        """[N] the row values [R] repeated over the row's tokens, 0 where the mask is false."""
        return np.repeat(rows, self.lengths) * self.mask


@dataclass(frozen=True)
class Estimate:
    """What an estimator returns."""

    advantages: np.ndarray
    """[N] float64."""
    returns: np.ndarray
    """[N] float64: the critic's target where there is a critic, else the advantages."""


AdvantageFunction = Callable[[EstimatorInput, AlgorithmConfig], Estimate]


@dataclass(frozen=True)
class Estimator:
    """A registered estimator."""

    name: str
    scope: str
    """`group` or `batch`."""
    function: AdvantageFunction


_ESTIMATORS: dict[str, Estimator] = {}


def register_adv_est(name: str, scope: str) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Decorator that makes an estimator known as `algorithm.adv_estimator=name`.

    Raises:
        ValueError: the scope is neither `group` nor `batch`, or the name is taken by another function.
    """
    if scope not in ("group", "batch"):
        raise ValueError(f"the scope of estimator {name!r} is {scope!r}; it must be 'group' or 'batch'")

    def register(function: AdvantageFunction) -> AdvantageFunction:
        if name in _ESTIMATORS and _ESTIMATORS[name].function is not function:
            raise ValueError(f"advantage estimator {name!r} is registered twice; give the second one another name")
        _ESTIMATORS[name] = Estimator(name, scope, function)
        return function

    return register


def get_adv_estimator(name: str) -> Estimator:
    """The estimator of `algorithm.adv_estimator`: a registered name or an import path `package.module:function`.

    A function reached by import path has the scope it was registered with; one that is not registered has scope
    `group`: it sees whole groups, but not whole iterations.

    Raises:
        ValueError: no such name (the sentence gives the nearest), or the import path leads nowhere.
    """
    if ":" in name:
        return _imported(name)
    if name not in _ESTIMATORS:
        near = get_close_matches(name, _ESTIMATORS, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"algorithm.adv_estimator {name!r} is unknown.{hint} Known are {', '.join(sorted(_ESTIMATORS))}, and any "
            "function of yours as 'package.module:function'."
        )
    return _ESTIMATORS[name]


def _imported(path: str) -> Estimator:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"algorithm.adv_estimator {path!r}: module {module_name!r} cannot be imported ({error}); "
            "it must be on the Python path of every worker"
        ) from error
    function = getattr(module, attribute, None)
    if function is None or not callable(function):
        raise ValueError(f"algorithm.adv_estimator {path!r}: module {module_name!r} has no function {attribute!r}")
    for known in _ESTIMATORS.values():
        if known.function is function:
            return known
    return Estimator(path, "group", function)


@register_adv_est("grpo", scope="group")
def grpo(data: EstimatorInput, config: AlgorithmConfig) -> Estimate:
    """Group relative advantages (Shao et al. 2024, section 4.1.2): A = (R - mean) / (std + 1e-6) within the group.

    std has ddof 1. With `norm_adv_by_std_in_grpo=false` A = R - mean (Dr.GRPO, Liu et al. 2025). A group whose rewards
    are all equal, one of a single row included, has exactly 0: it says nothing about which response is better.
    Returns equal the advantages.
    """
    groups = int(data.group.max()) + 1 if len(data.group) else 0
    count = np.maximum(np.bincount(data.group, minlength=groups), 1)
    mean = np.bincount(data.group, weights=data.rewards, minlength=groups) / count
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, data.group, data.rewards)
    np.maximum.at(high, data.group, data.rewards)
    # Equal rewards are told by their range: the rounded mean of equal numbers may differ from them, and dividing that
    # difference by an equally small std would make it visible.
    rows = np.where((high > low)[data.group], data.rewards - mean[data.group], 0.0)
    if config.norm_adv_by_std_in_grpo:
        variance = np.bincount(data.group, weights=rows**2, minlength=groups) / np.maximum(count - 1, 1)
        rows = rows / (np.sqrt(variance) + GRPO_EPS)[data.group]
    advantages = data.per_token(rows)
    return Estimate(advantages, advantages)
