"""Batches for the tests of losses: sequences as plain arrays, put together the way the actor does."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.catalogue import POLICY_LOSSES
from pipeline.config.learner import ActorConfig, PolicyLossConfig
from pipeline.losses import AGG_MODES, Candidates, LossInput, agg_divisor, agg_loss, get_policy_loss

NAMES = sorted(name for name, loss in POLICY_LOSSES.items() if loss.built_in and not loss.of_pairs)
"""The built-in losses, without those of pairs (`test_pairs.py`)."""
SCALE_FACTOR = 5.0


def actor(**changes: Any) -> ActorConfig:
    """A config under which every branch of every loss is reached by small batches; `changes` are keys of
    `actor.policy_loss` or of `actor`."""
    options: dict[str, Any] = {"dro_beta": 0.3, "clip_cov_ratio": 0.3, "clip_cov_lb": -0.2, "kl_cov_ratio": 0.3}
    for key in list(changes):
        if hasattr(PolicyLossConfig(), key):
            options[key] = changes.pop(key)
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 1.7} | changes
    return ActorConfig(policy_loss=PolicyLossConfig(**options), **bounds)


@dataclass
class Row:
    """The T response tokens of one sequence."""

    log_probs: np.ndarray
    old_log_probs: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0))
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0))
    token_mask: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))

    def __post_init__(self) -> None:
        n = len(self.log_probs)
        for name in ("log_probs", "old_log_probs", "advantages", "mask", "keys"):
            setattr(self, name, np.array(getattr(self, name), dtype=np.float64))
        for name, default in (("mask", np.ones(n)), ("keys", np.zeros(n)), ("token_mask", np.zeros(n, dtype=bool))):
            if len(getattr(self, name)) != n:
                setattr(self, name, default)


def ratios(advantages: Sequence[float], ratios: Sequence[float], old_log_prob: float = -1.0, **columns: Any) -> Row:
    """A row given by the ratio of each token."""
    old = np.full(len(ratios), old_log_prob)
    return Row(old + np.log(ratios), old, np.array(advantages, dtype=float), **columns)


def random_row(rng: np.random.Generator, length: int) -> Row:
    """Tokens inside and outside of all clip bounds; one row in three has the same advantage throughout, perhaps 0."""
    old = -rng.exponential(1.0, length) - 0.02
    log_probs = np.minimum(old + rng.choice([0.05, 0.6], length) * rng.normal(size=length), -1e-3)
    advantages = rng.normal(size=length)
    if rng.random() < 0.35:
        advantages[:] = rng.choice([0.0, 0.0, 1.5, -0.7])
    return Row(log_probs, old, advantages, keys=rng.random(length))


def candidates(rows: Sequence[Row]) -> Candidates:
    """All trained tokens."""
    columns = ("log_probs", "old_log_probs", "advantages", "keys")
    return Candidates(
        *(np.concatenate([np.zeros(0), *(getattr(row, name)[row.mask > 0] for row in rows)]) for name in columns)
    )


def choose(name: str, rows: Sequence[Row], config: ActorConfig) -> list[Row]:
    """The rows with what the loss's `token_mask_fn` chose among the trained tokens of all of them."""
    loss = get_policy_loss(name)
    if loss.token_mask_fn is None:
        return list(rows)
    chosen = iter(loss.choose_tokens(candidates(rows), config).tolist())
    return [replace(row, token_mask=np.array([m > 0 and next(chosen) for m in row.mask], dtype=bool)) for row in rows]


def counts(rows: Sequence[Row]) -> tuple[float, float]:
    """Arguments of `agg_divisor` if these rows are the whole mini-batch."""
    return float(sum((row.mask > 0).sum() for row in rows)), float(sum((row.mask > 0).any() for row in rows))


@dataclass
class Evaluation:
    per_token: Tensor
    losses: dict[str, float]
    """Aggregation mode to loss."""
    gradients: dict[str, list[np.ndarray]]
    """Aggregation mode to the gradient by the log-probs of each row."""
    sums: dict[str, tuple[float, int]]

    @property
    def gradient(self) -> list[float]:
        """Of the plain sum over tokens, by each log-prob."""
        return np.concatenate(self.gradients["token-sum"]).tolist()


def loss_input(rows: Sequence[Row], log_probs: Tensor | None = None, dtype: torch.dtype = torch.float64) -> LossInput:
    """The rows as one micro-batch; `log_probs` replaces theirs."""

    def column(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0), *(getattr(row, name) for row in rows)])).to(dtype)

    lengths = [len(row.log_probs) for row in rows]
    return LossInput(
        column("log_probs") if log_probs is None else log_probs,
        column("old_log_probs"),
        column("advantages"),
        column("mask"),
        torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths, dtype=torch.int64)),
        len(rows),
        column("token_mask").bool(),
    )


def evaluate(name: str, rows: Sequence[Row], config: ActorConfig, of: tuple[float, float] | None = None) -> Evaluation:
    """The micro-batch `rows` of a mini-batch with the counts `of` (by default it is all of the mini-batch)."""
    data = loss_input(rows)
    data.log_probs.requires_grad_()
    per_token, sums = get_policy_loss(name).function(data, config)
    lengths = np.cumsum([len(row.log_probs) for row in rows])[:-1]
    losses, gradients = {}, {}
    for mode in AGG_MODES:
        part = agg_loss(per_token, data.mask, mode, data.row_index, data.sequences, SCALE_FACTOR)
        loss = part / agg_divisor(mode, *(counts(rows) if of is None else of))
        (gradient,) = torch.autograd.grad(loss, data.log_probs, retain_graph=True)
        losses[mode], gradients[mode] = loss.item(), np.split(gradient.numpy(), lengths)
    return Evaluation(
        per_token.detach(), losses, gradients, {key: (float(total), int(n)) for key, (total, n) in sums.items()}
    )
