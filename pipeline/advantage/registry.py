"""Advantage estimators: pure functions from rewards to one advantage per response token.

An estimator is `f(data: EstimatorInput, config: AlgorithmConfig) -> Estimate`. The facts about a built-in estimator,
the fields of `Estimator`, are in `pipeline/catalogue.py`; a user's estimator states them in
`@register_adv_est("name", scope=...)`. The fact `needs` lists inputs beyond rewards:

- `values`: values of a critic, for which the run gets a critic and the stage that evaluates it;
- `baselines`: the score of a greedy response to every prompt, generated and scored with the group;
- `sum_pi_squared`: squared probabilities summed over the vocabulary, from a forward pass of the policy over the
  responses;
- `parts`: the named rewards that the reward function returned.

Arrays are flat: R rows with N response tokens in all; row i has the tokens `offsets[i]:offsets[i + 1]`. Rows whose
reward failed never reach an estimator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.catalogue import ESTIMATORS, Estimator
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.registry import register


@dataclass(frozen=True)
class EstimatorInput:
    """The arrays that an estimator may read."""

    rewards: np.ndarray
    """[R] float64, reward of the whole response, penalties included."""
    group: np.ndarray
    """[R] int64, number of the row's group (samples of one prompt), from 0."""
    offsets: np.ndarray
    """[R + 1] int64, first token of each row, and N at the end."""
    mask: np.ndarray
    """[N] bool, true for tokens of the policy; false for tokens of tools and environments."""
    token_rewards: np.ndarray
    """[N] float64, reward of each token: the row's score on the row's last trained token, minus each trained token's KL
    penalty; 0 on other tokens. In a row with a trained token they add up to `rewards`. If an environment rewards turns,
    the reward of a turn is on the turn's last trained token, and the rest of the score on the row's last trained
    token."""
    log_probs: np.ndarray
    """[N] float64, log-probs with which the tokens were sampled."""
    values: np.ndarray | None = None
    """[N] float64, the critic's value before each token; None without a critic."""
    baselines: np.ndarray | None = None
    """[R] float64, score of the greedy response to the row's prompt; None if the estimator does not need baselines."""
    sum_pi_squared: np.ndarray | None = None
    """[N] float64, the policy's squared probabilities summed over the vocabulary, at each token; None if the estimator
    does not need them."""
    turns: np.ndarray | None = None
    """[N] int64, number of the turn that the token belongs to, from 0, and -1 on tokens of tools and environments; None
    if rows are not episodes, so that each response is one turn."""
    parts: dict[str, np.ndarray] | None = None
    """Name to [R] float64: the numbers that the reward function returned for every row, and `score`; None if the
    estimator does not need parts."""

    @property
    def lengths(self) -> np.ndarray:
        """[R] int64, number of response tokens of each row."""
        return np.diff(self.offsets)

    def per_token(self, rows: np.ndarray) -> np.ndarray:
        """[N] the entry of `rows` [R] for the row of each token; 0 if the mask is false."""
        return np.repeat(rows, self.lengths) * self.mask


@dataclass(frozen=True)
class Estimate:
    """Result of an estimator."""

    advantages: np.ndarray
    """[N] float64, advantage of each token."""
    returns: np.ndarray
    """[N] float64, the critic's targets for estimators with a critic. Otherwise sums of future rewards or a copy of the
    advantages, for metrics."""


AdvantageFunction = Callable[[EstimatorInput, AlgorithmConfig], Estimate]


def register_adv_est(name: str, **facts: Any) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Return a decorator that registers an estimator of yours as `algorithm.adv_estimator=name`.

    Args:
        name: value of the setting.
        facts: fields of `catalogue.Estimator`.

    Raises ValueError for an unknown scope or need, or if the name belongs to another function; TypeError for a fact
    that is not a field.
    """

    def decorate(function: AdvantageFunction) -> AdvantageFunction:
        register("advantage estimator", ESTIMATORS, Estimator(name, function, **facts))
        return function

    return decorate
