"""What becomes of verl's turns, tools and interactions."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.agent import AgentConfig
from tests.jobs.verl.test_convert import ROLLOUT, converted, left, notes, values

TURNS = f"{ROLLOUT}.multi_turn"
TOOLS = f"{TURNS}.tool_config_path=/code/tools.yaml"
INTERACTION = """
interaction:
  - name: "gsm8k"
    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {hint: true}
"""


def agent(*arguments: str) -> dict[str, Any]:
    return {key.removeprefix("agent."): value for key, value in values(*arguments).items() if key.startswith("agent.")}


@pytest.fixture
def interaction(tmp_path: Path) -> Path:
    path = tmp_path / "interaction.yaml"
    path.write_text(INTERACTION)
    return path


def test_tools_with_verls_defaults() -> None:
    """verl's defaults differ from ours: one call at a time, replies of 256 characters, no limit to turns."""
    expected = {
        "tools": ["/code/tools.yaml", "/code/tools.py"],
        "max_turns": 100,
        "max_observation_tokens": 256,
        "max_parallel_calls": 1,
    }
    given = (f"{TURNS}.enable=True", TOOLS, f"{TURNS}.function_tool_path=/code/tools.py")
    assert agent(*given) == expected
    result = converted(*given)
    assert not result.left and len(result.converted) == 3
    for part in (
        "verl sets no limit to turns; agent.max_turns=100 does",
        "counts tokens, where verl counts characters",
        "rows without an agent_name have the tools of agent.tools, too; verl's have none",
        "a tool that fails makes its row an error",
        "gets the last answer alone",
    ):
        assert part in "\n".join(result.notes)
    assert "agent_name" not in notes(*given, f"{ROLLOUT}.agent.default_agent_loop=tool_agent")


def test_tools_have_the_variables_of_verls_workers() -> None:
    variable = "ray_kwargs.ray_init.runtime_env.env_vars.RETRIEVAL_TOPK=3"
    assert agent(TOOLS, variable)["env_vars"] == {"RETRIEVAL_TOPK": "3"}
    assert "env_vars" not in agent(variable)


@pytest.mark.parametrize(
    ("limits", "turns"),
    [
        (["max_assistant_turns=5"], 5),
        # verl ends an episode at the answer behind the last reply.
        (["max_user_turns=3"], 4),
        (["max_user_turns=3", "max_assistant_turns=5"], 4),
        (["max_user_turns=9", "max_assistant_turns=5"], 5),
        (["max_user_turns=null", "max_assistant_turns=null"], 100),
    ],
)
def test_turns(limits: list[str], turns: int) -> None:
    assert {**vars(AgentConfig()), **agent(TOOLS, *(f"{TURNS}.{limit}" for limit in limits))}["max_turns"] == turns


@pytest.mark.parametrize(
    ("format", "parser"), [("hermes", "hermes"), ("gpt-oss", "openai"), ("glm", None), ("mine", None)]
)
def test_formats_are_vllms_parsers(format: str, parser: str | None) -> None:
    given = (TOOLS, f"{TURNS}.format={format}")
    assert agent(*given).get("parser") == parser
    assert (f"{TURNS}.format" in left(*given)) == (parser is None)


def test_a_reply_is_cut_in_the_middle_alone() -> None:
    key = f"{TURNS}.tool_response_truncate_side"
    assert left(TOOLS, f"{key}=left")[key] == ("a reply that is too long is cut in the middle", True)
    assert not left(TOOLS, f"{key}=middle")
    assert agent(TOOLS, f"{TURNS}.max_tool_response_length=4")["max_observation_tokens"] == 8


def test_the_interaction_of_a_file(interaction: Path) -> None:
    expected = {
        "environment": "verl.interactions.gsm8k_interaction:Gsm8kInteraction",
        "kwargs": {"hint": True},
        "reward": "function",
        "max_turns": 100,
        "max_observation_tokens": 256,
    }
    assert agent(f"{TURNS}.interaction_config_path={interaction}") == expected


@pytest.mark.parametrize(
    "text", [None, "interaction: []", INTERACTION + INTERACTION.splitlines()[2], "interaction: 3", "[", "x: &a [*a]"]
)
def test_an_interaction_that_is_not_known_is_to_be_written(interaction: Path, text: str | None) -> None:
    interaction.unlink()
    if text is not None:
        interaction.write_text(text)
    key = f"{TURNS}.interaction_config_path"
    reason, cannot = left(f"{TURNS}.enable=true", f"{key}={interaction}")[key]
    assert "give agent.environment=module:Class" in reason and cannot
    assert not agent(f"{key}={interaction}")


@pytest.mark.parametrize("given", [[TOOLS, f"{TURNS}.enable=False"], [f"{TURNS}.enable=True"]])
def test_what_takes_no_turns_is_left_without_harm(given: list[str]) -> None:
    given = [
        *given,
        f"{TURNS}.format=hermes",
        f"{TURNS}.max_user_turns=2",
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
    ]
    assert not agent(*given)
    entries = left(*given)
    assert len(entries) == len(given)
    assert all("nothing here takes turns" in reason and not cannot for reason, cannot in entries.values())


@pytest.mark.parametrize(
    ("given", "part", "cannot"),
    [
        (f"{ROLLOUT}.agent.default_agent_loop=react_agent", "agent loops do not run here", True),
        ("data.tool_config_path=/code/tools.yaml", "prompts are made with the tools of agent.tools", False),
        (f"{TURNS}.tool_config_path=[a,b]", "does not fit agent.tools", True),
        (f"{TURNS}.tokenization_sanity_check_mode=strict", "never encoded again", False),
        ("data.return_raw_chat=True", "prompts are read as a stream", False),
    ],
)
def test_what_is_named(given: str, part: str, cannot: bool) -> None:
    ((reason, lost),) = left(given).values()
    assert part in reason and lost is cannot
