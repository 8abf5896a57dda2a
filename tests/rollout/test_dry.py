"""The first episodes, tried before engines start: what is shown, and what is refused with the user's file and line."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from pipeline.agent.episode import Episode
from pipeline.config import Config
from pipeline.generation import Generation
from pipeline.rollout.dry import dry_episodes
from pipeline.rollout.engine import Lease
from pipeline.rollout.episodes import Episodes
from pipeline.sampling import Sampling

GAME = '''
import os, signal
from pipeline.agent import Environment, Observation, tool

class Game(Environment):
    def __init__(self, opening="Guess."):
        self.opening = opening

    def reset(self, row, seed):
        self.number = int(row["ground_truth"])
        return self.opening

    def step(self, message):
        return Observation("higher", reward=0.5)

class Sure(Game):
    def step(self, message):
        return Observation(done=int(message.text) == self.number)

class Fatal(Game):
    def __init__(self, died, most):
        super().__init__()
        self.died, self.most = died, most

    def step(self, message):
        with open(self.died, "a") as file:
            if self.number == 2 and file.tell() < self.most:
                file.write("x")
                file.flush()
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(message)

class Equipped(Game):
    @tool
    def weigh(self, fruit: str) -> str:
        """Its weight."""
        return f"{self.number} of {fruit}"
'''
ALWAYS = """
class Always(Game):
    def step(self, message):
        return Observation("always", reward=1.0)
"""
TOOLS = '''
from pipeline.agent import tool

@tool
def calc(expression: str) -> str:
    """Its value."""
    return str(eval(expression))

@tool
def look(place: int) -> str:
    """What is there."""
    return "x" * 1000
'''


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "tools.py").write_text(TOOLS)
    config = Config()
    config.agent.environment = f"{tmp_path}/game.py:Game"
    return config


def prompts(*truths: Any) -> list[pa.Table]:
    """One table for each prompt."""
    prompt = json.dumps([{"role": "user", "content": "Find it."}])
    row = {"prompt": prompt, "data_source": "game", "extra_info": "{}", "agent_name": None}
    changes = [{"uid": f"0-{number}", "ground_truth": json.dumps(truth)} for number, truth in enumerate(truths)]
    return [pa.Table.from_pylist([row | change]) for change in changes]


def tried(config: Config, tokenizer: Any, *truths: Any, calls: bool = False) -> dict[str, str]:
    return dict(dry_episodes(config, tokenizer, prompts(*(truths or (1, 2))), calls))


def test_what_is_shown_of_an_environment(config: Config, tokenizer: Any) -> None:
    config.agent.max_turns = 5
    lines = tried(config, tokenizer)
    assert lines["episodes"].startswith("5 answers at most; continuations proven for role user")
    start = "<|im_start|>user\nFind it.<|im_end|>\n<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"
    assert lines["first prompt"] == start
    assert lines["reply to 'The answer is 42.'"] == "'higher', reward 0.5; the episode goes on"
    assert len(lines) == 3


@pytest.mark.vllm
def test_tools_that_the_template_does_not_show_are_noted(
    config: Config, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.agent.environment, config.agent.tools = None, [f"{tmp_path}/tools.py"]
    config.data.max_prompt_length = 1024
    assert "note" not in tried(config, tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template.replace("{% if tools %}", "{% if false %}"))
    assert "leaves out the schemas of the tools" in tried(config, tokenizer)["note"]


@pytest.mark.parametrize(("deaths", "failed"), [(1, False), (1000, True)])
def test_episodes_begin_again_once_when_the_process_that_starts_theirs_dies(
    config: Config, tokenizer: Any, tmp_path: Path, deaths: int, failed: bool
) -> None:
    before = tried(config, tokenizer, *"123")
    died = tmp_path / "died"
    config.agent.environment = f"{tmp_path}/game.py:Fatal"
    config.agent.kwargs = {"died": str(died), "most": deaths}
    if failed:
        with pytest.raises(ValueError, match="the process that starts those of episodes ended with signal SIGKILL"):
            tried(config, tokenizer, *"222")
        assert died.stat().st_size > 1
    else:
        assert tried(config, tokenizer, *"123") == before
        assert died.read_text() == "x"


def test_some_episodes_may_fail(config: Config, tokenizer: Any) -> None:
    """Of the first four; the prompt that is shown is that of one that did not."""
    lines = tried(config, tokenizer, "one", 2, 3, 4, "five")
    assert lines["failed episodes"].startswith("1 of the first 4: ValueError: invalid literal for int()")
    assert lines["failed episodes"].endswith("(game.py, line 10)") and "Find it." in lines["first prompt"]


@pytest.mark.vllm
def test_what_is_shown_of_an_mcp_server(config: Config, tokenizer: Any) -> None:
    config.agent.environment, config.data.max_prompt_length = None, 1024
    config.agent.tools = [f"mcp: python {Path(__file__).parents[1] / 'agent' / 'mcp_tools.py'} stdio few"]
    lines = tried(config, tokenizer, calls=True)
    assert lines["tools"].startswith("price(fruit, pieces), add(fruits); ")
    assert '"description": "What pieces of a fruit cost."' in lines["first prompt"]
    assert "Error executing tool price: there is no a" in lines["made-up call of price"]
    assert lines["made-up call of add"].endswith("-> 'a \"b\" é 中'")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"environment": "{}/game.py:Sure"},
            "each of the first 2 prompts, with the made-up answer 'The answer is 42.'",
        ),
        ({"environment": "{}/game.py:Sure"}, "ValueError: invalid literal for int() with base 10: 'The answer is 42.'"),
        ({"environment": "{}/game.py:Sure"}, "(game.py, line 18)"),
        ({"environment": "{}/game.py:Gone"}, "agent.environment"),
        ({"environment": "{}/gone.py:Game"}, "agent.environment"),
        ({"kwargs": {"openning": 1}}, "agent.kwargs do not fit"),
        ({"kwargs": {"opening": "x" * 9999}}, "more than data.max_prompt_length=512"),
        ({"tools": ["{}/gone.py"]}, "agent.tools[0]"),
        ({"tools": ["mcp: false"]}, "agent.tools[0]: the MCP server 'false' ended with exit code 1"),
        ({"python": "/no/python"}, "agent.python"),
        ({"parser": "hermes"}, "agent.parser=hermes finds calls of tools, and there are none"),
        ({"observation_role": "tool"}, "role 'tool'"),
    ],
)
def test_what_is_refused(config: Config, tokenizer: Any, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    for name, value in changes.items():
        if name in ("environment", "tools"):
            value = json.loads(json.dumps(value).replace("{}", str(tmp_path)))
        assert hasattr(config.agent, name)
        setattr(config.agent, name, value)
    if words == "role 'tool'":
        tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
        tokenizer.chat_template = tokenizer.chat_template.replace("message['role'] == 'tool'", "raise_exception('no')")
    with pytest.raises(ValueError) as error:
        tried(config, tokenizer)
    assert words in str(error.value)


def test_a_template_that_cannot_continue_is_refused(config: Config, tokenizer: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}x"
    with pytest.raises(ValueError, match="chat template cannot continue an answer with a message of role 'user'"):
        tried(config, tokenizer)


@pytest.mark.parametrize(
    ("stop", "parser", "words"),
    [(["end"], "auto", "rollout.stop=['end'] with tools"), ([], "none", "agent.parser=none with tools")],
)
def test_tools_of_an_environment_need_their_calls_whole(
    config: Config, tokenizer: Any, tmp_path: Path, stop: list[str], parser: str, words: str
) -> None:
    config.agent.environment, config.rollout.stop, config.agent.parser = f"{tmp_path}/game.py:Equipped", stop, parser
    with pytest.raises(ValueError) as error:
        tried(config, tokenizer)
    assert words in str(error.value)


def test_a_program_gets_the_answers_that_it_asks_for(config: Config, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "async def run(row, chat):\n    for word in ('one', 'two', 'three'):\n"
        "        await chat([{'role': 'user', 'content': word}])\n    return 0.5\n"
    )
    config.agent.environment, config.agent.program, config.agent.max_contexts = None, f"{tmp_path}/program.py:run", 3
    lines = tried(config, tokenizer)
    assert lines["reply to 'The answer is 42.'"] == "3 answers in 3 contexts, score 0.5"
    assert lines["first prompt"] == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    config.agent.max_contexts = 2
    with pytest.raises(ValueError, match="agent.max_contexts=2"):
        tried(config, tokenizer)


def test_a_command_asks_and_is_told_what_it_cannot_have(config: Config, tokenizer: Any) -> None:
    script = """
import json, os, urllib.request
row = json.load(open(os.environ["SLIPSTREAM_ROW"]))
body = {"messages": row["prompt"], "temperature": %s}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
try:
    answer = json.load(urllib.request.urlopen(url, json.dumps(body).encode()))
except urllib.error.HTTPError as error:
    raise SystemExit(json.load(error)["error"]["message"])
print(json.dumps({"reward": len(answer["choices"][0]["message"]["content"])}))
"""
    config.agent.environment, config.rollout.temperature = None, 0.9
    config.agent.command = ["python", "-c", script % 0.9]
    assert tried(config, tokenizer)["reply to 'The answer is 42.'"] == "nothing, reward 17; the episode ends (done)"
    config.agent.command = ["python", "-c", script % 1.0]
    with pytest.raises(ValueError, match="error: temperature=1.0: the run samples this answer with 0.9"):
        tried(config, tokenizer)


def named(*names: str | None) -> list[pa.Table]:
    """One prompt for each agent."""
    column = [pa.array([name], pa.string()) for name in names]
    return [
        one.drop("agent_name").append_column("agent_name", c) for one, c in zip(prompts(*names), column, strict=True)
    ]


def test_each_agent_plays_the_rows_that_choose_it(config: Config, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("async def run(row, chat):\n    await chat(row['prompt'])\n    return 0.25\n")
    config.agent.kwargs = {"opening": "Begin."}
    config.agent.named = {
        "other": {"environment": f"{tmp_path}/game.py:Always"},
        "program": {"program": f"{tmp_path}/program.py:run"},
    }
    (tmp_path / "game.py").write_text(GAME.replace('int(row["ground_truth"])', "0") + ALWAYS)

    class Told(Episodes):
        def _policy(self, *_: Any) -> Any:
            async def ask(ids: list[int], most: int, turn: int) -> Generation:
                tokens = np.array(tokenizer("Two.")["input_ids"], np.int32)
                return Generation(tokens, np.zeros(len(tokens), np.float32), "stop", ((0, len(tokens)),))

            return ask

    async def play(*names: str | None) -> list[Episode]:
        engine: Any = None
        episodes = Told(config.agent.agents(), config.data, tokenizer, engine, 0, seed_requests=False)
        table = pa.concat_tables(named(*names))
        sampling = Sampling.of(config.rollout, config.data.max_response_length, "train")
        try:
            await episodes.start(table)
            return await episodes.run(table, [[sampling]] * len(table), Lease(one_version=True))
        finally:
            await episodes.close()

    def told(episode: Episode) -> tuple[str, int, str, float, str | None]:
        spoken = " ".join(message["content"] for message in episode.messages if message["role"] == "user")
        return spoken, episode.turns, episode.ended, episode.score, episode.error

    config.agent.max_turns = 2
    names = (None, "program", "tool_agent", "other", "single_turn_agent")
    played = asyncio.run(play(*names))
    game = ("Find it. Begin. higher higher", 2, "turns", 1.0, None)
    # An agent with code of its own has the arguments of its own alone.
    assert [told(each) for each in played] == [
        game,
        ("Find it.", 1, "done", 0.25, None),
        game,
        ("Find it. Guess. always always", 2, "turns", 2.0, None),
        ("Find it.", 1, "stop", 0.0, None),
    ]
    assert played[4].response == "Two." and list(played[4].contexts[0].mask) == [1] * len(played[4].contexts[0].ids)


def test_the_first_episodes_of_each_agent(config: Config, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME.replace('int(row["ground_truth"])', "0") + ALWAYS)
    config.agent.environment = None
    config.agent.named = {"game": {"environment": f"{tmp_path}/game.py:Always", "max_turns": 3}, "idle": {}}
    config.agent.named["idle"] = {"environment": f"{tmp_path}/game.py:Game", "kwargs": {"opening": "Unread."}}
    lines = dict(dry_episodes(config, tokenizer, named(None, "game", "tool_agent"), False))
    assert lines["episodes"] == "single answers" and "Find it." in lines["first prompt"]
    assert lines["reply to 'The answer is 42.'"] == "nothing, no reward; the episode ends (stop)"
    assert lines["episodes of game"].startswith("3 answers at most; ")
    assert lines["reply to 'The answer is 42.' of game"] == "'always', reward 1; the episode goes on"
    # No prompt is of this one, so that it is only loaded.
    assert "episodes of idle" in lines and "first prompt of idle" not in lines
    config.agent.named["idle"]["kwargs"] = {"openning": "x"}
    with pytest.raises(ValueError, match=r"the agent idle: agent\.kwargs do not fit .*game\.py:Game"):
        dry_episodes(config, tokenizer, named(None), False)
    config.agent.named["idle"] = {"tools": ["mcp: false"]}
    with pytest.raises(
        ValueError, match=r"^the agent idle: agent\.tools\[0\]: the MCP server 'false' ended with exit code 1"
    ):
        dry_episodes(config, tokenizer, named(None), False)
    config.agent.named["idle"] = {"environment": f"{tmp_path}/game.py:Sure"}
    with pytest.raises(ValueError, match=r"the agent idle: .*each of the first 1 prompts.*Check agent\.environment"):
        dry_episodes(config, tokenizer, named("idle"), False)


@pytest.mark.vllm
def test_a_program_shows_tools_of_its_own(config: Config, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from pipeline.agent.schema import schema_of\n\ndef weigh(fruit: str) -> str:\n    'Weigh it.'\n\n"
        "async def run(row, chat):\n    tools = [schema_of(weigh)]\n"
        "    answer = await chat(row['prompt'], tools)\n    assert answer.calls == [] and 'answer' in answer.text\n"
        "    await chat([*row['prompt'], answer, {'role': 'user', 'content': 'Once more.'}], tools)\n    return 0.5\n"
    )
    config.agent.environment, config.agent.program = None, f"{tmp_path}/program.py:run"
    config.data.max_prompt_length = 1024
    lines = tried(config, tokenizer)
    assert '"name": "weigh"' in lines["first prompt"]
    assert lines["reply to 'The answer is 42.'"] == "'Once more.', no reward; the episode goes on"
    config.rollout.stop = ["end"]
    with pytest.raises(ValueError, match="stop is .'end'. where the policy is shown tools"):
        tried(config, tokenizer)


@pytest.mark.vllm
def test_tools_are_called_with_made_up_arguments(config: Config, tokenizer: Any, tmp_path: Path) -> None:
    """A tool that raises is named and refuses nothing: the arguments were no model's."""
    config.agent.environment, config.agent.tools = f"{tmp_path}/game.py:Equipped", [f"{tmp_path}/tools.py"]
    config.data.max_prompt_length = 1024
    lines = tried(config, tokenizer, calls=True)
    assert lines["tools"].startswith("weigh(fruit), calc(expression), look(place); tool parser hermes")
    assert '"name": "calc"' in lines["first prompt"] and '"name": "look"' in lines["first prompt"]
    assert lines["made-up call of look"].startswith("{'place': 12} -> 'xxx") and lines["made-up call of look"].endswith(
        "..."
    )
    failed = lines["made-up call of calc"]
    assert "the row would be an error: SyntaxError" in failed and "raise ToolError" in failed
    assert not any(name.startswith("made-up") for name in tried(config, tokenizer))
    config.agent.parser = "llama3_json"
    with pytest.raises(ValueError, match="agent.parser=llama3_json: .* does not.*hermes"):
        tried(config, tokenizer)
