"""The examples of environments and tools, in environment processes, on the rows that are prepared for them."""

import asyncio
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.prepare import calculator, lookup
from jobs.prepare.__main__ import main
from jobs.tiny import build_tokenizer, texts
from pipeline.agent import Call, Message, Observation, ToolError
from pipeline.agent.errors import PolicyMistake
from pipeline.agent.inside.load import load
from pipeline.agent.processes import Processes
from pipeline.config import load_config
from pipeline.config.agent import AgentConfig
from pipeline.config.supervised import SFTDataConfig
from pipeline.supervised.sft_data import SFTEncoder
from tests.agent.test_processes import run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "agents"
HIGHER_LOWER = f"{EXAMPLES / 'higher_lower.py'}:HigherLower"
LOOKUP = f"{EXAMPLES / 'lookup.py'}:Lookup"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for task in ("higher_lower", "calculator", "lookup"):
        assert main([task, "--out", str(folder / task), "--train", "5", "--sft", "40"]) == 0
    return folder


def first_row(files: Path, task: str) -> dict[str, Any]:
    row = pq.read_table(files / task / "test.parquet").slice(0, 1).to_pylist()[0]
    return {**row, "ground_truth": row["reward_model"]["ground_truth"]}


def test_a_guess_earns_by_what_it_excludes_and_replies_may_be_dots() -> None:
    game = runpy.run_path(str(EXAMPLES / "higher_lower.py"))["HigherLower"](worth=0.5, blind=True)
    game.reset({"ground_truth": "40"}, 0)
    seen = [game.step(Message(guess)) for guess in ("32", "32", "48", "47", "no", "40")]
    # Of 1 to 63, then 33 to 63 and 33 to 47.
    assert [each.reward for each in seen] == pytest.approx([0.5, 0, 0.5, 0.5 / 8, 0, 1])
    assert [each.content for each in seen] == ["."] * 5 + [None]


def test_a_table_may_be_hidden() -> None:
    table = runpy.run_path(str(EXAMPLES / "lookup.py"))["Lookup"](blind=True)
    table.reset({"ground_truth": "10 1"}, 1)
    assert {table.get(key) for key in range(10, 100)} == {"."}


def test_higher_and_lower(files: Path) -> None:
    """The first test row hides 1."""

    async def play(processes: Processes) -> None:
        row = first_row(files, "higher_lower")
        sessions = [await processes.open(row, 7, 10) for _ in range(2)]
        assert sessions[0].opened is None
        right = [await sessions[0].step(Message(guess), 10) for guess in ("32", "0", " 1\n")]
        parts = [{"acc": 0, "guesses": 1}, {"acc": 0, "guesses": 2}, {"acc": 1, "guesses": 3}]
        assert right[0] == Observation("lower", False, 0.0, parts[0])
        assert right[1] == Observation("higher", False, 0.0, parts[1])
        assert right[2] == Observation(None, True, 1.0, parts[2])
        wrong = [await sessions[1].step(Message(guess), 10) for guess in ("no", "9" * 5000, "٣", "", "-1", "2")]
        assert [seen.content for seen in wrong] == [
            "A number.",
            "A number.",
            "lower",
            "A number.",
            "A number.",
            "lower",
        ]
        assert [seen.done for seen in wrong] == [False] * 5 + [True] and not any(seen.reward for seen in wrong)

    run(AgentConfig(environment=HIGHER_LOWER), play)


def test_a_table_that_only_its_tool_can_read(files: Path) -> None:
    """The first test row asks for one step from 10."""

    async def play(processes: Processes) -> None:
        loaded = await processes.start()
        assert loaded.tools == lookup.TOOLS and loaded.environment
        row = first_row(files, "lookup")
        one, same, other = [await processes.open(row, seed, 10) for seed in (1, 1, 2)]
        seen = [await session.call("get", {"key": 10}, 10) for session in (one, same, other)]
        assert seen[0] == seen[1] != seen[2]
        for arguments, words in (
            ({"key": 9}, "no such key"),
            ({"key": "10"}, "'10' is not of type 'integer'"),
            ({}, "is missing"),
        ):
            with pytest.raises(PolicyMistake, match=words):
                await one.call("get", arguments, 10)
        assert await one.step(Message(seen[0]), 10) == Observation(None, True, 1.0, {"acc": 1})
        assert await other.step(Message(seen[0]), 10) == Observation(None, True, 0.0, {"acc": 0})
        further = await processes.open({**row, "ground_truth": f"{row['ground_truth'][:2]} 3"}, 1, 10)
        key = 10
        for _ in range(3):
            key = int(await further.call("get", {"key": key}, 10))
        assert (await further.step(Message(str(key)), 10)).reward == 1.0

    run(AgentConfig(environment=LOOKUP), play)


def test_a_table_that_is_read_in_one_conversation_for_each_step() -> None:
    program = runpy.run_path(str(EXAMPLES / "lookup_program.py"))
    assert [program["TOOL"]] == lookup.TOOLS
    random.seed(3)
    table = {key: random.choice(program["KEYS"]) for key in program["KEYS"]}
    asked: list[list[Any]] = []

    async def policy(messages: list[Any], tools: list[dict[str, Any]]) -> Message:
        asked.append(messages)
        if messages[-1]["role"] == "tool":
            return Message(f" {messages[-1]['content']}\n")
        key = int(messages[-1]["content"].split()[1])
        return Message("", calls=[Call("call00000", "get", {"key": key})])

    def play(answers: Callable[..., Any], steps: int) -> tuple[Any, list[str]]:
        asked.clear()
        random.seed(3)
        row = {"ground_truth": f"10 {steps}", "prompt": [{"role": "user", "content": f"From 10 take {steps}."}]}
        return asyncio.run(program["run"](row, answers)), [messages[0]["content"] for messages in asked]

    first, second = table[10], table[table[10]]
    right = {"reward": 1.0, "acc": 1}
    assert play(policy, 1) == (right, ["From 10 take 1."] * 2)
    assert play(policy, 3) == (
        right,
        ["From 10 take 3.", f"From {first} take 2.", *[f"From {second} take 1."] * 2],
    )
    assert [len(messages) for messages in asked] == [1, 1, 1, 3] and asked[-1][2]["content"] == str(table[second])

    async def guess(messages: list[Any], tools: list[dict[str, Any]]) -> Message:
        return Message(str(table[10]))

    async def stray(messages: list[Any], tools: list[dict[str, Any]]) -> Message:
        return Message("", calls=[Call("call00000", "get", {"key": 7})])

    wrong = {"reward": 0.0, "acc": 0}
    assert play(guess, 1)[0] == right and play(guess, 2)[0] == play(stray, 2)[0] == wrong


@pytest.mark.parametrize("task", ["higher_lower", "calculator", "lookup"])
def test_the_experiment_of_a_task_has_its_files_and_holds_its_conversations(task: str, files: Path) -> None:
    config = load_config([f"experiment={task}_cpu"])
    code = load(config.agent.environment, {}, config.agent.tools)
    assert code.environment or code.tools
    made = files / task / "sft_train.parquet"
    tokenizer = build_tokenizer(texts([made], rows=40), 512)
    rows = pq.read_table(made)
    encoded = SFTEncoder(tokenizer, SFTDataConfig()).encode(rows, [""] * len(rows))
    prompt = max(mask.index(1) for mask in encoded["loss_mask"].to_pylist())
    longest = max(len(ids) for ids in encoded["input_ids"].to_pylist())
    assert prompt <= config.data.max_prompt_length and longest - prompt <= config.data.max_response_length
    for messages, mask in zip(rows["messages"].to_pylist(), encoded["loss_mask"].to_pylist(), strict=True):
        assert sum(message["role"] == "assistant" for message in messages) <= config.agent.max_turns
        answers = "".join(map(str, mask)).split("0")
        assert max(map(len, answers)) <= config.agent.max_turn_tokens


def test_two_tools_cannot_have_one_name(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "from pipeline.agent import Environment, tool\n\n\nclass Twice(Environment):\n"
        "    @tool\n    def a(self) -> str:\n        '''A.'''\n\n"
        "    @tool(name='a')\n    def b(self) -> str:\n        '''B.'''\n"
    )
    with pytest.raises(
        ValueError, match="agent.environment is .*twice.py:Twice, of which two methods are tools named a"
    ):
        load(f"{tmp_path / 'twice.py'}:Twice", {}, [])
    (tmp_path / "more.py").write_text(
        "from pipeline.agent import tool\n\n\n@tool\ndef get(key: int) -> str:\n    '''Get it.'''\n    return ''\n"
    )
    with pytest.raises(ValueError, match=r"agent.tools\[0\] is .*more.py, but another tool is named get too"):
        load(LOOKUP, {}, [str(tmp_path / "more.py")])


def test_a_calculator() -> None:
    code = load(None, {}, [str(EXAMPLES / "calculator.py")])
    assert [made.schema for made in code.tools.values()] == calculator.TOOLS
    calc: Any = code.tools["calc"].function
    for expression, value in {
        "347*29": "10063",
        " (3 + 4) * -25": "-175",
        "1/3": "0.3333333333",
        "4938271*.25": "1234567.75",
        "0.1+0.2": "0.3",
        "7/2*2": "7",
        f"{'9' * 49}*{'9' * 49}": str((10**49 - 1) ** 2),
    }.items():
        assert calc(expression) == value
    for expression in (
        "",
        "...",
        "3+",
        "2**999",
        "1//2",
        "2 (3)",
        "()",
        "1/0",
        "1e9",
        "x",
        "__import__('os')",
        "(" * 99,
        "1" * 101,
    ):
        with pytest.raises(ToolError):
            calc(expression)


@pytest.mark.parametrize(
    ("text", "score"), [("10063", 1.0), (" 10063\n", 1.0), ("010063", 0.0), ("10063.", 0.0), ("", 0.0)]
)
def test_a_product_is_right_or_wrong(text: str, score: float) -> None:
    function: Any = runpy.run_path(str(EXAMPLES / "calculator.py"))["compute_score"]
    assert function("calculator", text, "10063", {}) == score
