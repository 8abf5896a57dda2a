"""verl's interactions and tools run as they are."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipeline.agent import Message, Observation, ToolResult
from pipeline.agent.errors import EpisodeFailed, PolicyMistake
from pipeline.agent.inside.load import load
from pipeline.agent.processes import Processes
from pipeline.agent.tokens.pictures import decoded
from pipeline.config.agent import AgentConfig
from tests.agent.test_processes import ROW, run

INTERACTION = """
from typing import Any, Optional
from uuid import uuid4
from verl.interactions.base import BaseInteraction

class Guess(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self.seen = {}

    async def start_interaction(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        self.seen[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs):
        if messages[-1]["content"] == "tuple":
            return "too short"
        right = messages[-1]["content"] == self.seen[instance_id]
        roles = " ".join(one["role"] for one in messages)
        return right, roles, float(right) * self.config["scale"], {"n": len(messages)}

    async def finalize_interaction(self, instance_id: str, **kwargs):
        with open(self.config["file"], "w") as file:
            file.write(self.seen.pop(instance_id))
"""

TOOL = """
from typing import Any, Optional
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class Count(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.counts = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs):
        instance_id, response = await super().create(instance_id)
        self.counts[instance_id] = kwargs["create_kwargs"]["start"]
        return instance_id, response

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        self.counts[instance_id] += parameters["by"] * self.config["scale"]
        return ToolResponse(text=str(self.counts[instance_id])), 0.5, {}

    async def release(self, instance_id: str, **kwargs):
        with open(self.config["file"], "w") as file:
            file.write(str(self.counts.pop(instance_id)))

class Old(BaseTool):
    def get_openai_tool_schema(self):
        function = {"name": "old", "description": "Do.", "parameters": {"type": "object", "properties": {}}}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(self, instance_id: Optional[str] = None, start: int = 0) -> str:
        return str(start)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        return f"text of {instance_id}", 0.0, {}

class Bare(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return "", 0.0, {}

class Picture(Old):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(image=["pixels"]), 0.0, {}

class Pictures(Old):
    async def execute(self, instance_id, parameters, **kwargs):
        from PIL import Image
        return ToolResponse(text="two", image=[Image.new("RGB", (8, 4)), b"bytes"]), 0.0, {}

class Film(Old):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(video=["frames"]), 0.0, {}
"""

YAML = """
tools:
  - class_name: {module}.Count
    config: {{type: native, scale: 10, file: {file}}}
    tool_schema:
      type: function
      function:
        name: count
        description: Count.
        parameters:
          type: object
          properties:
            by: {{type: integer, description: how far, enum: [1, 2]}}
          required: [by]
"""

FUNCTIONS = """
from verl.tools.function_tool import function_tool

@function_tool
async def add(a: int, b: int) -> str:
    '''Add.

    Args:
        a: one.
        b: other.
    '''
    return str(a + b), 0.5

@function_tool("take")
def subtract(a: int) -> dict:
    '''Take.

    Args:
        a: one.
    '''
    return {"left": -a}

def helper():
    pass
"""


def test_an_interaction_is_an_environment(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(INTERACTION)
    row = {
        **ROW,
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "extra_info": {"interaction_kwargs": {"name": "guess", "ground_truth": "7"}},
    }

    async def play(processes: Processes) -> None:
        assert (await processes.start()).closes
        session = await processes.open(row, 1, 30)
        assert session.opened is None
        assert await session.step(Message("5"), 10) == Observation("system user assistant", False, 0.0, {"n": 3})
        assert await session.step(Message("7"), 10) == Observation(None, True, 2.0, {"n": 5})
        await session.close()
        other = await processes.open(row, 1, 30)
        with pytest.raises(EpisodeFailed, match="generate_response returned 'too short'; expected"):
            await other.step(Message("tuple"), 10)

    kwargs = {"scale": 2, "file": str(tmp_path / "closed")}
    run(AgentConfig(environment=f"{tmp_path}/guess.py:Guess", kwargs=kwargs), play)
    assert (tmp_path / "closed").read_text() == "7"


def test_tools_of_a_yaml_file_and_classes_and_functions(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(TOOL)
    (tmp_path / "adding.py").write_text(FUNCTIONS)
    (tmp_path / "tools.yaml").write_text(YAML.format(module="counting", file=tmp_path / "released"))
    row = {**ROW, "extra_info": {"tools_kwargs": {"count": {"create_kwargs": {"start": 5}}}}}

    async def play(processes: Processes) -> None:
        loaded = await processes.start()
        assert [tool["function"]["name"] for tool in loaded.tools] == ["count", "old", "add", "take"]
        by = {"type": "integer", "description": "how far", "enum": [1, 2]}
        assert loaded.tools[0]["function"]["parameters"]["properties"] == {"by": by}
        for fresh in (True, False):
            session = await processes.open(row, 1, 30)
            assert session.fresh is fresh
            assert [await session.call("count", {"by": by}, 10) for by in (1, 2)] == ["15", "35"]
            await session.close(True)
            await session.closing
        session = await processes.open(row, 1, 30)
        assert await session.call("old", {}, 10) == "text of 0"
        assert await session.call("add", {"a": 1, "b": 2}, 10) == "3"
        assert await session.call("take", {"a": 1}, 10) == '{"left": -1}'
        with pytest.raises(PolicyMistake, match=r"the argument by of count: 3 is not one of \[1, 2\]"):
            await session.call("count", {"by": 3}, 10)
        await session.close()

    file = f"{tmp_path}/counting.py"
    tools = [f"{tmp_path}/tools.yaml", f"{file}:Old", f"{tmp_path}/adding.py"]
    settings: Any = {"env_vars": {"PYTHONPATH": str(tmp_path)}, "python": sys.executable, "episodes_per_process": 2}
    run(AgentConfig(tools=tools, **settings), play)
    assert (tmp_path / "released").read_text() == "35"


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("Picture", "returned a str as an image; return an image of pillow, or bytes"),
        ("Film", "returned a video; only"),
    ],
)
def test_a_tool_that_answers_with_something_unreadable_fails_its_row(tmp_path: Path, tool: str, words: str) -> None:
    (tmp_path / "counting.py").write_text(TOOL)

    async def play(processes: Processes) -> None:
        session = await processes.open(ROW, 1, 30)
        with pytest.raises(EpisodeFailed, match=words):
            await session.call("old", {}, 10)

    run(AgentConfig(tools=[f"{tmp_path}/counting.py:{tool}"]), play)


def test_a_tool_answers_with_images_before_its_text(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(TOOL)

    async def play(processes: Processes) -> None:
        session = await processes.open(ROW, 1, 30)
        shown = await session.call("old", {}, 10, True)
        assert isinstance(shown, ToolResult) and shown.text == "<image><image>two" and shown.plain is None
        first, second = decoded(shown.images)
        assert Image.open(io.BytesIO(first)).size == (8, 4) and second == b"bytes"

    run(AgentConfig(tools=[f"{tmp_path}/counting.py:Pictures"]), play)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "x: 1", "agent.tools[0]: {folder}/a.yaml is no file of tools as verl's"),
        (
            "a.yaml",
            "tools: [{class_name: x.Y, config: {type: mcp}}]",
            "only native ones; write its servers into agent.tools as mcp: COMMAND or mcp: URL",
        ),
        ("a.yaml", "tools: [{class_name: x.Y, mcp: {}}]", "a tool of the type mcp cannot be used"),
        ("a.yaml", "tools: [{class_name: Y}]", "class_name is Y; expected module.Class"),
        (
            "a.yaml",
            "tools: [{class_name: no.where.Y}]",
            "agent.tools[0]: importing no.where failed with Module",
        ),
        ("bare.py:Bare", TOOL, "agent.tools[0]: Bare: it has no schema; give `tool_schema` in verl's YAML file"),
        ("far.py", "import verl.utils.reward_score", "ModuleNotFoundError: No module named 'verl.utils.reward_score'"),
    ],
)
def test_what_cannot_be_used_is_a_sentence(tmp_path: Path, monkeypatch: Any, name: str, text: str, words: str) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    (tmp_path / name.partition(":")[0]).write_text(text)
    with pytest.raises(ValueError) as refused:
        load(None, {}, [f"{tmp_path}/{name}"])
    for module in [module for module in sys.modules if module.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, module)
    assert words.format(folder=tmp_path) in str(refused.value)
