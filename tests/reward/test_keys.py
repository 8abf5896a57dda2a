"""Every key of `reward` that this package reads does something: change the key, see the change.

The sandbox's own keys are shown with the sandbox. `num_cpus` and `max_error_rate` act in the stream and the train loop.
"""

import dataclasses
import json
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.config.reward import FunctionConfig, RewardConfig
from pipeline.config.schema import keys
from pipeline.reward.stage import Reward
from tests.config.test_keys import changed
from tests.reward.rewards import GOOD, WRONG, parts, table, written

SOURCE = """
import os, time
pids = {}
def compute_score(solution_str, factor=1.0, pause=0.0, **row):
    time.sleep(pause)
    return {"score": factor * len(solution_str), "worker": pids.setdefault(os.getpid(), len(pids))}
def other(solution_str, **row):
    return -1.0
def many(solution_strs=(), **columns):
    return [len(solution_strs)] * len(solution_strs)
"""
CUSTOM = "reward.custom_reward_function"
BUFFER = {"reward.overlong_buffer.enable": True, "reward.overlong_buffer.len": 4}
REPEATS = {"reward.repetition_penalty.factor": 0.5, "reward.repetition_penalty.ngram": 2}

# key: another value, and the settings under which it matters.
SHOWN: dict[str, tuple[Any, dict[str, Any]]] = {
    f"{CUSTOM}.path": ("FILE", {}),
    f"{CUSTOM}.name": ("other", {f"{CUSTOM}.path": "FILE"}),
    f"{CUSTOM}.reward_kwargs": ({"factor": 2.0}, {f"{CUSTOM}.path": "FILE"}),
    "reward.functions": ({"rule": {}, "own": {"path": "FILE"}}, {}),
    "reward.rule_kwargs": ({"gsm8k": {"method": "strict"}}, {}),
    "reward.timeout_s": (0.2, {f"{CUSTOM}.path": "FILE", f"{CUSTOM}.reward_kwargs": {"pause": 0.5}}),
    "reward.source_scale": ({"countdown": 2.0}, {}),
    "reward.normalize": ({"countdown": [1.0, 2.0]}, {}),
    "reward.overlong_buffer.enable": (True, {"reward.overlong_buffer.len": 4}),
    "reward.overlong_buffer.len": (5, BUFFER),
    "reward.overlong_buffer.penalty_factor": (0.5, BUFFER),
    "reward.length_penalty": (0.5, {}),
    "reward.repetition_penalty.factor": (0.25, REPEATS),
    "reward.repetition_penalty.ngram": (1, REPEATS),
    "reward.clip": ([0.0, 0.5], {}),
    "reward.model.path": ("judge", {}),
    "reward.model.weight": (2.0, {"reward.model.path": "judge"}),
}
OF_A_FUNCTION = {
    "path": "FILE",
    "name": "other",
    "kwargs": {"factor": 2.0},
    "weight": 2.0,
    "batch": True,
    "timeout_s": 0.2,
}
ELSEWHERE = {
    "reward.num_cpus": "tests/plan/test_plan.py",
    "reward.max_error_rate": "tests/test_end_to_end.py",
    "reward.max_processes": "tests/reward/test_pool.py",
    "reward.worker_memory_mb": "tests/reward/test_worker.py",
    "reward.rate_limit.max_concurrent": "tests/reward/test_pool.py",
    "reward.rate_limit.max_per_minute": "tests/reward/test_pool.py",
}
"""Keys that show in time and place of the work, not in its result."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("functions"), SOURCE)


def scored(config: Config) -> list[Any]:
    """Scores, parts and errors of three rows."""
    key = json.dumps(dataclasses.asdict(config.reward))
    if key not in SCORED:
        SCORED[key] = _scored(config)
    return SCORED[key]


SCORED: dict[str, list[Any]] = {}


def _scored(config: Config) -> list[Any]:
    given = table(
        [GOOD, WRONG, "The answer is 42."],
        source=["countdown", "countdown", "gsm8k"],
        truths=['{"target": 54, "numbers": [3, 7, 25]}'] * 2 + ['"42"'],
        ids=[[1, 1, 1, 2, 1, 2, 3, 4], [1, 2, 3, 1, 2, 3, 1], [1]],
    )
    given = given.append_column("rm_score", pa.array([0.5, 1.5, None], pa.float32()))
    given = given.append_column("rm_error", pa.array([None, None, "too long"], pa.string()))
    made = Reward(config.reward, max_response_length=8)(given)
    return [made["score"].to_pylist(), parts(made), made["reward_error"].to_pylist()]


def with_file(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        return {name: with_file(inner, path) for name, inner in value.items()}
    return path if value == "FILE" else value


def test_every_key_has_an_entry() -> None:
    declared = {key for key in keys(Config) if key.startswith("reward.")}
    others = {key for key in declared if key.split(".")[1] == "sandbox"}
    assert declared - others == SHOWN.keys() | ELSEWHERE.keys()
    assert {field.name for field in dataclasses.fields(FunctionConfig)} == OF_A_FUNCTION.keys()


@pytest.mark.parametrize("key", SHOWN)
def test_changing_the_key_changes_what_happens(key: str, path: str) -> None:
    value, given = SHOWN[key]
    base = changed(Config(), with_file(given, path))
    assert scored(changed(base, {key: with_file(value, path)})) != scored(base)


@pytest.mark.parametrize("key", OF_A_FUNCTION)
def test_changing_a_functions_key_changes_what_happens(key: str, path: str) -> None:
    base: dict[str, Any] = {} if key == "path" else {"path": path}
    if key == "batch":
        base["name"] = "many"
    if key == "timeout_s":
        base["kwargs"] = {"pause": 0.5}
    made = []
    for settings in (base, base | {key: with_file(OF_A_FUNCTION[key], path)}):
        made.append(scored(Config(reward=RewardConfig(functions={"own": settings}))))
    assert made[0] != made[1]
