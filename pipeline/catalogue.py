"""Policy losses and advantage estimators: each name with all facts about it that checks, settings and docs need.

A new algorithm is one function in a file of its own and one entry in `POLICY_LOSSES` or `ESTIMATORS`. Functions of a
user state the same facts in their decorators, `register_policy_loss` and `register_adv_est`. An entry names its
function by its import path, so this module loads neither torch nor any algorithm.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pipeline.registry import Entry, look_up, resolved


@dataclass(frozen=True)
class PolicyLoss(Entry):
    """One value of `actor.policy_loss.loss_mode`."""

    ratio: Literal["token", "sequence", "none"] | None = None
    """Probability ratio to the old policy that weighs the tokens: of the `token`, of the `sequence`, or `none`; None if
    a user's function does not state it."""
    clips: bool = False
    """True if the ratio is clipped below at 1 - `actor.clip_ratio_low`."""
    truncates: bool = False
    """True if the ratio is truncated at `actor.clip_ratio_c` for advantages of any sign."""
    reads: tuple[str, ...] = ()
    """Keys of `actor.policy_loss` that the loss reads. Those with the default null must be set."""
    zero_without_advantage: bool = False
    """True if rows whose advantages are all 0 have neither loss nor gradient, so they may be skipped."""
    per_token: bool = False
    """True if a token's loss depends on no other token, so the contexts of a row may be in different passes."""
    of_pairs: bool = False
    """True if the loss compares two responses of each group: one with an advantage above 0, one with an advantage below
    0. Other rows do not train. The loss reads `pair_margin`, and so the reference."""
    token_mask_fn: Callable[..., Any] | str | None = None
    """Function, or its import path, that chooses tokens from the whole mini-batch; see `losses.TokenMaskFunction`."""

    @property
    def choose_tokens(self) -> Callable[..., Any]:
        """The function of `token_mask_fn`."""
        assert self.token_mask_fn is not None
        return resolved(self.token_mask_fn)


NEEDS = ("values", "baselines", "sum_pi_squared", "parts")
"""Inputs of estimators beyond rewards; each brings its stage or its model."""


@dataclass(frozen=True)
class Estimator(Entry):
    """One value of `algorithm.adv_estimator`."""

    scope: str = "group"
    """Rows that the estimator needs together: `group`, the samples of one prompt, or `batch`, all rows of an
    iteration."""
    needs: tuple[str, ...] = ()
    """Inputs from `NEEDS` that the estimator reads."""
    compares: Literal["responses", "turns", "places", "trained places"] | None = None
    """Parts of a response that are compared with other responses of the group: whole responses, turns, or tokens at the
    same position, counted with or without the tokens of tools. None if nothing is compared."""
    reads: tuple[str, ...] = ()
    """Keys of `algorithm` that the estimator reads."""
    marks_pairs: bool = False
    """True if the estimator marks the two responses of each group that a loss of pairs compares."""

    def __post_init__(self) -> None:
        if self.scope not in ("group", "batch"):
            raise ValueError(f"the scope of estimator {self.name!r} is {self.scope!r}; it must be 'group' or 'batch'")
        if unknown := set(self.needs) - set(NEEDS):
            raise ValueError(f"estimator {self.name!r} needs {sorted(unknown)}; it may need {', '.join(NEEDS)}")


T = TypeVar("T", bound=Entry)


def _by_name(*entries: T) -> dict[str, T]:
    return {entry.name: entry for entry in entries}


_TOKENS: dict[str, Any] = {"zero_without_advantage": True, "per_token": True}
_PPO, _SMOOTH = "pipeline.losses.ppo", "pipeline.losses.smooth"
_PLAIN, _SEQUENCE, _COVARIANCE = "pipeline.losses.plain", "pipeline.losses.sequence", "pipeline.losses.covariance"
_CLIP_COV_KEYS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")

POLICY_LOSSES = _by_name(
    PolicyLoss("vanilla", f"{_PPO}:vanilla", ratio="token", clips=True, **_TOKENS),
    PolicyLoss("gspo", f"{_SEQUENCE}:gspo", ratio="sequence", clips=True, zero_without_advantage=True),
    PolicyLoss("geo_mean", f"{_SEQUENCE}:geo_mean", ratio="sequence", zero_without_advantage=True),
    PolicyLoss("cispo", f"{_PPO}:cispo", ratio="token", clips=True, **_TOKENS),
    PolicyLoss("sapo", f"{_SMOOTH}:sapo", ratio="token", reads=("tau_pos", "tau_neg"), **_TOKENS),
    PolicyLoss("dro", f"{_SMOOTH}:dro", ratio="none", reads=("dro_beta",), per_token=True),
    PolicyLoss("dppo_tv", f"{_PPO}:dppo_tv", ratio="token", truncates=True, **_TOKENS),
    PolicyLoss("dppo_kl", f"{_PPO}:dppo_kl", ratio="token", truncates=True, **_TOKENS),
    PolicyLoss(
        *("clip_cov", f"{_COVARIANCE}:clip_cov"),
        ratio="token",
        clips=True,
        reads=_CLIP_COV_KEYS,
        token_mask_fn=f"{_COVARIANCE}:clip_cov_mask",
        **_TOKENS,
    ),
    PolicyLoss(
        *("kl_cov", f"{_COVARIANCE}:kl_cov"),
        ratio="token",
        reads=("kl_cov_ratio", "ppo_kl_coef"),
        per_token=True,
        token_mask_fn=f"{_COVARIANCE}:kl_cov_mask",
    ),
    PolicyLoss("gpg", f"{_PLAIN}:gpg", ratio="none", **_TOKENS),
    PolicyLoss("reinforce", f"{_PLAIN}:reinforce", ratio="none", **_TOKENS),
    PolicyLoss(
        *("online_dpo", "pipeline.losses.pairs:online_dpo"),
        ratio="none",
        reads=("dpo_beta",),
        zero_without_advantage=True,
        of_pairs=True,
    ),
)

_OUTCOME, _RETURNS, _PLACES = (
    "pipeline.advantage.outcome",
    "pipeline.advantage.returns",
    "pipeline.advantage.token_baseline",
)
_BY_STD = ("norm_adv_by_std_in_grpo",)
_DISCOUNTS = ("gamma", "turn_gamma")
_PARTS = ("gdpo_reward_keys", "gdpo_reward_weights")
_ZERO_TAIL: dict[str, Any] = {"needs": ("sum_pi_squared",), "reads": ("handle_zero_tail",)}

ESTIMATORS = _by_name(
    Estimator("gae", f"{_RETURNS}:gae", "batch", ("values",), reads=("lam", *_DISCOUNTS)),
    Estimator("reinforce_plus_plus", f"{_RETURNS}:reinforce_plus_plus", "batch", reads=_DISCOUNTS),
    Estimator("remax", f"{_RETURNS}:remax", needs=("baselines",), reads=_DISCOUNTS),
    Estimator("grpo", f"{_OUTCOME}:grpo", compares="responses", reads=_BY_STD),
    Estimator("turn_grpo", "pipeline.advantage.turns:turn_grpo", compares="turns", reads=(*_BY_STD, "turn_gamma")),
    Estimator("gdpo", f"{_OUTCOME}:gdpo", "batch", ("parts",), compares="responses", reads=(*_BY_STD, *_PARTS)),
    Estimator("grpo_passk", f"{_OUTCOME}:grpo_passk", compares="responses", reads=_BY_STD),
    Estimator("rloo", f"{_OUTCOME}:rloo", compares="responses"),
    Estimator("opo", f"{_OUTCOME}:opo", compares="responses"),
    Estimator("gpg", f"{_OUTCOME}:gpg", "batch", compares="responses", reads=("f_norm",)),
    Estimator(
        "reinforce_plus_plus_baseline", f"{_OUTCOME}:reinforce_plus_plus_baseline", "batch", compares="responses"
    ),
    Estimator("optimal_token_baseline", f"{_PLACES}:optimal_token_baseline", compares="places", **_ZERO_TAIL),
    Estimator(
        *("tir_optimal_token_baseline", f"{_PLACES}:tir_optimal_token_baseline"),
        compares="trained places",
        **_ZERO_TAIL,
    ),
    Estimator("online_dpo", f"{_OUTCOME}:online_dpo", compares="responses", marks_pairs=True),
)


def get_policy_loss(name: str) -> PolicyLoss:
    """Return the loss of `actor.policy_loss.loss_mode`: a name of `POLICY_LOSSES` or an import path.

    A function without the decorator states no facts.

    Raises ValueError as `look_up` does.
    """
    return look_up("actor.policy_loss.loss_mode", name, POLICY_LOSSES, PolicyLoss)


def get_adv_estimator(name: str) -> Estimator:
    """Return the estimator of `algorithm.adv_estimator`: a name of `ESTIMATORS` or an import path.

    A function without the decorator has scope `group` and needs nothing.

    Raises ValueError as `look_up` does.
    """
    return look_up("algorithm.adv_estimator", name, ESTIMATORS, Estimator)
