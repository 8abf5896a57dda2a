"""Policy losses: pure functions from log-probs and advantages to one loss per token.

A loss is `f(data: LossInput, config: ActorConfig) -> (per_token, sums)` under `@register_policy_loss("name")`.
Chosen, and why:

1. Tokens are flat. A micro-batch is the response tokens of its sequences one after the other, `[N]`, and
   `row_index [N]` says which of the S sequences a token belongs to. Sequences are never split. Padding does not exist
   here, so it cannot change a loss.
2. A loss gives numbers per token and leaves the aggregation to `agg_loss`, which divides by counts of the whole global
   mini-batch: how rows are split over micro-batches, packs and ranks changes neither loss nor gradient, in any mode. A
   loss of whole sequences gives each token of the sequence the sequence's value.
3. A loss that compares a token with all others of the mini-batch (`clip_cov`, `kl_cov`) says so with a
   `token_mask_fn`, which sees all of them at once, before the first backward pass.
4. Metrics come as sums with their count, so that they can be merged exactly.
5. Masked tokens are replaced before any arithmetic, so a NaN behind the mask reaches neither loss nor gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.registry import look_up

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to plus or minus this, so that `exp` stays finite (e^20 is about 4.9e8)."""

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metric name to (sum, count), both detached scalars; the metric is the total of sums over the total of counts."""


@dataclass(frozen=True)
class LossInput:
    """The tokens of one micro-batch: N tokens of S sequences."""

    log_probs: Tensor
    """[N] under the policy that is trained; carries the gradient."""
    old_log_probs: Tensor
    """[N] under the policy the ratio is taken against."""
    advantages: Tensor
    """[N], one per token."""
    mask: Tensor
    """[N] 1 where the token is trained on, else 0 (any dtype)."""
    row_index: Tensor
    """[N] int64, sequence number of each token, from 0."""
    sequences: int
    """S; a sequence may have no tokens."""
    token_mask: Tensor | None = None
    """[N] bool, what the loss's `token_mask_fn` chose; None for losses without one."""

    @property
    def keep(self) -> Tensor:
        """[N] bool, the mask."""
        return self.mask > 0

    def masked(self, values: Tensor) -> Tensor:
        """[N] `values` with zeros behind the mask, whatever stood there."""
        return torch.where(self.keep, values, values.new_zeros(()))

    @property
    def log_ratio(self) -> Tensor:
        """[N] log_probs - old_log_probs, clamped to plus or minus `MAX_LOG_RATIO`; 0 behind the mask."""
        return self.masked(self.log_probs - self.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[S] mean of `values` over the trained tokens of each sequence; 0 for a sequence without any."""
        total = values.new_zeros(self.sequences).index_add(0, self.row_index, self.masked(values))
        count = values.new_zeros(self.sequences).index_add(0, self.row_index, self.keep.to(values.dtype))
        return total / count.clamp(min=1.0)


LossFunction = Callable[[LossInput, ActorConfig], tuple[Tensor, Sums]]
"""Returns per-token losses [N], 0 where masked, and `{"pg_clipfrac": (sum, count), ...}`."""


@dataclass(frozen=True)
class Candidates:
    """All M trained tokens of a global mini-batch, over all ranks, in any order; numpy, for `token_mask_fn`."""

    log_probs: np.ndarray
    """[M] float64, under the policy as it stands before the mini-batch's step."""
    old_log_probs: np.ndarray
    """[M] float64."""
    advantages: np.ndarray
    """[M] float64."""
    keys: np.ndarray
    """[M] float64, a uniform random number in [0, 1) for each token, which depends on the run's seed, the step and the
    token alone: choosing by it is a random choice that no split of the work changes."""


TokenMaskFunction = Callable[[Candidates, ActorConfig], np.ndarray]
"""Returns [M] bool."""


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss."""

    name: str
    function: LossFunction
    token_mask_fn: TokenMaskFunction | None = None
    zero_without_advantage: bool = False
    """A row whose advantages are all 0 adds neither loss nor gradient, so such rows may be left out."""


_POLICY_LOSSES: dict[str, PolicyLoss] = {}


def register_policy_loss(
    name: str, token_mask_fn: TokenMaskFunction | None = None, zero_without_advantage: bool = False
) -> Callable[[LossFunction], LossFunction]:
    """Decorator that makes a loss known as `actor.policy_loss.loss_mode=name`.

    Raises:
        ValueError: the name is taken by another function.
    """

    def register(function: LossFunction) -> LossFunction:
        if name in _POLICY_LOSSES and _POLICY_LOSSES[name].function is not function:
            raise ValueError(f"policy loss {name!r} is registered twice; give the second one another name")
        _POLICY_LOSSES[name] = PolicyLoss(name, function, token_mask_fn, zero_without_advantage)
        return function

    return register


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss of `actor.policy_loss.loss_mode`: a registered name or an import path `package.module:function`.

    Raises:
        ValueError: no such name (the sentence gives the nearest), or the import path leads nowhere.
    """
    return look_up("actor.policy_loss.loss_mode", name, _POLICY_LOSSES, PolicyLoss)


def checked(loss: PolicyLoss, data: LossInput, returned: Any) -> tuple[Tensor, Sums]:
    """What a loss returned, if it has the form of a `LossFunction`'s.

    Raises:
        ValueError: it is no pair of losses [N] and sums.
    """
    name = f"policy loss {loss.name!r}"
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise ValueError(
            f"{name} returned a {type(returned).__name__}; a pair was expected: losses, one for each of the "
            f"{len(data.log_probs)} tokens, and a dict of metrics (it may be empty)"
        )
    per_token, sums = returned
    shape = tuple(per_token.shape) if isinstance(per_token, Tensor) else type(per_token).__name__
    if shape != tuple(data.log_probs.shape):
        raise ValueError(
            f"{name} returned losses of shape {shape}; one number for each of the {len(data.log_probs)} tokens was "
            "expected, which are averaged afterwards as actor.loss_agg_mode says"
        )
    for metric, value in sums.items():
        if not (isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, Tensor) for part in value)):
            raise ValueError(
                f"{name} returned metric {metric!r} as {value!r}; a pair of tensors (sum, count) is needed"
            )
    return per_token, sums
