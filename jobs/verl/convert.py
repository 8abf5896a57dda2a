"""verl's settings as ours."""

import re
from collections.abc import Mapping
from typing import Any, get_args

from jobs.verl import algorithm, groups, run, sizes
from jobs.verl.gone import reason
from jobs.verl.keys import DEFAULTS, RENAMED, RULED, SECTIONS
from jobs.verl.settings import Setting
from jobs.verl.state import OURS, Conversion, Left, State

_TARGETS = dict(RENAMED)
_PATHS = (
    *("data.train_files", "data.val_files", "model.path", "model.tokenizer_path", "critic.path"),
    *("reward.model.path", "reward.custom_reward_function.path", "trainer.default_local_dir"),
)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

RULES = (
    *(algorithm.estimator, algorithm.kl, algorithm.clipping, algorithm.loss, algorithm.correction, groups.groups),
    *(sizes.mini_batches, sizes.critic, sizes.warmups, sizes.token_budgets, sizes.engines, sizes.devices),
    *(run.data, run.reward, run.run),
)
"""What is more than a new name for a key, in this order."""


def convert(settings: Mapping[str, Setting], name: str | None = None) -> Conversion:
    """Our settings for a run that means the same.

    Args:
        settings: what verl is given, by key.
        name: name of the run; None takes verl's.
    """
    state = State(settings)
    _rename(state)
    _add_defaults(state)
    for rule in RULES:
        rule(state)
    if name is not None:
        state.set("trainer.experiment_name", name)
    return _finish(state)


def _rename(state: State) -> None:
    """Keys that have another name here, and mappings whose names are free."""
    for key, ours in RENAMED:
        value = state.given.get(key)
        # null is verl's word for "not given"; where ours may be null it is so by default.
        if value is None:
            if type(None) not in (OURS[ours].type, *get_args(OURS[ours].type)) and OURS[ours].type is not Any:
                state.leave(key, f"null is no value of {ours}, which keeps its default")
            continue
        if ours in _PATHS:
            value = _from_home(value)
        elif ours.endswith("dtype"):
            value = _DTYPES.get(value, value) if isinstance(value, str) else value
        elif ours.endswith("_threshold"):
            value = str(value)
        elif ours == "trainer.logger" and isinstance(value, str):
            value = [value]
        state.take(key, ours, value)
    for section, ours in SECTIONS:
        for key, value in state.given.items():
            if key == section and isinstance(value, dict):
                state.values.setdefault(ours, {}).update(value)
            elif key == section and value is not None:
                state.leave(key, f"its value does not fit {ours}: expected a mapping")
            elif key.startswith(section + "."):
                *names, last = key.removeprefix(section + ".").split(".")
                place = state.values.setdefault(ours, {})
                for name in names:
                    # A value that a mapping of the same name follows gives way to it.
                    place[name] = place[name] if isinstance(place.get(name), dict) else {}
                    place = place[name]
                place[last] = value


def _add_defaults(state: State) -> None:
    """verl's defaults where ours differ, for keys that verl is not given."""
    unknown = {_TARGETS.get(key) for key in state.reasons}
    for key, default in DEFAULTS.items():
        ours = _TARGETS[key]
        own = list(OURS[ours].default) if isinstance(OURS[ours].default, tuple) else OURS[ours].default
        default = _DTYPES.get(default, default) if isinstance(default, str) else default
        if ours not in state.values and ours not in unknown and own != default:
            state.values[ours] = default
            state.defaults.add(ours)


def _finish(state: State) -> Conversion:
    result = Conversion(
        values={ours: state.values[ours] for ours in OURS if ours in state.values},
        defaults=state.defaults & state.values.keys(),
        notes=state.notes,
    )
    for key, setting in state.settings.items():
        ours = _TARGETS.get(key)
        why = state.reasons.get(key)
        if why is None and not ours and key not in RULED and not _in_section(key):
            why = reason(key, setting.value)
        if why is None:
            result.converted.append(key)
        else:
            advice = f"; give {ours}" if setting.problem and ours else ""
            result.left.append(Left(key, setting.text, why + advice))
    return result


def _in_section(key: str) -> bool:
    return any(key == section or key.startswith(section + ".") for section, _ in SECTIONS)


def _from_home(value: Any) -> Any:
    """Paths with `~` at their beginning, as the home folder of wherever the run starts."""
    if isinstance(value, list):
        return [_from_home(entry) for entry in value]
    return re.sub(r"\A~(?=/|\Z)", "${oc.env:HOME}", value) if isinstance(value, str) else value
