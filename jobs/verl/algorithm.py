"""Rules for advantages, losses and the off-policy correction: where verl's key means something else than ours."""

from jobs.verl.state import State

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
_AGGREGATED = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
"""Losses for which verl passes over `loss_agg_mode`, and how it aggregates them."""

_WITHOUT_RATIO = ("gpg", "dro", "reinforce")
_CLIP = 0.2


def estimator(state: State) -> None:
    """verl's faster versions of an estimator are the estimator."""
    name = state.get("algorithm.adv_estimator")
    if ":" in name:
        state.drop("algorithm.adv_estimator")
        state.leave(
            "algorithm.adv_estimator", "verl knows estimators by name; see docs/extending.md for one of your own"
        )
    elif name in _ESTIMATORS:
        state.set("algorithm.adv_estimator", _ESTIMATORS[name])
        single = "the bare reward" if name == "grpo_vectorized" else "0, too"
        state.note(
            f"algorithm.adv_estimator={name} is {_ESTIMATORS[name]} here; a response that is alone in its group has "
            f"advantage 0 (in verl {single})"
        )


def kl(state: State) -> None:
    """Names of KL estimates, and a controller without a KL to control."""
    for section, key in (("algorithm", "kl_penalty"), (_ACTOR, "kl_loss_type")):
        ours = f"{section.rpartition('.')[2]}.{key}"
        if state.get(ours).startswith("full"):
            state.drop(ours)
            state.leave(f"{section}.{key}", "the KL over the whole vocabulary is not built (nor does verl compute it)")
    kind = state.get("algorithm.kl_penalty")
    if kind.endswith("+"):
        state.set("algorithm.kl_penalty", kind.rstrip("+"))
        state.note(f"algorithm.kl_penalty={kind} is {kind.rstrip('+')}: the two differ in the gradient of a loss alone")
    if state.get("algorithm.use_kl_in_reward"):
        state.note(
            "algorithm.use_kl_in_reward=true: the KL compares the log-probs that the engine sampled with to the "
            "reference's, in verl those that the trainer recomputes"
        )
    if state.get("algorithm.kl_ctrl.type") == "adaptive" and not state.get("algorithm.use_kl_in_reward"):
        state.drop("algorithm.kl_ctrl.type")
        state.leave("algorithm.kl_ctrl.type", "there is no KL in the reward to control (algorithm.use_kl_in_reward)")


def clipping(state: State) -> None:
    """In verl both bounds are 0.2 unless they are given, whatever `clip_ratio` is; here they follow it."""
    low = state.get("actor.clip_ratio_low")
    if state.get("actor.policy_loss.loss_mode") == "cispo" and low is not None and low > 1:
        state.set("actor.clip_ratio_low", 1.0)
        state.note(f"actor.clip_ratio_low={low:g} is 1 here: any more leaves CISPO's weight without a lower bound, too")
    ratio = state.get("actor.clip_ratio")
    missing = [side for side in ("low", "high") if f"actor.clip_ratio_{side}" not in state.values]
    # A bound that is given as null follows clip_ratio in verl, too.
    missing = [side for side in missing if f"{_ACTOR}.clip_ratio_{side}" not in state.given]
    if ratio == _CLIP or not missing:
        return
    for side in missing:
        state.values[f"actor.clip_ratio_{side}"] = _CLIP
        state.defaults.add(f"actor.clip_ratio_{side}")
    bounds = " and ".join(f"actor.clip_ratio_{side}" for side in missing)
    state.note(
        f"actor.clip_ratio={ratio} has no effect in verl on bounds that are not given, which are {_CLIP}; so are "
        f"{bounds} here: remove them to clip at {ratio}"
    )


def loss(state: State) -> None:
    """Names of losses, and how verl aggregates them."""
    mode = state.get("actor.policy_loss.loss_mode").replace("-", "_")
    state.set("actor.policy_loss.loss_mode", mode)
    if ":" in mode:
        state.drop("actor.policy_loss.loss_mode")
        state.leave(f"{_ACTOR}.policy_loss.loss_mode", "verl knows losses by name; see docs/extending.md for your own")
    token_level = state.given.get(f"{_ACTOR}.use_token_level_loss")
    if token_level is not None and f"{_ACTOR}.loss_agg_mode" not in state.given:
        state.set("actor.loss_agg_mode", "token-mean" if token_level else "seq-mean-token-mean")
    forced = _AGGREGATED.get(mode)
    if forced and state.get("actor.loss_agg_mode") != forced:
        state.set("actor.loss_agg_mode", forced)
        state.note(
            f"verl aggregates {mode} as {forced}, whatever actor.loss_agg_mode is; that key decides here, for KL and "
            "entropy, too"
        )
    if state.get("actor.loss_agg_mode") == "seq-mean-token-sum-norm" and state.get("actor.loss_scale_factor") is None:
        state.note(
            "actor.loss_agg_mode=seq-mean-token-sum-norm divides by data.max_response_length, in verl by the width "
            "that the batch is padded to; actor.loss_scale_factor sets the number for both"
        )
    if f"{_ACTOR}.grad_clip" in state.given and f"{_ACTOR}.optim.clip_grad" not in state.given:
        state.note("actor.grad_clip counts here; verl 0.9.1 reads actor.optim.clip_grad and passes over it")


def correction(state: State) -> None:
    """Thresholds, bypass mode, and bounds that verl reads the other way round."""
    cap = state.given.get(f"{_ACTOR}.tis_imp_ratio_cap")
    if isinstance(cap, int | float) and cap > 0 and f"{_CORRECTION}.rollout_is" not in state.values:
        state.set(f"{_CORRECTION}.rollout_is", "token")
        state.set(f"{_CORRECTION}.rollout_is_threshold", str(float(cap)))
    key = f"{_CORRECTION}.rollout_is_threshold"
    if key in state.given and "_" in state.settings[key].text and not isinstance(state.given[key], str):
        state.note(f"{key}={state.settings[key].text} is {state.given[key]} to Hydra; in quotes it would be two bounds")
    _rejection(state)
    bypass = state.given.get(f"{_CORRECTION}.bypass_mode") is True
    if bypass:
        _bypass(state)
    if state.get("actor.policy_loss.loss_mode") == "bypass_mode":
        state.drop("actor.policy_loss.loss_mode")
        state.note("actor.policy_loss.loss_mode=bypass_mode is vanilla; actor.old_log_probs=engine is the mode")
    normalize = f"{_CORRECTION}.rollout_is_batch_normalize"
    if state.get(normalize) and (bypass or state.get(f"{_CORRECTION}.rollout_is") is None):
        state.drop(normalize)
        why = "the weights' mean is not known before the step" if bypass else "there are no weights to normalise"
        state.leave(normalize, why)


def _rejection(state: State) -> None:
    """One bound for each rule, and those of k1 turned over.

    verl tests -log r against the logarithms of the bounds, so that `lo_hi` keeps 1/hi <= r <= 1/lo.
    """
    rules_key, bounds_key = f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold"
    rules = list(dict.fromkeys(rule.strip() for rule in (state.get(rules_key) or "").split(",") if rule.strip()))
    bounds = [bound.strip() for bound in (state.get(bounds_key) or "").split(",") if bound.strip()]
    if not rules:
        state.drop(rules_key)
        state.drop(bounds_key)
        state.leave(bounds_key, f"{bounds_key} rejects nothing without {rules_key}")
        return
    if len(bounds) == 1:
        bounds *= len(rules)
    for place, (rule, bound) in enumerate(zip(rules, bounds, strict=False)):
        if rule.endswith("k1") and (turned := _turned(bound)) != bound:
            bounds[place] = turned
            state.note(
                f"{bounds_key}: verl tests -log r, so its {bound} for {rule} keeps ratios r from 1/high to 1/low, not "
                f"from low to high as documented; {turned} keeps the same here"
            )
    state.set(rules_key, ",".join(rules))
    state.set(bounds_key, ",".join(bounds) or None)


def _turned(bound: str) -> str:
    """`lo_hi` as `1/hi_1/lo`; one number, which stands for both sides alike, as it is."""
    try:
        low, high = (float(part) for part in bound.split("_"))
        return f"{1 / high:.12g}_{1 / low:.12g}"
    except (ValueError, ZeroDivisionError):
        return bound


def _bypass(state: State) -> None:
    """The engine's log-probs are the old ones, so that the ratio of the loss corrects for the engine, too."""
    state.set("actor.old_log_probs", "engine")
    weights = state.get(f"{_CORRECTION}.rollout_is")
    if state.given.get(f"{_CORRECTION}.loss_type") == "reinforce":
        state.set("actor.policy_loss.loss_mode", "reinforce")
        state.note("bypass_mode with loss_type=reinforce is actor.policy_loss.loss_mode=reinforce here")
    elif weights and state.get("actor.policy_loss.loss_mode") not in _WITHOUT_RATIO:
        state.drop(f"{_CORRECTION}.rollout_is")
        state.drop(f"{_CORRECTION}.rollout_is_threshold")
        state.note(
            f"{_CORRECTION}.rollout_is={weights} is left out: in bypass mode the ratio of the loss is that weight "
            "already, and verl does not apply it twice, either"
        )
    if weights or state.get(f"{_CORRECTION}.rollout_rs") or f"{_CORRECTION}.loss_type" in state.given:
        state.note(
            "verl 0.9.1's default trainer passes over loss_type, rollout_is and rollout_rs in bypass mode; here they "
            "do what is documented for them"
        )
