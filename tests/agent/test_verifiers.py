"""Environments of verifiers, in an interpreter that has it, against the endpoint and a scripted policy.

VERIFIERS_PYTHON=/venvs/games/bin/python python -m pytest -m long tests/agent/test_verifiers.py
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.agent.episode import Episode
from tests.agent.endpoint.test_server import command
from tests.agent.test_episode import ROW, Policy, text

PYTHON = os.environ.get("VERIFIERS_PYTHON", "")
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "agents" / "verifiers_env.py"
ENVIRONMENT = '''
import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    fails = ""

    async def env_response(self, messages, state, **kwargs):
        if self.fails == "step":
            raise ValueError("the board is lost")
        if self.fails == "verifiers":
            raise vf.ToolError("the server is gone")
        if messages[-1].content == state["answer"]:
            state["won"] = True
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": state["info"].get("hint", "up")}]


def calc(x: int) -> str:
    """Seven times x."""
    return str(7 * x)


def load_environment(fails="", tools=False):
    if fails == "load":
        raise FileNotFoundError("no such board")

    def won(state, **kwargs):
        if fails == "reward":
            raise KeyError("judge")
        return float(state.get("won", False)) + 0.5

    def both(states, **kwargs):
        return [0.0] * len(states)

    def rows():
        return Dataset.from_list([{"question": "begin", "answer": "40", "info": {"hint": "less"}}] * 2)

    print("a line of the environment")
    rubric = vf.Rubric(funcs=[both if fails == "group" else won])
    if tools:
        return vf.ToolEnv(tools=[calc], dataset=rows, rubric=rubric)
    environment = Guess(dataset=rows, rubric=rubric)
    environment.fails = fails
    return environment
'''

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="VERIFIERS_PYTHON names no interpreter that has verifiers before 0.4"),
]
Play = Callable[..., Episode]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment, and the rows of its dataset, as the script writes them."""
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "guess.py").write_text(ENVIRONMENT)
    rows = [PYTHON, str(SCRIPT), str(folder / "guess.py"), "--rows", str(folder / "rows.parquet")]
    subprocess.run(rows, check=True, timeout=300)
    return folder


@pytest.fixture
def play(folder: Path) -> Play:
    def play(policy: Policy, row: dict[str, Any] = ROW, kwargs: dict[str, Any] | None = None, **config: Any) -> Episode:
        arguments = [PYTHON, str(SCRIPT), str(folder / "guess.py"), "--kwargs", json.dumps(kwargs or {})]
        return command(f"import os; os.execv({PYTHON!r}, {arguments!r})", policy, start="", row=row, **config)

    return play


def test_an_episode_has_the_reward_and_the_metrics_of_the_environment(play: Play) -> None:
    played = play(Policy("99", "1"))
    assert (played.error, played.ended, played.score) == (None, "done", 1.5)
    assert played.parts == {"won": 1.5, "num_turns": 2}
    (context,) = played.contexts
    assert text(context.prompt_ids) == "go" and text(context.ids) == "99$<up>1$"
    assert context.mask == [1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert [span[2] for span in context.spans] == [None, None, 1.5]


def test_rows_of_the_dataset_are_played_as_verifiers_would(play: Play, folder: Path) -> None:
    rows = pq.read_table(folder / "rows.parquet").to_pylist()
    assert len(rows) == 2
    row = {**rows[1], "ground_truth": rows[1].pop("reward_model")["ground_truth"]}
    assert row["ground_truth"] == "40" and row["prompt"] == [{"role": "user", "content": "begin"}]
    played = play(Policy("1", "40"), row)
    assert (played.error, played.score, text(played.contexts[0].ids)) == (None, 1.5, "1$<less>40$")


def test_tools_of_the_environment_are_called(play: Play) -> None:
    played = play(Policy("call calc", "7"), kwargs={"tools": True})
    assert (played.error, played.score, text(played.contexts[0].ids)) == (None, 0.5, "call calc$<7>7$")
    assert played.numbers["calls"] == {"calc": 1}


def test_what_the_policy_brings_about_is_scored(play: Play) -> None:
    over = play(Policy("99"), max_turns=1)
    assert (over.error, over.ended, over.score, over.parts["num_turns"]) == (None, "turns", 0.5, 1)
    full = play(Policy("99"), longest=6)
    assert (full.error, full.ended, full.score) == (None, "length", 0.5)
    empty = play(Policy("99", ""))
    assert (empty.error, empty.ended, empty.score) == (None, "done", 0.5)
    assert text(empty.contexts[0].ids) == "99$<up>$"


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("load", "FileNotFoundError: no such board"),
        ("step", "ValueError: the board is lost"),
        ("verifiers", "verifiers ended the episode with an error: ToolError('the server is gone')"),
        ("reward", "Error calling reward function won: 'judge'"),
        ("group", "rewards groups"),
    ],
)
def test_an_environment_that_fails_is_an_error_and_no_zero(play: Play, fails: str, words: str) -> None:
    played = play(Policy("99", "1"), kwargs={"fails": fails})
    assert played.ended == "error" and words in str(played.error), played.error
    assert "agent.command ended with exit code 1" in str(played.error)
