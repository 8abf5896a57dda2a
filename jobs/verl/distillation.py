"""The rule for `distillation.*`: teachers, and what is learnt from them."""

import re
from typing import Any

from jobs.verl.state import State

_LOSS, _MODELS = "distillation.distillation_loss", "distillation.teacher_models"
_DIVERGENCES = {"forward_kl_topk": 0.0, "reverse_kl_topk": 1.0, "jsd_topk": None}
_ONLY = "teacher_model"
"""verl's own entry, which is replaced by others."""
_CONVERTED = re.compile(
    r"distillation\.(enabled|nnodes|n_gpus_per_node|teacher_key|teacher_models\.[^.]+\.(key|model_path|num_replicas)"
    r"|distillation_loss\.(loss_mode|topk|use_task_rewards|distillation_loss_coef|use_policy_gradient|jsd_beta"
    r"|loss_max_clamp|log_prob_min_clamp))"
)


def distillation(state: State) -> None:
    """Convert teachers to replicas, and the two ways in which verl learns from them."""
    if state.given.get("distillation.enabled") is not True:
        return
    state.also |= {key for key in state.given if _CONVERTED.fullmatch(key)}
    _teachers(state)
    given = {name: state.given.get(f"{_LOSS}.{name}") for name in ("loss_mode", "topk", "jsd_beta")}
    mode, coef = given["loss_mode"] or "k3", state.given.get(f"{_LOSS}.distillation_loss_coef", 1.0)
    rewards = state.given.get(f"{_LOSS}.use_task_rewards") is not False
    gradient = state.given.get(f"{_LOSS}.use_policy_gradient") is not False
    # Without rewards verl does not read its coefficient.
    weight = float(coef) if rewards else 1.0
    if mode in _DIVERGENCES and not gradient:
        beta = _DIVERGENCES[mode]
        state.set("actor.distill_coef", weight)
        state.set("actor.distill_top_k", given["topk"] or 128)
        state.set("actor.distill_beta", _half(given["jsd_beta"]) if beta is None else beta)
    elif mode in ("k1", "kl") and gradient:
        state.set("algorithm.teacher_coef", weight)
    else:
        state.leave(
            f"{_LOSS}.loss_mode",
            "a teacher gives advantages (k1 with use_policy_gradient=true), or a loss over its likely tokens "
            "(forward_kl_topk, reverse_kl_topk or jsd_topk with use_policy_gradient=false)",
            cannot=True,
        )
        state.set("algorithm.teacher_coef", weight)
    if not rewards:
        state.set("algorithm.adv_estimator", "zero")
    state.notes.append(
        "verl clamps the divergence of a token to loss_max_clamp (10) and log-probs to log_prob_min_clamp (-10); here "
        "nothing is clamped"
    )
    for name in ("policy_loss_mode", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "kd_temperature"):
        state.leave(f"{_LOSS}.{name}", "the policy loss and its clip range are the actor's (actor.*)", cannot=True)


def _half(beta: Any) -> float:
    return 0.5 if beta is None else float(beta)


def _teachers(state: State) -> None:
    models: dict[str, dict[str, Any]] = {}
    for key, value in state.given.items():
        if key.startswith(f"{_MODELS}."):
            name, _, field = key.removeprefix(f"{_MODELS}.").partition(".")
            models.setdefault(name, {})[field] = value
    if len(models) > 1:
        models.pop(_ONLY, None)
    column = state.given.get("distillation.teacher_key", "data_source")
    pool = state.whole("distillation.n_gpus_per_node", 0) * state.whole("distillation.nnodes", 1)
    if len(models) == 1:
        (only,) = models.values()
        state.set("teacher.path", only.get("model_path"))
        state.set("teacher.num_workers", max(1, pool))
    elif models:
        known = column in ("data_source", "agent_name") or str(column).startswith("extra_info.")
        if known:
            state.set("teacher.by", column)
        else:
            state.leave("distillation.teacher_key", "data_source, agent_name or extra_info.NAME choose", cannot=True)
        named = {
            name: {
                "path": model.get("model_path"),
                "sources": [model.get("key") or name],
                "num_workers": model.get("num_replicas") or 1,
            }
            for name, model in models.items()
        }
        state.set("teacher.named", named)
    state.set("teacher.num_gpus", 1.0)
    state.notes.append("a teacher's replica has one GPU; verl's engines for teachers may have several")
