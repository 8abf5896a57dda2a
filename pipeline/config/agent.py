"""Settings of multi-turn episodes (`agent.*`)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.bounds import setting

CODE = ("environment", "kwargs", "tools", "program", "command")
"""Keys of code that replies. An agent that has one of its own takes none of them from the section `agent`."""
TOOL_AGENT, SINGLE_TURN = "tool_agent", "single_turn_agent"
"""Agents that verl's files name: the section `agent` itself, and a single answer."""


@dataclass
class AgentConfig:
    """Episodes of several turns: the policy answers, an environment or tools reply, until the episode ends."""

    environment: str | None = setting(None, path="code")
    """Class that replies to answers: `my_game:HigherLower` or `/code/my_game.py:HigherLower`; or a server that does:
    `openenv:ws://localhost:8000`."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor; of an OpenEnv server `observation_field`, `action_field` and
    `reset_kwargs`."""

    tools: list[str] = setting([], path="code")
    """Tools that the policy may call: `my_tools:calc`, `/code/my_tools.py` for all of a file, or `mcp: COMMAND or URL`
    for all of an MCP server."""

    program: str | None = setting(None, path="code")
    """Function that drives an episode itself: `my_program:run`. `async def run(row, chat)` asks by `chat`, and
    `def run(row)` by an OpenAI or Anthropic client of its own."""

    command: list[str] = setting([], path="command")
    """Program that drives an episode itself, by an OpenAI or Anthropic client: `[python, my_agent.py]`. `python` stands
    for `agent.python`. It finds the row in the file SLIPSTREAM_ROW, and prints `{"reward": 1.0}` as its last line, or
    `{"rewards": [0.5, 0.5]}`, one for each answer."""

    max_contexts: int = setting(1, at_least=1)
    """Conversations of one episode, each a sequence of tokens; a program may begin several."""

    context: str = setting("keep", choices=("keep", "rerender"))
    """Earlier answers in the prompt of a later turn: `keep` them as sampled, or `rerender` them with the chat template,
    which leaves out thinking, for example. A turn for which that differs begins a new sequence of the row."""

    python: str | None = setting(None, path="program")
    """Interpreter of environment processes; null takes the run's own."""

    isolation: str = setting("none", choices=("none", "namespaces"))
    """`namespaces` (of Linux): environment processes have no network, and see no process and no file of the run but
    their own code, the interpreter and the system's programs. A run whose isolation does not work here is refused.
    `none`: they can do what the run can."""

    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables of environment processes, added to `PATH`, `HOME`, `LANG`, `LC_ALL`, `TMPDIR` and
    `VIRTUAL_ENV` of the run."""

    max_turns: int = setting(8, at_least=1)
    """Answers of the policy in one episode."""

    max_turn_tokens: int = setting(0, at_least=0)
    """Tokens of one answer; 0 leaves the answer what remains of `data.max_response_length`."""

    max_observation_tokens: int = setting(1024, at_least=8)
    """Tokens of the content of one reply; a longer one is cut in the middle, with a mark."""

    observation_role: str = setting("user", choices=("user", "tool"))
    """Role of replies that an environment gives as text."""

    parser: str = "auto"
    """Tool parser, by vLLM's name; `auto` takes the first that reads calls of the model's own template; `none`."""

    reasoning_parser: str = "none"
    """Reasoning parser, by vLLM's name; `none` leaves reasoning in the text."""

    max_parallel_calls: int = setting(8, at_least=1)
    """Tool calls of one answer; further ones get an error that the model reads."""

    on_malformed: str = setting("retry", choices=("retry", "end", "mask"))
    """A tool call that cannot be read: the model reads the error and may `retry`; `end` ends the episode; `mask` is
    `retry` without training on the answer."""

    reset_timeout_s: float = setting(60.0, above=0)
    """Seconds in which an environment must begin an episode; after them the row is an error."""

    step_timeout_s: float = setting(30.0, above=0)
    """Seconds in which an environment or a tool must reply; after them the row is an error."""

    episode_timeout_s: float = setting(600.0, above=0)
    """Seconds of one episode; after them `on_timeout` applies."""

    max_episodes: int = setting(4096, at_least=1)
    """Episodes that one engine plays at once, each in a process of its own; further ones wait. Of a `command` that
    imports large packages, as many as the machine has memory for."""

    episodes_per_process: int = setting(1, at_least=1)
    """Episodes that one process serves, one after the other ([multi_turn.md](multi_turn.md#where-your-code-runs)); with
    1 each has a fresh one."""

    on_timeout: str = setting("error", choices=("error", "score"))
    """An episode that exceeds `episode_timeout_s` is an `error`, or is ended and gets the `score` it has so far."""

    same_seed_in_group: bool = True
    """Give all episodes of a prompt's group the same seed, so that they are the same task."""

    reward: str | None = setting(None, choices=("environment", "function", "sum", None))
    """Score of a row: the rewards of the `environment` or the program, the reward `function`'s, or the `sum`; null
    takes the environment's where there is one."""

    hosts: int = setting(0, at_least=0)
    """Ray actors that hold the processes of episodes, on any node
    ([multi_turn.md](multi_turn.md#environments-on-other-nodes)); 0 has each engine hold its own."""

    min_hosts: int | None = setting(None, at_least=1)
    """Hosts without which the run does not begin; the others join when there is room for them. Null takes `hosts`."""

    host_cpus: float = setting(1.0, at_least=0)
    """Ray CPUs of a host, for all episodes that it holds."""

    named: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Agents that rows choose by the column `agent_name`: `agent.named.NAME.KEY=value`, with the keys of this section.
    Those that are left out are this section's, but `environment`, `kwargs`, `tools`, `program` and `command` belong
    together: a name that has one of them takes none from here."""

    def agents(self) -> "dict[str | None, AgentConfig]":
        """The settings of each agent, by the name that rows choose it by; None: rows without one."""
        declared = self.declared()
        limits = {"episode_timeout_s": self.episode_timeout_s, "on_timeout": self.on_timeout}
        plain = AgentConfig(reasoning_parser=self.reasoning_parser, **limits)  # type: ignore[arg-type]
        return {TOOL_AGENT: declared[None], SINGLE_TURN: plain, **declared}

    def declared(self) -> "dict[str | None, AgentConfig]":
        """The settings of those of `agents` that the config declares: this section (None), and `named`."""
        return {None: replace(self, named={}), **{name: self._overlaid(name) for name in self.named}}

    def _overlaid(self, name: str) -> "AgentConfig":
        default = AgentConfig()
        own = {key: getattr(default, key) for key in CODE if key in self._own(name)}
        return replace(self, **{**own, **self.named[name], "named": {}})

    def _own(self, name: str | None) -> set[str]:
        """Keys that an agent does not take from this section."""
        given = set(self.named.get(name or "", ()))
        return given | set(CODE) if given & set(CODE) else given

    def spelling(self, name: str | None) -> Callable[[str], str]:
        """Function from a key of this section to the key that gives one of `declared` this setting."""
        keys = {f"agent.{key}": f"agent.named.{name}.{key}" for key in self._own(name)}
        return lambda key: keys.get(key, key)

    def scored_by_name(self) -> dict[str | None, str] | str:
        """What scores rows, by their `agent_name`; `function` where none is an episode."""
        return {name: agent.scored_by for name, agent in self.agents().items()} if self.used else "function"

    @property
    def used(self) -> bool:
        """Whether the run's rows are episodes."""
        return self.plays or bool(self.named)

    @property
    def plays(self) -> bool:
        """Whether code replies to answers of this agent; otherwise its episodes are single answers."""
        return self.environment is not None or self.driven or bool(self.tools)

    @property
    def driven(self) -> bool:
        """Whether a program or a command drives the episodes."""
        return self.program is not None or bool(self.command)

    @property
    def fewest_hosts(self) -> int:
        """Hosts without which the run does not begin."""
        return self.hosts if self.min_hosts is None else self.min_hosts

    @property
    def most_contexts(self) -> int:
        """Sequences that one episode of this agent may have."""
        return self.max_turns if self.context == "rerender" else self.max_contexts

    @property
    def scored_by(self) -> str:
        """What scores this agent: `environment`, `function` or `sum`."""
        return self.reward or ("environment" if self.environment is not None or self.driven else "function")

    @property
    def _isolated(self) -> bool:
        return self.isolation != "none"

    @property
    def _specs(self) -> list[object]:
        return [self.environment, *self.tools]

    def problems(self) -> dict[str, object]:
        """Sentences on settings of episodes that exclude each other, and whether each applies (see `sentences`)."""
        alone = self.environment is None
        return {
            "{agent.kwargs:key} are arguments of the environment, and {agent.environment:key} is not set; leave them "
            "out": alone and self.kwargs,
            "{agent.program} drives the episodes itself, without {agent.environment:key} and {agent.tools:key}; leave "
            "these out": self.program is not None and (not alone or self.tools),
            "{agent.command} drives the episodes itself, without {agent.environment:key}, {agent.tools:key} and "
            "{agent.program:key}; leave these out": self.command
            and (not alone or self.tools or self.program is not None),
            "{agent.isolation} leaves environment processes without a network, which MCP servers, OpenEnv servers and "
            "{agent.command:key} need; set it to none": self._isolated
            and (self.command or any(str(spec).startswith(("mcp:", "openenv:")) for spec in self._specs)),
            "{agent.isolation}, and the tool pipeline.agent.python_tool isolates each call itself, which it cannot do "
            "from inside; set it to none": self._isolated
            and any(str(spec).startswith("pipeline.agent.python_tool") for spec in self._specs),
            "{agent.command} with {agent.hosts}: it asks the policy at an address of the engine's own node; leave "
            "{agent.hosts:key} out, or write a program ({agent.program:key})": self.command and self.hosts,
            "{agent.episodes_per_process} with {agent.command}: a command serves one episode, and ends by itself; "
            "leave it at 1": self.command and self.episodes_per_process > 1,
            "{agent.min_hosts} is above {agent.hosts}; lower it": (self.min_hosts or 0) > self.hosts,
            "{agent.reward} needs the rewards of {agent.environment:key}, which is not set; leave it out": (
                alone and not self.driven and self.reward in ("environment", "sum")
            ),
            "{agent.tools} with {agent.parser:key}=none: no call of a tool would be found; leave the parser at auto": (
                self.tools and self.parser == "none"
            ),
            "{agent.tools} with {agent.max_turns}: the model could call a tool and never read its reply; set max_turns "
            "to 2 or more": self.tools and self.max_turns == 1 and alone,
            "{agent.reset_timeout_s} is above {agent.episode_timeout_s}, which ends the episode before; lower it": (
                (self.driven or not alone) and self.reset_timeout_s > self.episode_timeout_s
            ),
            "{agent.step_timeout_s} is above {agent.episode_timeout_s}, which ends the episode before; lower it": (
                self.used and not self.driven and self.step_timeout_s > self.episode_timeout_s
            ),
        }
