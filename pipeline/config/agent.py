"""Settings of multi-turn episodes (`agent.*`)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.bounds import setting

CODE = ("environment", "kwargs", "tools", "program", "command")
"""Keys that name the user's code. A named agent that sets one of these five keys inherits none of the five from the
section `agent`."""
TOOL_AGENT, SINGLE_TURN = "tool_agent", "single_turn_agent"
"""Agent names that verl's data files use: `tool_agent` is the agent of the section `agent`; `single_turn_agent`
generates one response and calls no tools."""


@dataclass
class AgentConfig:
    """Multi-turn episodes: the policy generates a turn, then an environment or tools reply, until the episode ends."""

    environment: str | None = setting(None, path="code")
    """Environment that replies to the policy's turns: a class, `my_game:HigherLower` or
    `/code/my_game.py:HigherLower`, or a server, `openenv:ws://localhost:8000`."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor. An OpenEnv server takes `observation_field`, `action_field`
    and `reset_kwargs`."""

    tools: list[str] = setting([], path="code")
    """Tools that the policy may call: one function, `my_tools:calc`; all tools of a file, `/code/my_tools.py`; or all
    tools of an MCP server, `mcp: COMMAND or URL`."""

    program: str | None = setting(None, path="code")
    """Function that runs a whole episode, `my_program:run`: `async def run(row, chat)` calls the policy by `chat`, and
    `def run(row)` by an OpenAI or Anthropic client."""

    command: list[str] = setting([], path="command")
    """Command that runs a whole episode with an OpenAI or Anthropic client, as a list of words,
    `[python, my_agent.py]`. `python` stands for the interpreter `agent.python`. The environment variable SLIPSTREAM_ROW
    holds the path of a file with the row. The last line that the command prints must be `{"reward": 1.0}`, or
    `{"rewards": [0.5, 0.5]}` with one reward per turn."""

    max_contexts: int = setting(1, at_least=1)
    """Maximum number of conversations in one episode; each is one token sequence. Only `agent.program` and
    `agent.command` can begin more than one."""

    context: str = setting("keep", choices=("keep", "rerender"))
    """Form of earlier turns in the prompt of a later turn. `keep`: the tokens as sampled. `rerender`: the chat
    template renders them again, and leaves out thinking, for example; if that changes their tokens, the later turn
    begins a new sequence of the row."""

    python: str | None = setting(None, path="program")
    """Path of the Python interpreter of environment processes. Null: the interpreter of the run."""

    isolation: str = setting("none", choices=("none", "namespaces"))
    """Isolation of environment processes. `none`: they can do everything that the run can. `namespaces` (of Linux):
    they have no network, and see only their own processes and code, the interpreter and the system's programs. If the
    isolation does not work on this machine, the run is refused."""

    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables of environment processes, in addition to `PATH`, `HOME`, `LANG`, `LC_ALL`, `TMPDIR` and
    `VIRTUAL_ENV` of the run."""

    max_turns: int = setting(8, at_least=1)
    """Maximum number of turns that the policy generates in one episode."""

    max_turn_tokens: int = setting(0, at_least=0)
    """Maximum number of tokens in one turn of the policy. 0: only `data.max_response_length` limits a turn."""

    max_observation_tokens: int = setting(1024, at_least=8)
    """Maximum number of tokens in one reply of an environment or a tool, without the chat template's tokens. A longer
    reply is cut in the middle, and a mark shows the cut."""

    observation_role: str = setting("user", choices=("user", "tool"))
    """Chat role of an environment's reply, if the environment returns text instead of a message."""

    parser: str = "auto"
    """Name of vLLM's tool parser, which finds tool calls in the model's text. `auto` takes the first parser that can
    read calls in the form of the model's chat template; `none` finds no calls."""

    reasoning_parser: str = "none"
    """Name of vLLM's reasoning parser, which separates reasoning from the text. `none` leaves reasoning in the text."""

    max_parallel_calls: int = setting(8, at_least=1)
    """Maximum number of tool calls in one turn. Each further call is not run, and the model reads an error for it."""

    on_malformed: str = setting("retry", choices=("retry", "end", "mask"))
    """Reaction to a tool call that cannot be read. `retry`: the model reads the error and may call again; `end`: the
    episode ends; `mask`: like `retry`, but the turn with the call is not trained on."""

    reset_timeout_s: float = setting(60.0, above=0)
    """Time limit of an environment's `reset`, in seconds. If it is exceeded, the row is an error."""

    step_timeout_s: float = setting(30.0, above=0)
    """Time limit of one reply of an environment or a tool, in seconds. If it is exceeded, the row is an error."""

    episode_timeout_s: float = setting(600.0, above=0)
    """Time limit of one episode, in seconds. If it is exceeded, `on_timeout` applies."""

    max_episodes: int = setting(4096, at_least=1)
    """Maximum number of episodes that one engine runs at the same time, each in its own process; others wait. A
    `command` that imports large packages may fill the machine's memory before that."""

    episodes_per_process: int = setting(1, at_least=1)
    """Maximum number of episodes that one process runs, one after the other
    ([multi_turn.md](multi_turn.md#where-your-code-runs)). 1: each episode has a fresh process."""

    on_timeout: str = setting("error", choices=("error", "score"))
    """Result of an episode that exceeds `episode_timeout_s`: `error` makes the row an error, `score` ends the episode
    with the rewards so far."""

    same_seed_in_group: bool = True
    """Give all episodes of one prompt (a group) the same environment seed, so all of them have the same task."""

    reward: str | None = setting(None, choices=("environment", "function", "sum", None))
    """Source of a row's score: `environment` (rewards of the environment, program or command), `function` (the reward
    function), or their `sum`. Null takes `environment` if there is an environment, a program or a command, else
    `function`."""

    hosts: int = setting(0, at_least=0)
    """Number of hosts: Ray actors, on any node, whose child processes run the episodes
    ([multi_turn.md](multi_turn.md#environments-on-other-nodes)). 0: episodes run in child processes of the engines."""

    min_hosts: int | None = setting(None, at_least=1)
    """Minimum number of hosts with which the run begins; the others join later. Null takes `hosts`."""

    host_cpus: float = setting(1.0, at_least=0)
    """Ray CPUs of one host, for all of its episodes together."""

    named: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Named agents: `agent.named.NAME.KEY=value`, with the keys of this section. The column `agent_name` of a row
    chooses the agent. A key that a named agent does not set has the value in this section, except: an agent that sets
    one of `environment`, `kwargs`, `tools`, `program` and `command` inherits none of these five."""

    def agents(self) -> "dict[str | None, AgentConfig]":
        """Return the settings of each agent, by `agent_name` of its rows; None is the key for rows without a name.

        In addition to `declared`, these are verl's `tool_agent` and `single_turn_agent`.
        """
        declared = self.declared()
        limits = {"episode_timeout_s": self.episode_timeout_s, "on_timeout": self.on_timeout}
        plain = AgentConfig(reasoning_parser=self.reasoning_parser, **limits)  # type: ignore[arg-type]
        return {TOOL_AGENT: declared[None], SINGLE_TURN: plain, **declared}

    def declared(self) -> "dict[str | None, AgentConfig]":
        """Return the settings of the agents in the config by name: this section (key None) and each of `named`."""
        return {None: replace(self, named={}), **{name: self._overlaid(name) for name in self.named}}

    def _overlaid(self, name: str) -> "AgentConfig":
        default = AgentConfig()
        own = {key: getattr(default, key) for key in CODE if key in self._own(name)}
        return replace(self, **{**own, **self.named[name], "named": {}})

    def _own(self, name: str | None) -> set[str]:
        """Return the keys that the agent `name` does not inherit from this section."""
        given = set(self.named.get(name or "", ()))
        return given | set(CODE) if given & set(CODE) else given

    def spelling(self, name: str | None) -> Callable[[str], str]:
        """Return a function from a key of this section to the key that sets the same value for the agent `name`.

        For example, from `agent.tools` to `agent.named.NAME.tools` if the named agent does not inherit it.
        """
        keys = {f"agent.{key}": f"agent.named.{name}.{key}" for key in self._own(name)}
        return lambda key: keys.get(key, key)

    def scored_by_name(self) -> dict[str | None, str] | str:
        """Return `scored_by` of each agent, by `agent_name`; only the text `function` if no row is an episode."""
        return {name: agent.scored_by for name, agent in self.agents().items()} if self.used else "function"

    @property
    def used(self) -> bool:
        """True if rows of the run are episodes, of this section or of a named agent."""
        return self.plays or bool(self.named)

    @property
    def plays(self) -> bool:
        """True if this agent has an environment, tools, a program or a command; otherwise its episodes are single
        responses."""
        return self.environment is not None or self.driven or bool(self.tools)

    @property
    def driven(self) -> bool:
        """True if a program or a command runs the episodes."""
        return self.program is not None or bool(self.command)

    @property
    def fewest_hosts(self) -> int:
        """Minimum number of hosts with which the run begins."""
        return self.hosts if self.min_hosts is None else self.min_hosts

    @property
    def most_contexts(self) -> int:
        """Maximum number of token sequences in one episode of this agent."""
        return self.max_turns if self.context == "rerender" else self.max_contexts

    @property
    def scored_by(self) -> str:
        """Source of the scores of this agent's rows: `environment`, `function` or `sum` (see `reward`)."""
        return self.reward or ("environment" if self.environment is not None or self.driven else "function")

    @property
    def _isolated(self) -> bool:
        return self.isolation != "none"

    @property
    def _specs(self) -> list[object]:
        return [self.environment, *self.tools]

    def problems(self) -> dict[str, object]:
        """Return sentences on settings of episodes that exclude each other, each with a true value if it applies (see
        `sentences`)."""
        alone = self.environment is None
        return {
            "{agent.kwargs:key} are arguments of the environment, but {agent.environment:key} is not set; leave them "
            "out": alone and self.kwargs,
            "{agent.program} runs the episodes itself, so {agent.environment:key} and {agent.tools:key} are not used; "
            "leave these out": self.program is not None and (not alone or self.tools),
            "{agent.command} runs the episodes itself, so {agent.environment:key}, {agent.tools:key} and "
            "{agent.program:key} are not used; leave these out": self.command
            and (not alone or self.tools or self.program is not None),
            "{agent.isolation} leaves environment processes without a network, which MCP servers, OpenEnv servers and "
            "{agent.command:key} need; set it to none": self._isolated
            and (self.command or any(str(spec).startswith(("mcp:", "openenv:")) for spec in self._specs)),
            "{agent.isolation} with the tool pipeline.agent.python_tool, which isolates each call itself and cannot "
            "do so from inside; set it to none": self._isolated
            and any(str(spec).startswith("pipeline.agent.python_tool") for spec in self._specs),
            "{agent.command} with {agent.hosts}: it calls the policy at an address of the engine's node; leave "
            "{agent.hosts:key} out, or write a program ({agent.program:key})": self.command and self.hosts,
            "{agent.episodes_per_process} with {agent.command}: a command serves one episode and ends by itself; set "
            "it to 1": self.command and self.episodes_per_process > 1,
            "{agent.min_hosts} is above {agent.hosts}; lower it": (self.min_hosts or 0) > self.hosts,
            "{agent.reward} needs rewards of {agent.environment:key}, which is not set; leave it out": (
                alone and not self.driven and self.reward in ("environment", "sum")
            ),
            "{agent.tools} with {agent.parser:key}=none: no tool call would be found; set the parser to auto": (
                self.tools and self.parser == "none"
            ),
            "{agent.tools} with {agent.max_turns}: the model could call a tool but never read its reply; set "
            "max_turns to 2 or more": self.tools and self.max_turns == 1 and alone,
            "{agent.reset_timeout_s} is above {agent.episode_timeout_s}, which ends the episode before; lower it": (
                (self.driven or not alone) and self.reset_timeout_s > self.episode_timeout_s
            ),
            "{agent.step_timeout_s} is above {agent.episode_timeout_s}, which ends the episode before; lower it": (
                self.used and not self.driven and self.step_timeout_s > self.episode_timeout_s
            ),
        }
