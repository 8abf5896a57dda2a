"""Scores of episodes: the environment's rewards, the function's, or both; failures; what functions get to see."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.config.agent import AgentConfig
from pipeline.config.reward import OverlongBufferConfig, RepetitionPenaltyConfig, RewardConfig, RewardModelConfig
from pipeline.reward.dry import RESPONSE, check_sources, dry_call
from pipeline.reward.stage import Reward
from tests.reward.rewards import GOOD, NONE, custom, episodes, errors, parts, scores, table, written
from tests.reward.test_dry import prompts

LOST = "WorkerError: it ended (game.py, line 3)"
TALK = [
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}],
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": "b"}, {"role": "tool", "content": "\u00e9"}],
]


def test_the_environment_scores_and_no_function_is_called(tmp_path: Path) -> None:
    called = tmp_path / "called"
    config = custom(tmp_path, f"def compute_score(**row): open({str(called)!r}, 'w'); return 1")
    given = episodes(table([GOOD] * 3, source="no rule"), [0.5, -2.0, 3.0], [None, None, LOST], ['{"acc": 1}'] * 3)
    result = Reward(config, scored_by="environment")(given)
    assert scores(result) == [0.5, -2.0, 0.0]
    assert errors(result) == [None, None, f"environment: {LOST}"]
    assert parts(result) == [{"acc": 1}, {"acc": 1}, {}]
    assert not called.exists()
    assert result.column_names[: given.num_columns] == given.column_names


def test_the_function_scores_and_is_not_called_where_the_environment_failed(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    source = f"""
def compute_score(solution_str, **row):
    with open({str(seen)!r}, "a") as file:
        file.write(solution_str)
    return len(solution_str)
"""
    given = episodes(table(["a", "bb", "ccc"]), [9.0] * 3, [LOST, None, LOST])
    result = Reward(custom(tmp_path, source))(given)
    assert scores(result) == [0.0, 2.0, 0.0]
    assert errors(result) == [f"environment: {LOST}", None, f"environment: {LOST}"]
    assert seen.read_text() == "bb"
    # With several functions no column of any has a number either, and where all rows failed no call is made.
    config = RewardConfig(functions={"rule": {}, "own": {"path": str(tmp_path / "mine.py"), "weight": 0.5}})
    result = Reward(config)(given)
    assert result["score_own"].to_pylist() == [None, 2.0, None] and scores(result) == [0.0, 1.0, 0.0]
    assert errors(result)[0] == f"environment: {LOST}"
    assert errors(Reward(config)(episodes(table(["a"]), None, [LOST]))) == [f"environment: {LOST}"]


def test_the_sum_of_both() -> None:
    config = RewardConfig()
    made = ['{"acc": 0, "guesses": 3}', '{"guesses": 2}', "{}"]
    given = episodes(table([GOOD, NONE, GOOD], truths=[*table([GOOD] * 2)["ground_truth"].to_pylist(), "{}"]),
                     [0.25, 0.5, 1.0], env_parts=made)  # fmt: skip
    result = Reward(config, scored_by="sum")(given)
    assert scores(result) == [1.25, 0.5, 0.0]
    assert errors(result)[2].startswith("ValueError: reward_model.ground_truth")
    # Of two parts of one name, the function's stays.
    assert [(p["acc"], p["guesses"], p["env_score"]) for p in parts(result)[:2]] == [(1, 3, 0.25), (0, 2, 0.5)]


def test_each_agent_is_scored_in_its_own_way(tmp_path: Path) -> None:
    called = tmp_path / "called"
    own = written(
        tmp_path,
        f"""
def compute_score(solution_str, **row):
    open({str(called)!r}, "a").write(solution_str)
    return 10
""",
    )
    config = RewardConfig(functions={"own": {"path": own}, "half": {"path": own, "weight": 0.5}})
    given = episodes(table(["a", "b", "c", "d"]), [1.0, 2.0, 3.0, 4.0], [None, None, None, LOST])
    given = given.append_column("agent_name", pa.array([None, "game", "both", "game"]))
    result = Reward(config, scored_by={None: "function", "game": "environment", "both": "sum"})(given)
    assert scores(result) == [15.0, 2.0, 18.0, 0.0]
    assert errors(result) == [None, None, None, f"environment: {LOST}"]
    assert result["score_own"].to_pylist() == [10.0, None, 10.0, None] and sorted(called.read_text()) == list("aacc")


def test_each_agent_is_tried_in_its_own_way(tmp_path: Path) -> None:
    agent = AgentConfig(environment="m:E", named={"calc": {"tools": ["m:f"]}})
    config = custom(tmp_path, "def compute_score(turns, **row): return turns")
    check_sources({None: ["no rule"], "calc": ["countdown"]}, RewardConfig(), agent)
    with pytest.raises(ValueError, match="no rule"):
        check_sources({"calc": ["no rule"]}, RewardConfig(), agent)
    tables = prompts(("game", "{}"), ("math", json.dumps(RESPONSE)))
    named = [
        one.append_column("agent_name", pa.array([name])) for one, name in zip(tables, (None, "calc"), strict=True)
    ]
    assert dry_call(named, config, {}, agent) == {"math": (1.0, None)}


def test_the_reward_model_is_added_behind_the_environment() -> None:
    given = episodes(table(["a"] * 3), [1.0, 2.0, 3.0], [None, None, LOST])
    given = given.append_column("rm_score", pa.array([0.5, None, 0.5], pa.float32()))
    given = given.append_column("rm_error", pa.array([None, "too long", None], pa.string()))
    result = Reward(RewardConfig(model=RewardModelConfig(path="judge", weight=2.0)), scored_by="sum")(given)
    assert scores(result) == [2.0, 0.0, 0.0]
    assert errors(result) == [None, "reward model: too long", f"environment: {LOST}"]


def test_penalties_count_the_policys_tokens_alone() -> None:
    ids, masks = [[7, 7, 9, 9, 9, 9, 9, 9, 7, 8]], [[1, 1, 0, 0, 0, 0, 0, 0, 1, 1]]
    one = table([GOOD], ids=ids, masks=masks)
    result = Reward(RewardConfig(overlong_buffer=OverlongBufferConfig(enable=True, len=8)), 10)(one)
    assert parts(result)[0]["overlong_penalty"] == -0.25  # 4 tokens, 2 beyond the 10 - 8 that are free
    assert parts(Reward(RewardConfig(length_penalty=1.0), 10)(one))[0]["length_penalty"] == -0.4
    config = RewardConfig(repetition_penalty=RepetitionPenaltyConfig(factor=1.0, ngram=1))
    assert parts(Reward(config)(one))[0]["repetition_penalty"] == -0.5  # 7 7 7 8


@pytest.mark.parametrize("batch", [False, True])
def test_a_function_gets_conversation_and_turns_if_it_asks(tmp_path: Path, batch: bool) -> None:
    source = """
def compute_score(solution_str, messages, turns, **row):
    return {"score": turns, "last": messages[-1]["content"], "kinds": type(messages).__name__}
def many(data_sources, solution_strs, ground_truths, extra_infos, turns, messages):
    return [{"score": turn, "last": talk[-1]["content"], "kinds": type(talk).__name__}
            for turn, talk in zip(turns, messages)]
"""
    path = custom(tmp_path, source).custom_reward_function.path
    name = "many" if batch else "compute_score"
    config = RewardConfig(functions={"own": {"path": path, "name": name, "batch": batch}})
    result = Reward(config)(episodes(table(["a", "b"]), messages=TALK))
    assert errors(result) == [None, None] and scores(result) == [1.0, 2.0]
    assert [part["own/last"] for part in parts(result)] == ["a", "\u00e9"]
    assert {part["own/kinds"] for part in parts(result)} == {"list"}


def test_a_batch_function_gets_them_in_its_table(tmp_path: Path) -> None:
    source = """
import json
def compute_score(table):
    assert table.column_names[4:] == ["messages", "turns"]
    talks = map(json.loads, table["messages"].to_pylist())
    return [len(talk) * 10 + turns for talk, turns in zip(talks, table["turns"].to_pylist())]
"""
    path = custom(tmp_path, source).custom_reward_function.path
    result = Reward(RewardConfig(functions={"own": {"path": path, "batch": True}}))(
        episodes(table(["a", "b"]), messages=TALK)
    )
    assert errors(result) == [None, None] and scores(result) == [21.0, 32.0]


def test_a_function_that_asks_for_what_rows_do_not_have_says_so(tmp_path: Path) -> None:
    config = custom(tmp_path, "def compute_score(messages, **row): return 1")
    assert "missing 1 required positional argument: 'messages'" in errors(Reward(config)(table(["a"])))[0]
    # A setting of that name is the user's own, in episodes too.
    config = custom(tmp_path, "def compute_score(turns, **row): return turns", reward_kwargs={"turns": 5})
    assert scores(Reward(config)(table(["a"]))) == scores(Reward(config)(episodes(table(["a"])))) == [5.0]


def test_the_dry_call_makes_an_episode(tmp_path: Path) -> None:
    source = """
def compute_score(messages, turns, **row):
    return {"score": turns, "last": messages[-1]["content"], "first": messages[0]["content"], "part": len(messages)}
"""
    config = custom(tmp_path, source)
    fine = ("anything", json.dumps(RESPONSE))
    for reward in ("function", "sum"):
        agent = AgentConfig(environment="m:E", reward=reward)
        assert dry_call(prompts(fine), config, {"k": ["part"]}, agent) == {"anything": (1.0, None)}
    with pytest.raises(ValueError, match="has no number 'acc'"):
        dry_call(prompts(fine), config, {"k": ["acc"]}, AgentConfig(tools=["m:f"]))
    assert dry_call(prompts(fine), config, {"k": ["acc"]}, agent) == {
        "anything": (1.0, None)
    }  # the environment may give it
    # Where the environment scores alone, no rule is looked for and nothing is tried.
    agent = AgentConfig(environment="m:E")
    check_sources({None: ["no rule"]}, RewardConfig(), agent)
    assert dry_call(prompts(fine), RewardConfig(), {}, agent) == {}
