"""The reward stage: dispatch, custom functions, and failures that keep their row."""

import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline import rows
from pipeline.reward.config import CustomRewardConfig, RewardConfig
from pipeline.reward.stage import Reward, check_sources

TRUTH = {"target": 54, "numbers": [3, 7, 25]}
GOOD, WRONG, NONE = "<answer>(25-7)*3</answer>", "<answer>25</answer>", "no idea"


def table(responses: list[str], source: str = "countdown", truths: list[str] | None = None) -> pa.Table:
    count = len(responses)
    return pa.table(
        {
            "data_source": pa.array([source] * count, pa.string()),
            "response": pa.array(responses, pa.string()),
            "ground_truth": pa.array(truths or [json.dumps(TRUTH)] * count, pa.string()),
            "extra_info": pa.array([json.dumps({"index": i}) for i in range(count)], pa.string()),
        }
    )


def custom(tmp_path: Path, source: str, **settings: Any) -> RewardConfig:
    path = tmp_path / "mine.py"
    path.write_text(source)
    return RewardConfig(custom_reward_function=CustomRewardConfig(path=str(path), **settings))


def scores(result: pa.Table) -> list[float]:
    return [round(score, 6) for score in result["score"].to_pylist()]


def test_rule_of_the_data_source() -> None:
    given = table([GOOD, WRONG, NONE])
    result = Reward(RewardConfig())(given)
    assert result.select(given.column_names) == given
    assert result.schema.names[-len(rows.REWARD) :] == rows.REWARD.names
    assert [result.schema.field(field.name).type for field in rows.REWARD] == [field.type for field in rows.REWARD]
    assert scores(result) == [1.0, 0.1, 0.0]
    parts = [json.loads(text) for text in result["reward_parts"].to_pylist()]
    assert [(p["acc"], p["format"]) for p in parts] == [(1, 1), (0, 1), (0, 0)]
    assert result["reward_error"].to_pylist() == [None] * 3
    assert len(set(result["reward_s"].to_pylist())) == 1 and result["reward_s"][0].as_py() > 0


def test_chunked_and_empty_tables() -> None:
    reward = Reward(RewardConfig())
    assert scores(reward(pa.concat_tables([table([GOOD]), table([NONE, WRONG])]))) == [1.0, 0.0, 0.1]
    assert reward(table([])).num_rows == 0


def test_a_failed_row_keeps_its_place() -> None:
    bad = ["{}", "not json", json.dumps({"target": "\ud800", "numbers": [1]})]
    result = Reward(RewardConfig())(table([GOOD] * 4, truths=[json.dumps(TRUTH), *bad]))
    assert scores(result) == [1.0, 0.0, 0.0, 0.0]
    errors = result["reward_error"].to_pylist()
    assert errors[0] is None
    assert errors[1].startswith("ValueError: reward_model.ground_truth.target")
    assert errors[2].startswith("JSONDecodeError: ")
    assert errors[3].startswith("ValueError: ")
    assert result["reward_parts"].to_pylist()[1:] == ["{}"] * 3


def test_unknown_data_source_names_the_known_ones() -> None:
    error = Reward(RewardConfig())(table([GOOD], source="gsm9k"))["reward_error"][0].as_py()
    assert "'gsm9k'" in error and "countdown" in error
    with pytest.raises(ValueError, match=r"'gsm9k' has no reward rule \(known: countdown"):
        check_sources(["countdown", "gsm9k", "countdown"], RewardConfig())
    check_sources(iter(["countdown"]), RewardConfig())


def test_custom_function_gets_what_verl_passes(tmp_path: Path) -> None:
    source = """
def grade(data_source, solution_str, ground_truth, extra_info, scale):
    return {"score": scale * len(solution_str), "seen": [data_source, ground_truth, extra_info]}
"""
    config = custom(tmp_path, source, name="grade", reward_kwargs={"scale": 0.5})
    result = Reward(config)(table(["abcd", "ab"], source="anything"))
    assert scores(result) == [2.0, 1.0]
    assert json.loads(result["reward_parts"][1].as_py()) == {"seen": ["anything", TRUTH, {"index": 1}]}
    check_sources(["anything"], config)


@pytest.mark.parametrize(
    ("returned", "score", "error"),
    [
        ("True", 1.0, None),
        ("__import__('numpy').float32(0.5)", 0.5, None),
        ("{'score': 1, 'part': __import__('numpy').arange(2)}", 1.0, None),
        ("float('nan')", 0.0, "ValueError: the score is nan"),
        ("-float('inf')", 0.0, "ValueError: the score is -inf"),
        ("1e39", 0.0, "ValueError: the score is 1e+39"),
        ("None", 0.0, "ValueError: the score must be a number, not a NoneType"),
        ("'1.0'", 0.0, "ValueError: the score must be a number, not a str"),
        ("{'acc': 1}", 0.0, "ValueError: the reward function returned a dict without the key 'score' (keys: ['acc'])"),
        ("{'score': 1, 'part': object()}", 0.0, "ValueError: a part of the reward is a object"),
        ("1 / 0", 0.0, "ZeroDivisionError: division by zero"),
        ("'x'.__getattribute__('\\ud800' * 9000)", 0.0, "AttributeError: "),
    ],
)
@pytest.mark.parametrize("prefix", ["", "async "])
def test_what_a_custom_function_may_return(
    tmp_path: Path, prefix: str, returned: str, score: float, error: str | None
) -> None:
    config = custom(tmp_path, f"{prefix}def compute_score(**row):\n    return {returned}\n")
    result = Reward(config)(table([GOOD, WRONG]))
    assert scores(result) == [score] * 2
    for found in result["reward_error"].to_pylist():
        assert found is None if error is None else found.startswith(error) and len(found) <= 500


def test_async_rows_run_together_and_share_a_loop_across_tables(tmp_path: Path) -> None:
    source = """
import asyncio
loops = set()
async def compute_score(**row):
    loops.add(asyncio.get_running_loop())
    await asyncio.sleep(0.1)
    return len(loops)
"""
    reward = Reward(custom(tmp_path, source))
    start = time.perf_counter()
    assert scores(reward(table([GOOD] * 50))) == [1.0] * 50
    assert scores(reward(table([GOOD] * 50))) == [1.0] * 50
    assert time.perf_counter() - start < 2.0


def test_async_deadline_and_cancellation_are_errors_of_the_row(tmp_path: Path) -> None:
    source = """
import asyncio
async def compute_score(solution_str, **row):
    if solution_str == "hang":
        await asyncio.sleep(60)
    if solution_str == "cancel":
        raise asyncio.CancelledError("stopped")
    if solution_str == "own":
        raise TimeoutError("judge is away")
    return 1.0
"""
    result = Reward(custom(tmp_path, source, timeout_s=0.2))(table(["hang", "cancel", "own", "fine"]))
    assert scores(result) == [0.0, 0.0, 0.0, 1.0]
    assert result["reward_error"].to_pylist() == [
        "TimeoutError: no score after 0.2 s",
        "CancelledError: ",
        "TimeoutError: judge is away",
        None,
    ]


def test_async_function_that_blocks_its_loop_ends(tmp_path: Path) -> None:
    source = "import time\nasync def compute_score(**row):\n    time.sleep(3)\n    return 1\n"
    with pytest.raises(TimeoutError, match="blocked its event loop"):
        Reward(custom(tmp_path, source, timeout_s=0.1))(table([GOOD]))


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("x = 1", {}, r"has no such function \(it has: none\)"),
        ("def grade(**row): return 1", {}, r"name is 'compute_score'.*it has: grade"),
        ("def compute_score(**row) return 1", {}, "SyntaxError"),
        ("import nothing_of_that_name", {}, "ModuleNotFoundError"),
        ("def compute_score(solution_str): return 1", {}, "cannot be called as compute_score"),
        ("def compute_score(**row): return 1", {"reward_kwargs": {"extra_info": 1}}, "may not hold extra_info"),
    ],
)
def test_custom_function_that_cannot_work_is_refused_early(
    tmp_path: Path, source: str, settings: dict[str, Any], message: str
) -> None:
    config = custom(tmp_path, source, **settings)
    for make in (lambda: Reward(config), lambda: check_sources(["any"], config)):
        with pytest.raises(ValueError, match=r"reward\.custom_reward_function") as caught:
            make()
        assert caught.match(message)


def test_missing_custom_file_is_named(tmp_path: Path) -> None:
    config = RewardConfig(custom_reward_function=CustomRewardConfig(path=str(tmp_path / "gone.py")))
    with pytest.raises(ValueError, match=r"reward\.custom_reward_function\.path is .*gone\.py"):
        Reward(config)


def test_travels_to_another_process(tmp_path: Path) -> None:
    reward = Reward(custom(tmp_path, "async def compute_score(**row):\n    return 7\n"))
    reward(table([GOOD]))
    sent = pickle.dumps(reward)
    del sys.modules["custom_reward_function_mine"]  # as in a process that never loaded the file
    assert scores(pickle.loads(sent)(table([GOOD]))) == [7.0]
