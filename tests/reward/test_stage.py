"""The reward stage: dispatch, custom functions, several rewards, shaping in place, and failures that keep their row."""

import dataclasses
import json
import re
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline import rows
from pipeline.config.reward import OverlongBufferConfig, RewardConfig, RewardModelConfig
from pipeline.reward.stage import Reward
from tests.reward.rewards import GOOD, NONE, TRUTH, WRONG, custom, episodes, errors, parts, scores, table, written


def test_rule_of_the_data_source() -> None:
    given = table([GOOD, WRONG, NONE])
    result = Reward(RewardConfig())(given)
    assert result.select(given.column_names) == given
    assert result.schema.names[-len(rows.REWARD) :] == rows.REWARD.names
    assert [result.schema.field(field.name).type for field in rows.REWARD] == [field.type for field in rows.REWARD]
    assert scores(result) == [1.0, 0.1, 0.0]
    assert [(p["acc"], p["format"]) for p in parts(result)] == [(1, 1), (0, 1), (0, 0)]
    assert errors(result) == [None] * 3
    assert len(set(result["reward_s"].to_pylist())) == 1 and result["reward_s"][0].as_py() > 0
    chunked = pa.concat_tables([table([GOOD]), table([NONE, WRONG])])
    assert (
        scores(Reward(RewardConfig())(chunked)) == [1.0, 0.0, 0.1] and Reward(RewardConfig())(table([])).num_rows == 0
    )


def test_a_failed_row_keeps_its_place() -> None:
    bad = ["{}", "not json", json.dumps({"target": "\ud800", "numbers": [1]})]
    result = Reward(RewardConfig())(table([GOOD] * 4, truths=[json.dumps(TRUTH), *bad]))
    assert scores(result) == [1.0, 0.0, 0.0, 0.0]
    reasons = errors(result)
    assert reasons[0] is None
    assert reasons[1].startswith("ValueError: reward_model.ground_truth of a countdown row must be")
    assert reasons[2].startswith("JSONDecodeError: ")
    assert reasons[3].startswith("ValueError: ")
    assert result["reward_parts"].to_pylist()[1:] == ["{}"] * 3


def test_custom_function_gets_what_verl_passes(tmp_path: Path) -> None:
    source = """
def grade(data_source, solution_str, ground_truth, extra_info, scale):
    return {"score": scale * len(solution_str), "seen": [data_source, ground_truth, extra_info]}
"""
    config = custom(tmp_path, source, name="grade", reward_kwargs={"scale": 0.5})
    result = Reward(config)(table(["abcd", "ab"], source="anything"))
    assert scores(result) == [2.0, 1.0]
    assert parts(result)[1] == {"seen": ["anything", TRUTH, {"index": 1}]}


def test_what_a_custom_function_may_return(tmp_path: Path) -> None:
    cases: list[tuple[str, float, str | None]] = [
        ("True", 1.0, None),
        ("__import__('numpy').float32(0.5)", 0.5, None),
        ("{'score': 1, 'part': __import__('numpy').arange(2)}", 1.0, None),
        ("float('nan')", 0.0, "ValueError: the score is nan"),
        ("-float('inf')", 0.0, "ValueError: the score is -inf"),
        ("1e39", 0.0, "ValueError: the score is 1e+39"),
        ("None", 0.0, "ValueError: the score must be a number, not a NoneType"),
        ("'1.0'", 0.0, "ValueError: the score must be a number, not a str"),
        ("[1.0]", 0.0, "ValueError: the score must be a number, not a list"),
        ("{'acc': 1}", 0.0, "ValueError: the reward function returned a dict without the key 'score' (keys: ['acc'])"),
        ("{'score': 1, 'part': object()}", 0.0, "ValueError: a part of the reward is a object"),
        ("{'score': 1, 'acc': 'good'}", 0.0, "ValueError: acc, which validation counts, must be a number, not a str"),
        ("{'score': 1, 'part': float('nan')}", 0.0, "ValueError: a part of the reward is nan"),
        ("{'score': 1, 'part': 10 ** 400}", 0.0, "OverflowError: "),
        ("{'score': 1, ('a', 1): 2}", 1.0, None),
        ("{'score': 1, 'part': '\\ud800'}", 1.0, None),
        ("{'score': 1, 'part': nested(5000)}", 0.0, "RecursionError: "),
        ("{'score': 1, 'part': 'x' * 10 ** 7}", 0.0, "ValueError: the parts of the reward are 10,000,012 characters"),
        ("{[]: 1}", 0.0, "TypeError: unhashable type: 'list' (mine.py, line 4)"),
        ("1 / 0", 0.0, "ZeroDivisionError: division by zero (mine.py, line 4)"),
        ("'x'.__getattribute__('\\ud800' * 9000)", 0.0, "AttributeError: "),
        ("exec('raise SystemExit(3)')", 0.0, "SystemExit: 3"),
        ("exec('raise KeyboardInterrupt')", 0.0, "KeyboardInterrupt: "),
        ("Unspeakable().raise_()", 0.0, "Unspeakable, whose message cannot be read"),
    ]
    source = f"""
CASES = {[case for case, _, _ in cases]!r}
def compute_score(extra_info, **row):
    return eval(CASES[extra_info["index"]])
def nested(depth):
    made = 0
    for _ in range(depth):
        made = [made]
    return made
class Unspeakable(Exception):
    def __str__(self):
        raise ValueError
    def raise_(self):
        raise self
"""
    result = Reward(custom(tmp_path, source))(table([GOOD] * len(cases)))
    for (case, score, error), got, found in zip(cases, scores(result), errors(result), strict=True):
        assert got == score, case
        assert found is None if error is None else found.startswith(error) and len(found) <= 500, (case, found)
    json.dumps(result.to_pylist()).encode()  # nothing in it that is no text


def test_a_batch_function_gets_lists_or_an_arrow_table(tmp_path: Path) -> None:
    source = """
import pyarrow.compute as pc
def of_table(table):
    assert table.column_names == ["data_source", "solution_str", "ground_truth", "extra_info"]
    return pc.utf8_length(table["solution_str"])
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):
    assert data_sources == ["countdown"] * 3 and ground_truths[0]["target"] == 54
    return [{"score": len(text) + bonus, "rows": len(solution_strs), "index": info["index"]}
            for text, info in zip(solution_strs, extra_infos)]
"""
    path = written(tmp_path, source)
    settings = {"path": path, "batch": True, "kwargs": {"bonus": 10}}
    functions = {"length": settings, "table": {"path": path, "name": "of_table", "batch": True}}
    result = Reward(RewardConfig(functions=functions))(table(["a", "bb", "ccc"]))
    assert scores(result) == [12.0, 14.0, 16.0]
    assert [p["length/rows"] for p in parts(result)] == [3, 3, 3]
    assert [p["length/index"] for p in parts(result)] == [0, 1, 2]


def test_a_batch_that_fails_fails_for_all_rows(tmp_path: Path) -> None:
    source = """
def compute_score(solution_strs, **columns):
    if solution_strs[0] == "raise":
        raise KeyError("x")
    return 1.0 if solution_strs[0] == "one" else [1.0]
"""
    config = RewardConfig(functions={"all": {"path": written(tmp_path, source), "batch": True}})
    for text, message in (
        ("raise", "KeyError: 'x' (mine.py, line 4)"),
        ("one", "TypeError: 'float' object is not iterable"),
        ("few", "ValueError: the batch function returned 1 results for 2 rows"),
    ):
        assert errors(Reward(config)(table([text] * 2))) == [f"all: {message}"] * 2


def test_several_rewards_are_summed_and_each_is_kept(tmp_path: Path) -> None:
    source = """
def shape(solution_str, **row):
    if solution_str == "bad":
        raise ValueError("no shape")
    return {"score": float(solution_str.startswith("<answer>")), "pred": "not this one"}
async def length(solution_str, **row):
    return len(solution_str) / 100
"""
    path = written(tmp_path, source)
    config = RewardConfig(
        functions={
            "rule": {},
            "shape": {"path": path, "name": "shape", "weight": 0.5},
            "length": {"path": path, "name": "length", "weight": -1},
        }
    )
    result = Reward(config)(table([GOOD, NONE, "bad"]))
    assert scores(result) == [1.0 + 0.5 - 0.25, -0.07, 0.0]
    assert errors(result) == [None, None, "shape: ValueError: no shape (mine.py, line 4)"]
    assert result["score_rule"].to_pylist() == [1.0, 0.0, 0.0]
    assert result["score_shape"].to_pylist() == [1.0, 0.0, None]
    assert result["score_length"].to_pylist() == pytest.approx([0.25, 0.07, 0.03])
    assert result.schema.field("score_rule").type == pa.float32()
    kept = parts(result)[0]
    assert (kept["rule"], kept["shape"], kept["length"]) == (1.0, 1.0, 0.25)
    # Validation reads `acc` and `pred`: they are those of the first reward that has them.
    assert kept["acc"] == 1 and kept["pred"] == kept["rule/pred"] and kept["shape/pred"] == "not this one"
    assert parts(result)[2] == {}


def test_shaping_leaves_validation_alone() -> None:
    config = RewardConfig(overlong_buffer=OverlongBufferConfig(enable=True, len=4), source_scale={"countdown": 2.0})
    given = table([GOOD] * 4, split=["train", "val", "baseline", "train"], ids=[[1] * 10, [1] * 10, [1] * 8, []])
    result = Reward(config, max_response_length=10)(given)
    assert scores(result) == [1.0, 1.0, 1.5, 2.0]
    assert "raw_score" not in parts(result)[1] and parts(result)[1]["acc"] == 1
    assert [(p["raw_score"], p["overlong_penalty"]) for p in (parts(result)[i] for i in (0, 2, 3))] == [
        (1.0, -1.0),
        (1.0, -0.5),
        (1.0, 0.0),
    ]


def test_a_failed_row_is_not_shaped() -> None:
    config = RewardConfig(length_penalty=1.0)
    result = Reward(config, 3)(table([GOOD, GOOD], truths=["{}", json.dumps(TRUTH)]))
    assert scores(result) == [0.0, 0.0] and parts(result)[0] == {} and errors(result)[1] is None
    result = Reward(RewardConfig(source_scale={"countdown": 1e39}))(table([GOOD]))
    assert errors(result) == ["ValueError: weights, scale and penalties make a score of 1e+39, not a finite float32"]


def test_async_rows_run_together_and_share_a_loop_across_tables(tmp_path: Path) -> None:
    source = """
import asyncio
loops = set()
together = asyncio.Barrier(50)
async def compute_score(**row):
    loops.add(asyncio.get_running_loop())
    await together.wait()
    return len(loops)
"""
    config = custom(tmp_path, source)
    # The stage is made anew for every task of Ray Data.
    assert scores(Reward(config)(table([GOOD] * 50))) == [1.0] * 50
    assert scores(Reward(config)(table([GOOD] * 50))) == [1.0] * 50


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
    assert errors(result) == [
        "TimeoutError: no score after 0.2 s",
        "CancelledError: stopped (mine.py, line 7)",
        "TimeoutError: judge is away (mine.py, line 9)",
        None,
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def grade(**row): return 1", r"name is 'compute_score'.*it has: grade"),
        ("def compute_score(**row) return 1", "SyntaxError"),
        ("raise SystemExit('a script')", "SystemExit: a script"),
        ("import os; os.write(2, b'no GPU\\n'); os._exit(7)", "exit code 7; the last line that it wrote: no GPU"),
        ("def compute_score(solution_str): return 1", "cannot be called as compute_score"),
    ],
)
def test_custom_function_that_cannot_be_loaded_ends_the_run(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reward(custom(tmp_path, source))(table([GOOD]))


def test_the_functions_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = ("bonus=0.1)", "(data_sources, solution_strs", "messages, turns)")
    source, batch, episode = (next(block for block in blocks if name in block) for name in names)
    given = table(["because it is 42", "41"], truths=['"42.0"', '"42"'])
    result = Reward(custom(tmp_path, source, reward_kwargs={"bonus": 0.2}))(given)
    assert scores(result) == [1.0, 0.0]
    assert parts(result) == [{"acc": 1, "bonus": 0.2}, {"acc": 0, "bonus": 0.0}]
    given = table([" 42", "41"], truths=['"42"', '"42"'])
    functions = {"own": {"path": written(tmp_path, batch, "batch.py"), "batch": True}}
    assert scores(Reward(RewardConfig(functions=functions))(given)) == [1.0, 0.0]
    used = [[{"role": "assistant", "content": "", "calls": [{"name": "calc"}]}], [{"role": "user", "content": "?"}]]
    result = Reward(custom(tmp_path, episode))(episodes(given, messages=used))
    assert scores(result) == [1.09, -0.02]


def judged(given: pa.Table, numbers: list[float | None], errors: list[str | None]) -> pa.Table:
    given = given.append_column("rm_score", pa.array(numbers, pa.float32()))
    return given.append_column("rm_error", pa.array(errors, pa.string()))


def test_a_reward_model_scores_alone() -> None:
    """No rule is called: a data source without one will do."""
    config = RewardConfig(model=RewardModelConfig("judge", weight=2.0))
    result = Reward(config)(
        judged(table([GOOD, WRONG, NONE], source="dialogues"), [0.5, -1.5, None], [None, None, "too long"])
    )
    assert scores(result) == [1.0, -3.0, 0.0]
    assert errors(result) == [None, None, "reward model: too long"]
    assert parts(result) == [{"rm_score": 0.5}, {"rm_score": -1.5}, {}]


def test_a_reward_model_beside_functions(tmp_path: Path) -> None:
    given = judged(table([GOOD, WRONG, NONE, GOOD]), [0.5, 1.0, None, 3e38], [None, None, "too long", None])
    config = RewardConfig(functions={"rule": {"weight": 10.0}}, model=RewardModelConfig("judge", weight=2.0))
    assert scores(Reward(dataclasses.replace(config, clip=[0.0, 5.0]))(given)) == [5.0, 3.0, 0.0, 0.0]
    result = Reward(config)(given)
    assert scores(result) == [11.0, 3.0, 0.0, 0.0]
    assert result["score_rule"].to_pylist() == pytest.approx([1.0, 0.1, 0.0, 1.0])
    assert parts(result)[0]["rm_score"] == 0.5 and parts(result)[0]["acc"] == 1
    assert errors(result)[2] == "reward model: too long" and "not a finite float32" in errors(result)[3]
    own = custom(tmp_path, "def compute_score(solution_str, **row):\n    return 1 / ('none' not in solution_str)")
    own.model = RewardModelConfig("judge")
    result = Reward(own)(judged(table(["one", "none"]), [0.25, 0.5], [None, None]))
    assert scores(result) == [1.25, 0.0]
    assert errors(result)[1].startswith("ZeroDivisionError")
