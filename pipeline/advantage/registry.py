"""Advantage estimators: pure functions from rewards to one advantage per response token.

An estimator is `f(data: EstimatorInput, config: AlgorithmConfig) -> Estimate`. A built-in one has an entry with its
facts in `pipeline/catalogue.py`; a user's own states them in `@register_adv_est("name", scope=...)`. It `needs`, beyond
rewards, any of:

- `values`: a critic, and the stage that evaluates it;
- `baselines`: a greedy response to every prompt, generated and scored with its group;
- `sum_pi_squared`: a forward pass of the policy over its own responses;
- `parts`: the named rewards that the reward function returned.

Arrays are flat and float64: R rows with N response tokens; row i owns the tokens `offsets[i]:offsets[i + 1]`.
Rows whose reward failed never reach an estimator.
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
    """[N] float64, the score on the row's last trained token, less the KL penalty of each trained token; 0 on others.
    They add up to `rewards` in rows with a trained token. An environment's reward for an answer is on the last trained
    token of that answer, and the rest of the score on the row's."""
    log_probs: np.ndarray
    """[N] float64, log-probs that the tokens were sampled with."""
    values: np.ndarray | None = None
    """[N] float64, the critic's value before each token; None without a critic."""
    baselines: np.ndarray | None = None
    """[R] float64, score of the prompt's greedy response; None if the estimator does not need it."""
    sum_pi_squared: np.ndarray | None = None
    """[N] float64, the policy's squared probabilities summed over the vocabulary, at each token; or None."""
    turns: np.ndarray | None = None
    """[N] int64, number of the answer that the token belongs to, from 0, and -1 on tokens of tools and environments;
    None if rows are not episodes, and so have one answer."""
    parts: dict[str, np.ndarray] | None = None
    """Name to [R] float64: the numbers that the reward function returned for every row, and `score`; or None."""

    @property
    def lengths(self) -> np.ndarray:
        """[R] int64, response tokens of each row."""
        return np.diff(self.offsets)

    def per_token(self, rows: np.ndarray) -> np.ndarray:
        """[N] the row values [R] repeated over the row's tokens, 0 if the mask is false."""
        return np.repeat(rows, self.lengths) * self.mask


@dataclass(frozen=True)
class Estimate:
    """Result of an estimator."""

    advantages: np.ndarray
    """[N] float64, advantage of each token."""
    returns: np.ndarray
    """[N] float64, targets of the critic, sums of future rewards, or the advantages."""


AdvantageFunction = Callable[[EstimatorInput, AlgorithmConfig], Estimate]


def register_adv_est(name: str, **facts: Any) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Return a decorator that makes an estimator of yours known as `algorithm.adv_estimator=name`.

    `facts` are the fields of `catalogue.Estimator`.

    Raises ValueError for an unknown scope or need, or if the name belongs to another function; TypeError for an unknown
    fact.
    """

    def decorate(function: AdvantageFunction) -> AdvantageFunction:
        register("advantage estimator", ESTIMATORS, Estimator(name, function, **facts))
        return function

    return decorate
