"""Estimators, losses, KL, critic and off-policy correction that cannot be, or that mean nothing together.

Part of `checks.py`, which reports every sentence at once.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.advantage import registry as estimators
from pipeline.advantage.estimators import Estimator, get_adv_estimator
from pipeline.config import Config
from pipeline.derived import WITHOUT_RATIO, rollout_correction, uses_critic, uses_policy_scores, why_not_streamed
from pipeline.train.correction import Correction, parse

POLICY_LOSSES = (
    *("vanilla", "gspo", "geo_mean", "cispo", "sapo", "dro"),
    *("dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "gpg", "reinforce"),
)
"""Built-in names of `actor.policy_loss.loss_mode`, as the losses register them (the registry imports torch)."""

CLIPPED_RATIO = ("vanilla", "gspo", "cispo", "clip_cov")
"""Those of them that hold the ratio above 1 - `clip_ratio_low`; for the others it bounds something else or nothing."""

COMPARE_IN_GROUP = (
    *("grpo", "gdpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"),
    *("optimal_token_baseline", "tir_optimal_token_baseline"),
)
"""Built-in estimators that compare a response with the others of its group."""

NEED_NO_GROUP = ("gae", "reinforce_plus_plus", "remax")
"""Built-in estimators that do not."""


def knows_estimator(config: Config) -> bool:
    """Whether `algorithm.adv_estimator` can be found, so that `stages` knows what the run has."""
    try:
        get_adv_estimator(config.algorithm.adv_estimator)
    except ValueError:
        return False
    return True


def problems(config: Config) -> Iterator[str]:
    """One sentence per problem."""
    try:
        estimator = get_adv_estimator(config.algorithm.adv_estimator)
    except ValueError as error:
        yield str(error)
    else:
        yield from _estimator(config, estimator)
        yield from _critic(config, estimator)
    yield from _loss(config)
    yield from _clipping(config)
    yield from _kl(config)
    yield from _correction(config)


def built_in(function: Callable[..., Any]) -> bool:
    """Whether an estimator or loss is one of ours."""
    return function.__module__.startswith("pipeline.")


def _own(key: str, name: str, function: Callable[..., Any]) -> Iterator[str]:
    """Complaints about a function that may be the user's own."""
    if ":" not in name:
        if not built_in(function):
            yield (
                f"{key}={name} is known in this process alone; give the import path, by which every worker finds it: "
                f"{function.__module__}:{name}"
            )
        return
    from pipeline.losses import registry as losses

    others: dict[str, dict[str, Any]] = {
        "algorithm.adv_estimator": losses._POLICY_LOSSES,
        "actor.policy_loss.loss_mode": estimators._ESTIMATORS,
    }
    if any(entry.function is function for entry in others[key].values()):
        yield f"{key}={name} is registered as another kind of function; see docs/extending.md for the two kinds"


def loss_mode(config: Config) -> str:
    """The name of the loss, also where it is given by import path; as it stands where it leads nowhere."""
    mode = config.actor.policy_loss.loss_mode
    if ":" not in mode:
        return mode
    # A function of the user's own: torch is loaded for these alone.
    from pipeline.losses import get_policy_loss

    try:
        return get_policy_loss(mode).name
    except ValueError:
        return mode


def _estimator(config: Config, estimator: Estimator) -> Iterator[str]:
    algorithm, name = config.algorithm, estimator.name
    if name in COMPARE_IN_GROUP and config.rollout.n == 1:
        yield (
            f"rollout.n=1 gives algorithm.adv_estimator={name} groups of one, with no other response to compare with; "
            f"set rollout.n to 2 or more, or take an estimator that needs no group ({', '.join(NEED_NO_GROUP)})"
        )
    if name == "gdpo":
        yield from _gdpo(config)
    yield from _own("algorithm.adv_estimator", algorithm.adv_estimator, estimator.function)
    if algorithm.adv_estimator_kwargs and built_in(estimator.function):
        yield (
            f"algorithm.adv_estimator_kwargs={algorithm.adv_estimator_kwargs}: no built-in estimator reads it, and "
            f"{name} is one; leave it out, or name an estimator of your own"
        )
    if config.trainer.stream_gradients and (reason := why_not_streamed(config)):
        yield f"trainer.stream_gradients=true is not possible here: {reason}; set trainer.stream_gradients=null"
    gap = config.trainer.max_log_prob_gap
    if algorithm.max_staleness > 0 and gap is not None:
        yield (
            f"trainer.max_log_prob_gap={gap:g} with algorithm.max_staleness={algorithm.max_staleness}: rows of older "
            "versions differ from the trainer by what it has learnt since; set trainer.max_log_prob_gap=null "
            "(training/rollout_log_probs_diff_max shows the gap)"
        )


def _gdpo(config: Config) -> Iterator[str]:
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if not keys:
        yield (
            "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys, the rewards it normalises one by one; name "
            "parts that the reward function returns, such as [acc,format]"
        )
    if weights is not None and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights={weights} has length {len(weights)} and "
            f"algorithm.gdpo_reward_keys={keys} has length {len(keys)}; give one weight for each key, or null for "
            "equal weights"
        )
    if weights is not None and not (all(map(math.isfinite, weights)) and any(weights)):
        yield f"algorithm.gdpo_reward_weights={weights} must be finite numbers, not all of them 0"
    if len(set(keys)) < len(keys):
        yield f"algorithm.gdpo_reward_keys={keys} names a part twice; a weight of 2 does what that would"
    if config.algorithm.use_kl_in_reward:
        yield (
            "algorithm.use_kl_in_reward=true does nothing with algorithm.adv_estimator=gdpo, which reads the parts of "
            "the reward and not its sum; set it to false, and actor.use_kl_loss=true to hold the policy"
        )


def _critic(config: Config, estimator: Estimator) -> Iterator[str]:
    critic, name = config.critic, estimator.name
    if critic.enable is False and "values" in estimator.needs:
        yield (
            f"algorithm.adv_estimator={name} reads values and critic.enable=false leaves no critic to give them; set "
            "critic.enable=null, or take an estimator without values (grpo, rloo, reinforce_plus_plus)"
        )
    if critic.warmup > 0 and not uses_critic(config):
        yield (
            f"critic.warmup={critic.warmup} holds the policy back while a critic is trained and there is none with "
            f"algorithm.adv_estimator={name}; set critic.warmup=0"
        )


def _loss(config: Config) -> Iterator[str]:
    options, mode = config.actor.policy_loss, loss_mode(config)
    if options.loss_mode not in POLICY_LOSSES:
        from pipeline.losses import get_policy_loss

        try:
            function = get_policy_loss(options.loss_mode).function
        except ValueError as error:
            yield str(error)
        else:
            yield from _own("actor.policy_loss.loss_mode", options.loss_mode, function)
    if options.kwargs and mode in POLICY_LOSSES:
        yield (
            f"actor.policy_loss.kwargs={options.kwargs}: no built-in loss reads it, and {mode} is one; leave it out, "
            "or name a loss of your own"
        )
    if mode == "dro" and options.dro_beta is None:
        yield (
            "actor.policy_loss.loss_mode=dro needs actor.policy_loss.dro_beta, the weight of the squared log ratio; "
            "give a number above 0, 0.05 for example"
        )
    if not options.clip_cov_lb < options.clip_cov_ub:
        yield (
            f"actor.policy_loss.clip_cov_lb={options.clip_cov_lb:g} must be below "
            f"actor.policy_loss.clip_cov_ub={options.clip_cov_ub:g}; no covariance lies between them"
        )


def _clipping(config: Config) -> Iterator[str]:
    actor = config.actor
    low = "clip_ratio" if actor.clip_ratio_low is None else "clip_ratio_low"
    high = "clip_ratio" if actor.clip_ratio_high is None else "clip_ratio_high"
    mode = loss_mode(config)
    if not actor.clip_low > 0:
        yield f"actor.{low}={actor.clip_low:g} must be above 0"
    elif actor.clip_low > 1 and mode in CLIPPED_RATIO:
        yield (
            f"actor.{low}={actor.clip_low:g} must be at most 1 with actor.policy_loss.loss_mode={mode}: the lower "
            f"bound would be 1 - {actor.clip_low:g} = {1 - actor.clip_low:g}; 1 leaves the ratio without a lower bound"
        )
    if not actor.clip_high > 0 and high != low:
        yield f"actor.{high}={actor.clip_high:g} must be above 0"
    if not actor.clip_ratio_c > 1:
        yield (
            f"actor.clip_ratio_c={actor.clip_ratio_c} must be above 1: it bounds the ratio of tokens with a negative "
            "advantage, and a ratio of 1 is no change"
        )


def _kl(config: Config) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    control = algorithm.kl_ctrl
    limits = []
    if rollout.top_p < 1 or rollout.top_k > 0:
        limits.append(f"rollout.top_p={rollout.top_p:g} and rollout.top_k={rollout.top_k}")
    if rollout.min_tokens > 0:
        # No token that ends a response is kept before.
        limits.append(f"rollout.min_tokens={rollout.min_tokens}")
    if truncated := " and ".join(limits):
        if config.actor.old_log_probs == "engine":
            yield (
                f"actor.old_log_probs=engine with {truncated}: the engine's log-probs are renormalised over the "
                "tokens it keeps, the trainer's are not, so their ratio is not 1 before the first update; set "
                "actor.old_log_probs=recompute or sample from all tokens (rollout.top_p=1 rollout.top_k=-1 "
                "rollout.min_tokens=0)"
            )
        if algorithm.use_kl_in_reward:
            yield (
                f"algorithm.use_kl_in_reward=true with {truncated}: the engine's log-probs are renormalised over the "
                "tokens it keeps, the reference's are not, so even equal policies would have a KL; set "
                "algorithm.use_kl_in_reward=false and actor.use_kl_loss=true, or sample from all tokens "
                "(rollout.top_p=1 rollout.top_k=-1 rollout.min_tokens=0)"
            )
        if uses_policy_scores(config):
            yield (
                f"algorithm.adv_estimator={algorithm.adv_estimator} with {truncated}: it weighs the engine's "
                "probabilities, which are renormalised over the tokens it keeps, against sums over the whole "
                "vocabulary; sample from all tokens (rollout.top_p=1 rollout.top_k=-1 rollout.min_tokens=0)"
            )
    if control.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield (
            "algorithm.kl_ctrl.type=adaptive steers the KL in the reward and algorithm.use_kl_in_reward=false; set "
            "that to true, or the type to fixed (the KL in the loss has the fixed weight actor.kl_loss_coef)"
        )
    elif control.type == "adaptive" and control.kl_coef == 0:
        yield (
            "algorithm.kl_ctrl.kl_coef=0 with algorithm.kl_ctrl.type=adaptive: the controller multiplies the "
            "coefficient, and 0 stays 0; begin above 0"
        )


def _correction(config: Config) -> Iterator[str]:
    settings, mode = rollout_correction(config), loss_mode(config)
    try:
        correction = parse(settings)
    except ValueError as error:
        yield str(error)
        return
    yield from _thresholds(correction)
    if config.actor.old_log_probs != "engine" or settings.rollout_is == "none":
        return
    if mode in POLICY_LOSSES and mode not in WITHOUT_RATIO:
        yield (
            f"algorithm.rollout_correction.rollout_is={settings.rollout_is} with actor.old_log_probs=engine and "
            f"actor.policy_loss.loss_mode={mode}: the loss's own ratio, current policy / engine's, already is that "
            "weight, which would count twice; set rollout_is=none, actor.old_log_probs=recompute, or a loss without "
            "a ratio (actor.policy_loss.loss_mode=reinforce)"
        )
    if settings.rollout_is_batch_normalize:
        yield (
            "algorithm.rollout_correction.rollout_is_batch_normalize=true with actor.old_log_probs=engine: the mean "
            "of the weights is not known before the forward pass that gives them; set it to false, or "
            "actor.old_log_probs=recompute"
        )


def _thresholds(correction: Correction) -> Iterator[str]:
    """Bounds that would leave nothing to train where engine and trainer agree, and every ratio is 1."""
    prefix, quotes = "algorithm.rollout_correction", "(in YAML two bounds need quotes: 0.5_2 is the number 0.52 there)"
    bounds = [(f"rollout_rs_threshold of {r.name}", r.low, r.high) for r in correction.rules if r.kind == "k1"]
    if correction.level is not None and correction.low is None and correction.high < 1:
        yield (
            f"{prefix}.rollout_is_threshold={correction.high:g} would cap the weight of every token, also where the "
            f"policies agree and it is 1; give 1 or more, or two bounds {quotes}"
        )
    elif correction.level is not None and correction.low is not None:
        bounds.append(("rollout_is_threshold", correction.low, correction.high))
    for name, low, high in bounds:
        if not low <= 1 <= high:
            yield (
                f"{prefix}.{name} keeps ratios from {low:g} to {high:g}, without 1: nothing would train where engine "
                "and trainer agree; put the lower bound below 1 and the upper one above"
            )
