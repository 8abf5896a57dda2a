"""Policy losses: pure functions from log-probs and advantages to one loss per token.

A loss is `f(data: LossInput, config: ActorConfig) -> (per_token, sums)`. The facts about a built-in loss, the fields of
`PolicyLoss`, are in `pipeline/catalogue.py`; a user's loss states them in `@register_policy_loss("name", ...)`.

1. Tokens are flat: a micro-batch is the response tokens of its sequences one after the other, `[N]`, without padding. A
   sequence is the whole response of a row, with all contexts of a multi-turn episode. `row_index [N]` numbers the
   sequence of each token. A micro-batch holds whole sequences, unless the loss has the fact `per_token`.
2. A loss returns one number per token; `agg_loss` divides them by counts of the whole global mini-batch. So neither
   loss nor gradient depends on micro-batches, packs or ranks. A loss of whole sequences gives every token of a sequence
   the value of the sequence.
3. A loss that compares tokens over the whole mini-batch (`clip_cov`, `kl_cov`) has a `token_mask_fn`, which gets all of
   these tokens before the first backward pass.
4. A loss that compares the two responses of a pair (`online_dpo`) has the fact `of_pairs`. The margin of each pair is
   computed before the first backward pass, so the two responses may be in different micro-batches.
5. Metrics are sums with their counts, which merge exactly.
6. Masked tokens are replaced before any arithmetic, so a NaN there reaches neither loss nor gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.catalogue import POLICY_LOSSES, PolicyLoss
from pipeline.config.learner import ActorConfig
from pipeline.registry import register

MAX_LOG_RATIO = 20.0
"""Largest absolute log ratio, in nats: log ratios are clamped, so that `exp` stays finite (e^20 is about 4.9e8)."""

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metric name to (sum, count), both detached scalars; the metric is total sum / total count."""


@dataclass(frozen=True)
class LossInput:
    """Tokens of one micro-batch: N tokens of S sequences. Log-probs are in nats."""

    log_probs: Tensor
    """[N] log-probs under the trained policy, with gradient."""
    old_log_probs: Tensor
    """[N] log-probs under the old policy, the denominator of the ratio."""
    advantages: Tensor
    """[N] advantages of the tokens."""
    mask: Tensor
    """[N] 1 if the token trains, else 0 (any dtype)."""
    row_index: Tensor
    """[N] int64, sequence number of each token, from 0."""
    sequences: int
    """Number of sequences S; a sequence may have no tokens."""
    token_mask: Tensor | None = None
    """[N] bool, true for tokens that `token_mask_fn` chose; None for losses without a `token_mask_fn`."""
    pair_margin: Tensor | None = None
    """[N] margin of the pair that the token belongs to, in nats, for losses with `of_pairs`; None for others. With
    h(y) = log policy(y) - log reference(y), summed over the tokens of response y, under the policy before the step, the
    margin is h(better response) - h(worse response)."""

    @property
    def keep(self) -> Tensor:
        """[N] bool, true for tokens that train."""
        return self.mask > 0

    def masked(self, values: Tensor) -> Tensor:
        """[N] `values`, with zeros for masked tokens."""
        return torch.where(self.keep, values, values.new_zeros(()))

    @property
    def log_ratio(self) -> Tensor:
        """[N] log_probs - old_log_probs, clamped to plus or minus `MAX_LOG_RATIO`; 0 for masked tokens."""
        return self.masked(self.log_probs - self.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[S] mean of `values` over the unmasked tokens of each sequence; 0 for a sequence without any."""
        total = values.new_zeros(self.sequences).index_add(0, self.row_index, self.masked(values))
        count = values.new_zeros(self.sequences).index_add(0, self.row_index, self.keep.to(values.dtype))
        return total / count.clamp(min=1.0)


LossFunction = Callable[[LossInput, ActorConfig], tuple[Tensor, Sums]]
"""A policy loss. Returns losses [N], one per token and 0 for masked tokens, and metrics as in `Sums`."""


def token_sums(data: LossInput, **events: Tensor) -> Sums:
    """Count metrics of a policy loss, as sums and counts over the unmasked tokens.

    `ppo_kl` is the mean of old_log_probs - log_probs, clamped like `log_ratio`: the k1 estimate of KL(old || new).

    Args:
        data: the micro-batch.
        events: by the metric's name, [N] bool; the metric is the fraction of unmasked tokens with a true entry.
    """
    count = data.keep.sum()
    sums: Sums = {name: ((event & data.keep).sum(), count) for name, event in events.items()}
    sums["ppo_kl"] = (-data.log_ratio.detach().double().sum(), count)
    return sums


@dataclass(frozen=True)
class Candidates:
    """All M trained tokens of a global mini-batch, of all ranks, in any order, for `token_mask_fn`."""

    log_probs: np.ndarray
    """[M] float64, log-probs under the policy before the step."""
    old_log_probs: np.ndarray
    """[M] float64, log-probs under the old policy."""
    advantages: np.ndarray
    """[M] float64, advantages of the tokens."""
    keys: np.ndarray
    """[M] float64, uniform random numbers in [0, 1). They depend only on the run's seed, the step and the token, so a
    choice by them is the same for any number of ranks."""


TokenMaskFunction = Callable[[Candidates, ActorConfig], np.ndarray]
"""Function that chooses among the M tokens of `Candidates`. Returns [M] bool, true for chosen tokens."""


def register_policy_loss(name: str, **facts: Any) -> Callable[[LossFunction], LossFunction]:
    """Return a decorator that registers a loss of yours as `actor.policy_loss.loss_mode=name`.

    Args:
        name: value of the setting.
        facts: fields of `catalogue.PolicyLoss`.

    Raises ValueError if the name belongs to another function, TypeError for a fact that is not a field.
    """

    def decorate(function: LossFunction) -> LossFunction:
        register("policy loss", POLICY_LOSSES, PolicyLoss(name, function, **facts))
        return function

    return decorate


def checked(loss: PolicyLoss, data: LossInput, returned: Any) -> tuple[Tensor, Sums]:
    """Return `returned`, the return value of `loss`, after a check that it is a pair of losses [N] and `Sums`.

    Raises ValueError if it is anything else.
    """
    name, tokens = f"policy loss {loss.name!r}", len(data.log_probs)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise ValueError(
            f"{name} returned a {type(returned).__name__}; a pair was expected: losses, one for each of the {tokens} "
            "tokens, and a dict of metrics (it may be empty)"
        )
    per_token, sums = returned
    shape = tuple(per_token.shape) if isinstance(per_token, Tensor) else type(per_token).__name__
    if shape != (tokens,):
        raise ValueError(
            f"{name} returned losses of shape {shape}; one number for each of the {tokens} tokens was expected "
            "(actor.loss_agg_mode averages them)"
        )
    for metric, value in sums.items():
        if not (isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, Tensor) for part in value)):
            raise ValueError(
                f"{name} returned metric {metric!r} as {value!r}; a pair of tensors (sum, count) is needed"
            )
    return per_token, sums
