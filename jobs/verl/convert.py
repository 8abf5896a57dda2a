"""The conversion of verl's settings into our settings."""

import re
from collections.abc import Mapping
from typing import Any, get_args

import yaml

from jobs.verl.keys import RENAMED, RULED, SECTIONS, reason
from jobs.verl.launch import Setting
from jobs.verl.rules import RULES
from jobs.verl.state import OURS, Left, State

_TARGETS = dict(RENAMED)
_WORDS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a tree of mappings: values by dotted names."""
    result: dict[str, Any] = {}
    for name, value in tree.items():
        result |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return result


DEFAULTS: dict[str, Any] = _flat(
    yaml.safe_load("""
data: {train_batch_size: 1024, max_prompt_length: 512, max_response_length: 512, filter_overlong_prompts: false,
       truncation: error, shuffle: true}
model: {enable_gradient_checkpointing: true, dtype: float32}
rollout: {n: 1, temperature: 1.0, top_p: 1.0, top_k: -1, dtype: bfloat16, gpu_memory_utilization: 0.5,
          max_num_seqs: 256, max_num_batched_tokens: 8192, enable_prefix_caching: true,
          val_kwargs: {n: 1, temperature: 0.0, top_p: 1.0, top_k: -1}}
algorithm: {adv_estimator: gae, gamma: 1.0, lam: 1.0, norm_adv_by_std_in_grpo: true, use_kl_in_reward: false,
            kl_penalty: kl, kl_ctrl: {type: fixed, kl_coef: 0.001, target_kl: 0.1, horizon: 10000}}
actor: {clip_ratio: 0.2, clip_ratio_c: 3.0, loss_agg_mode: token-mean, entropy_coeff: 0.0, use_kl_loss: false,
        kl_loss_coef: 0.001, kl_loss_type: low_var_kl, ppo_epochs: 1, ppo_mini_batch_size: 256, grad_clip: 1.0,
        policy_loss: {loss_mode: vanilla}, fsdp: {param_dtype: bfloat16},
        optim: {lr: 1.0e-6, betas: [0.9, 0.999], weight_decay: 0.01, lr_scheduler_type: constant,
                lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.0, min_lr_ratio: 0.0}}
critic: {cliprange_value: 0.5, grad_clip: 1.0, warmup: 0, fsdp: {param_dtype: bfloat16},
         optim: {lr: 1.0e-5, weight_decay: 0.01, lr_scheduler_type: constant}}
trainer: {project_name: verl_examples, experiment_name: gsm8k, total_epochs: 30, val_before_train: true,
          test_freq: -1, save_freq: -1, logger: [console, wandb], resume: auto}
""")
)
"""verl's defaults under our names. Defaults that differ from ours are written out, so that the run means the same. The
table leaves out placeholders (files, model) and keys of speed, memory and disk."""


def convert(settings: Mapping[str, Setting], name: str | None = None) -> State:
    """Return our settings for a run that means the same.

    Args:
        settings: what verl is given, by key.
        name: name of the run; None takes verl's.
    """
    state = State(settings)
    for key, ours in RENAMED:
        if key in state.given:
            _rename(state, key, ours, state.given[key])
    for section, ours in SECTIONS:
        for key, value in state.given.items():
            if key == section or key.startswith(section + "."):
                _open(state, key, key.removeprefix(section).removeprefix("."), ours, value)
    unknown = {_TARGETS.get(key) for key in state.reasons}
    for ours, default in DEFAULTS.items():
        own = list(OURS[ours].default) if isinstance(OURS[ours].default, tuple) else OURS[ours].default
        if ours not in state.values and ours not in unknown and own != default:
            state.values[ours] = default
            state.defaults.add(ours)
    for rule in RULES:
        rule(state)
    if name is not None:
        state.set("trainer.experiment_name", name)
    _finish(state)
    return state


def _rename(state: State, key: str, ours: str, value: Any) -> None:
    # null is verl's word for "not given"; a key of ours that may be null is null by default.
    if value is None:
        if type(None) not in (OURS[ours].type, *get_args(OURS[ours].type)) and OURS[ours].type is not Any:
            state.leave(key, f"null is no value of {ours}, which keeps its default", cannot=True)
        return
    if ours.endswith("dtype"):
        value = _WORDS.get(value, value) if isinstance(value, str) else value
    elif ours.endswith("_threshold"):
        value = str(value)
    elif ours == "trainer.logger" and isinstance(value, str):
        value = [value]
    state.take(key, ours, value)


def _open(state: State, key: str, inner: str, ours: str, value: Any) -> None:
    """Put `value` into a mapping of ours that takes any name."""
    place = state.values.setdefault(ours, {})
    if not inner:
        if isinstance(value, dict):
            place.update(value)
        elif value is not None:
            state.leave(key, f"its value does not fit {ours}: expected a mapping", cannot=True)
        return
    *names, last = inner.split(".")
    for part in names:
        # A value that a mapping of the same name follows gives way to it.
        place[part] = place[part] if isinstance(place.get(part), dict) else {}
        place = place[part]
    place[last] = value


def _finish(state: State) -> None:
    """Put our keys in order, and list verl's keys that were converted, and the keys that were left."""
    state.values = {ours: state.values[ours] for ours in OURS if ours in state.values}
    state.defaults &= state.values.keys()
    for key, setting in state.settings.items():
        inside = any(key == section or key.startswith(section + ".") for section, _ in SECTIONS)
        if key in state.reasons:
            state.left.append(Left(key, setting.text, *state.reasons[key]))
        elif key in _TARGETS or key in RULED or key in state.also or inside:
            state.converted.append(key)
        else:
            state.left.append(Left(key, setting.text, *reason(re.sub(r"@.*", "", key), setting.value)))
