"""Catalogue of policy losses and advantage estimators: each name with the properties that checks, settings and docs
need.

A new algorithm needs a function in its own file and an entry in `POLICY_LOSSES` or `ESTIMATORS`. User functions declare
the same properties in their decorators, `register_policy_loss` and `register_adv_est`. An entry holds the import path
of its function, so this module loads neither torch nor any algorithm.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pipeline.registry import Entry, look_up, resolved


@dataclass(frozen=True)
class PolicyLoss(Entry):
    """A policy loss (value of `actor.policy_loss.loss_mode`) and its properties."""

    ratio: Literal["token", "sequence", "none"] | None = None
    """Kind of the ratio of current to old policy that weighs tokens: per `token`, per `sequence` (response), or `none`;
    None if a user function does not declare it."""
    clips: bool = False
    """True if the ratio is clipped below at 1 - `actor.clip_ratio_low`."""
    truncates: bool = False
    """True if the ratio is truncated at `actor.clip_ratio_c`, for positive and negative advantages."""
    reads: tuple[str, ...] = ()
    """Keys of `actor.policy_loss` that the loss reads. Keys with the default null must be set."""
    zero_without_advantage: bool = False
    """True if a row with only zero advantages has neither loss nor gradient, so it may be skipped."""
    per_token: bool = False
    """True if the loss of a token does not depend on other tokens, so the sequences of an episode may be in different
    forward passes."""
    of_pairs: bool = False
    """True if the loss compares two responses of each group: one with an advantage above 0, one with an advantage below
    0. Other rows are not trained on. Such a loss needs the reference policy (`pair_margin`)."""
    token_mask_fn: Callable[..., Any] | str | None = None
    """Function, or its import path, that selects tokens of the whole mini-batch; see `losses.TokenMaskFunction`."""

    @property
    def choose_tokens(self) -> Callable[..., Any]:
        """The function that `token_mask_fn` names, imported if necessary."""
        assert self.token_mask_fn is not None
        return resolved(self.token_mask_fn)


NEEDS = ("values", "baselines", "sum_pi_squared", "parts")
"""Inputs that estimators may need in addition to rewards. Each makes the run compute it, with a further stage or
model."""


@dataclass(frozen=True)
class Estimator(Entry):
    """An advantage estimator (value of `algorithm.adv_estimator`) and its properties."""

    scope: str = "group"
    """Rows that the estimator needs at once: `group`, all responses to one prompt, or `batch`, all rows of an
    iteration."""
    needs: tuple[str, ...] = ()
    """Inputs in `NEEDS` that the estimator reads."""
    compares: Literal["responses", "turns", "places", "trained places"] | None = None
    """Unit that the estimator compares within a group: whole `responses`, `turns`, or tokens at the same position
    (`places`; in `trained places` only the policy's tokens count). None if it compares nothing."""
    reads: tuple[str, ...] = ()
    """Keys of `algorithm` that the estimator reads."""
    marks_pairs: bool = False
    """True if the estimator chooses the two responses of each group for a loss with `of_pairs`."""

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
    Estimator("zero", "pipeline.advantage.zero:zero"),
    Estimator("online_dpo", f"{_OUTCOME}:online_dpo", compares="responses", marks_pairs=True),
)


def get_policy_loss(name: str) -> PolicyLoss:
    """Return the policy loss `name`, a key of `POLICY_LOSSES` or an import path.

    A user function without the decorator has the default properties. Raises ValueError if the name is unknown.
    """
    return look_up("actor.policy_loss.loss_mode", name, POLICY_LOSSES, PolicyLoss)


def get_adv_estimator(name: str) -> Estimator:
    """Return the advantage estimator `name`, a key of `ESTIMATORS` or an import path.

    A user function without the decorator has the scope `group` and needs only rewards. Raises ValueError if the name is
    unknown.
    """
    return look_up("algorithm.adv_estimator", name, ESTIMATORS, Estimator)
