"""verl's turns, tools and interactions as `agent.*`."""

from pathlib import Path
from typing import Any

import yaml

from jobs.verl.keys import RULED
from jobs.verl.mcp import tools_of
from jobs.verl.state import State

_ROLLOUT = "actor_rollout_ref.rollout"
_TURNS = f"{_ROLLOUT}.multi_turn"
_LOOP = f"{_ROLLOUT}.agent.default_agent_loop"
_TOOLS = ("tool_config_path", "function_tool_path")
_INTERACTION = f"{_TURNS}.interaction_config_path"
_MOST_TURNS = 100
_PARSERS = {
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "gpt-oss": "openai",
    "qwen3_coder": "qwen3_coder",
    "seed": "seed_oss",
    "kimi": "kimi_k2",
    "deepseek_v4": "deepseek_v4",
    "gemma4": "gemma4",
}
"""verl's format of tool calls: vLLM's parser of the same."""
_UNUSED = "nothing here takes turns: there are no tools and no interaction, or they are switched off"


def episodes(state: State) -> None:
    """Convert turns with tools or an interaction, if verl is given them."""
    tools: list[str] = []
    off = state.given.get(f"{_TURNS}.enable") is False
    for name in _TOOLS:
        path = state.given.get(f"{_TURNS}.{name}")
        if isinstance(path, str) and path:
            has_servers = name == "tool_config_path" and not off
            tools += tools_of(state, f"{_TURNS}.{name}", path) if has_servers else [path]
        elif path:
            state.leave(f"{_TURNS}.{name}", "its value does not fit agent.tools: expected a file", cannot=True)
        state.leave(f"data.{name}", "prompts are made with the tools of agent.tools, which must be all of them")
    loop = state.given.get(_LOOP)
    if loop not in (None, "single_turn_agent", "tool_agent"):
        state.leave(
            _LOOP, "verl's agent loops do not run here; write an agent.environment or agent.program", cannot=True
        )
    environment = _interaction(state)
    if off or not (tools or environment):
        _leave(state)
        return
    state.set("agent.tools", tools)
    if environment:
        name, kwargs = environment
        state.set("agent.environment", name)
        state.set("agent.kwargs", kwargs)
        state.set("agent.reward", "function")
        state.notes.append("agent.reward=function: the scores of an interaction are in no reward of verl's, either")
    if variables := state.get("trainer.env_vars"):
        # Environment processes get no others.
        servers = state.get("agent.env_vars")
        state.set("agent.env_vars", {name: str(value) for name, value in variables.items()} | dict(servers))
    _limits(state)
    _replies(state)
    if tools:
        _calls(state)


def _leave(state: State) -> None:
    """Leave all keys of turns, because nothing reads them."""
    for key in state.given:
        if key in RULED and key.startswith((f"{_TURNS}.", _LOOP)) and key not in state.reasons:
            state.leave(key, _UNUSED)


def _interaction(state: State) -> tuple[str, dict[str, Any]] | None:
    """Return class and arguments of the only interaction in verl's file."""
    given = state.given.get(_INTERACTION)
    if not given:
        return None
    advice = (
        "give agent.environment=module:Class, its `class_name`, and agent.kwargs, its `config`; with several of them, "
        "write one class that chooses by extra_info"
    )
    try:
        [entry] = yaml.safe_load(Path(given).read_text(encoding="utf-8"))["interaction"]
        module, _, name = entry["class_name"].rpartition(".")
        kwargs = dict(entry.get("config") or {})
    except (OSError, TypeError, KeyError, ValueError, AttributeError, yaml.YAMLError):
        state.leave(_INTERACTION, f"no file with one interaction is there; {advice}", cannot=True)
        return None
    return f"{module}:{name}", kwargs


def _limits(state: State) -> None:
    """Set the turns of an episode. verl counts replies, too: one more answer follows the last reply."""
    answers, replies = (state.whole(f"{_TURNS}.max_{who}_turns", 0) for who in ("assistant", "user"))
    most = min((limit for limit in (answers, replies and replies + 1) if limit), default=_MOST_TURNS)
    state.set("agent.max_turns", most)
    if not (answers or replies):
        state.notes.append(f"verl sets no limit to turns; agent.max_turns={most} does")


def _replies(state: State) -> None:
    """Set the length of a reply."""
    most = state.whole(f"{_TURNS}.max_tool_response_length", 256)
    state.set("agent.max_observation_tokens", max(most, 8))
    state.notes.append(f"agent.max_observation_tokens={max(most, 8)} counts tokens, where verl counts characters")
    side = f"{_TURNS}.tool_response_truncate_side"
    if state.given.get(side) != "middle":
        state.leave(side, "a reply that is too long is cut in the middle", cannot=True)


def _calls(state: State) -> None:
    """Set the format of calls of tools, and the calls of an answer."""
    parallel = f"{_TURNS}.max_parallel_calls"
    state.set("agent.max_parallel_calls", state.whole(parallel, 1) or 1)
    written = f"{_TURNS}.format"
    parser = _PARSERS.get(str(state.given.get(written)))
    if parser:
        state.set("agent.parser", parser)
    else:
        state.leave(written, "agent.parser=auto finds the parser that reads the calls of the model's chat template")
    if state.given.get(_LOOP) != "tool_agent":
        state.notes.append("rows without an agent_name have the tools of agent.tools, too; verl's have none")
    state.notes.append(
        "a tool that fails makes its row an error; verl shows the model the exception, and so does a ToolError here"
    )
    state.notes.append("a reward function gets the last answer alone; verl's gets answers and replies in one text")
