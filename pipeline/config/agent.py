"""Settings of multi-turn episodes (`agent.*`)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.bounds import setting

CODE = ("environment", "kwargs", "tools", "program", "command")
"""Keys of the user's code. An agent that sets one of them takes none of them from the section `agent`."""
TOOL_AGENT, SINGLE_TURN = "tool_agent", "single_turn_agent"
"""Names of agents in verl's files: the section `agent` itself, and a single answer."""


@dataclass
class AgentConfig:
    """Episodes of several turns: the policy answers, an environment or tools reply, until the episode ends."""

    environment: str | None = setting(None, path="code")
    """Environment that replies to answers: a class, `my_game:HigherLower` or `/code/my_game.py:HigherLower`, or a
    server, `openenv:ws://localhost:8000`."""

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
    """Program that runs a whole episode with an OpenAI or Anthropic client: `[python, my_agent.py]`. `python` means
    `agent.python`. The row is in the file SLIPSTREAM_ROW. The last printed line must be `{"reward": 1.0}`, or
    `{"rewards": [0.5, 0.5]}` with one reward per answer."""

    max_contexts: int = setting(1, at_least=1)
    """Most conversations of one episode, each a sequence of tokens. Only a program or a command can begin several."""

    context: str = setting("keep", choices=("keep", "rerender"))
    """Earlier answers in the prompt of a later turn: `keep` them as sampled, or `rerender` them with the chat template,
    which leaves out thinking, for example. A turn for which that differs begins a new sequence of the row."""

    python: str | None = setting(None, path="program")
    """Python interpreter of environment processes. Null takes the run's."""

    isolation: str = setting("none", choices=("none", "namespaces"))
    """Isolation of environment processes. `none`: they can do everything that the run can. `namespaces` (of Linux):
    they have no network, and see only their own processes and code, the interpreter and the system's programs. If the
    isolation does not work on this machine, the run is refused."""

    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables of environment processes, in addition to `PATH`, `HOME`, `LANG`, `LC_ALL`, `TMPDIR` and
    `VIRTUAL_ENV` of the run."""

    max_turns: int = setting(8, at_least=1)
    """Most answers of the policy in one episode."""

    max_turn_tokens: int = setting(0, at_least=0)
    """Most tokens of one answer. 0: only `data.max_response_length` limits it."""

    max_observation_tokens: int = setting(1024, at_least=8)
    """Most tokens of the content of one reply. A longer one is cut in the middle, with a mark."""

    observation_role: str = setting("user", choices=("user", "tool"))
    """Role of replies that an environment gives as text."""

    parser: str = "auto"
    """Tool parser, by vLLM's name. `auto` takes the first one that reads calls as the model's chat template writes
    them; `none` finds no calls."""

    reasoning_parser: str = "none"
    """Reasoning parser, by vLLM's name. `none` leaves reasoning in the text."""

    max_parallel_calls: int = setting(8, at_least=1)
    """Most tool calls of one answer. For each call beyond, the model reads an error."""

    on_malformed: str = setting("retry", choices=("retry", "end", "mask"))
    """Reaction to a tool call that cannot be read. `retry`: the model reads the error and may call again; `end`: the
    episode ends; `mask`: like `retry`, but the answer is not trained on."""

    reset_timeout_s: float = setting(60.0, above=0)
    """Time limit of an environment's `reset`, in seconds. After it the row is an error."""

    step_timeout_s: float = setting(30.0, above=0)
    """Time limit of a reply of an environment or a tool, in seconds. After it the row is an error."""

    episode_timeout_s: float = setting(600.0, above=0)
    """Time limit of one episode, in seconds. After it `on_timeout` applies."""

    max_episodes: int = setting(4096, at_least=1)
    """Most episodes that one engine runs at the same time, each in its own process; others wait. With a `command` that
    imports large packages, the machine's memory is the limit."""

    episodes_per_process: int = setting(1, at_least=1)
    """Most consecutive episodes of one process ([multi_turn.md](multi_turn.md#where-your-code-runs)). 1: each episode
    has a fresh process."""

    on_timeout: str = setting("error", choices=("error", "score"))
    """Result of an episode that exceeds `episode_timeout_s`: `error` makes the row an error, `score` ends the episode
    with the rewards so far."""

    same_seed_in_group: bool = True
    """Give all episodes of a prompt's group the same seed, so they are the same task."""

    reward: str | None = setting(None, choices=("environment", "function", "sum", None))
    """Score of a row: `environment` (rewards of the environment or program), `function` (the reward function), or their
    `sum`. Null takes `environment` if there is an environment, a program or a command, else `function`."""

    hosts: int = setting(0, at_least=0)
    """Hosts: Ray actors on any node that hold the episodes' processes
    ([multi_turn.md](multi_turn.md#environments-on-other-nodes)). 0: each engine holds its own."""

    min_hosts: int | None = setting(None, at_least=1)
    """Fewest hosts with which the run begins; the others join later. Null takes `hosts`."""

    host_cpus: float = setting(1.0, at_least=0)
    """Ray CPUs of a host, for all its episodes."""

    named: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Named agents: `agent.named.NAME.KEY=value`, with the keys of this section. The column `agent_name` of a row
    chooses one. A missing key has this section's value; but a name that sets one of `environment`, `kwargs`, `tools`,
    `program` and `command` takes none of these five from the section."""

    def agents(self) -> "dict[str | None, AgentConfig]":
        """Return the settings of each agent by the name in rows; None: rows without a name."""
        declared = self.declared()
        limits = {"episode_timeout_s": self.episode_timeout_s, "on_timeout": self.on_timeout}
        plain = AgentConfig(reasoning_parser=self.reasoning_parser, **limits)  # type: ignore[arg-type]
        return {TOOL_AGENT: declared[None], SINGLE_TURN: plain, **declared}

    def declared(self) -> "dict[str | None, AgentConfig]":
        """Return the settings of the agents in the config: this section (None) and `named`."""
        return {None: replace(self, named={}), **{name: self._overlaid(name) for name in self.named}}

    def _overlaid(self, name: str) -> "AgentConfig":
        default = AgentConfig()
        own = {key: getattr(default, key) for key in CODE if key in self._own(name)}
        return replace(self, **{**own, **self.named[name], "named": {}})

    def _own(self, name: str | None) -> set[str]:
        """Return the keys that an agent does not take from this section."""
        given = set(self.named.get(name or "", ()))
        return given | set(CODE) if given & set(CODE) else given

    def spelling(self, name: str | None) -> Callable[[str], str]:
        """Return a function from a key of this section to the key that sets it for one of `declared`."""
        keys = {f"agent.{key}": f"agent.named.{name}.{key}" for key in self._own(name)}
        return lambda key: keys.get(key, key)

    def scored_by_name(self) -> dict[str | None, str] | str:
        """Return the scorer of rows by their `agent_name`; `function` if no row is an episode."""
        return {name: agent.scored_by for name, agent in self.agents().items()} if self.used else "function"

    @property
    def used(self) -> bool:
        """True if the run's rows are episodes."""
        return self.plays or bool(self.named)

    @property
    def plays(self) -> bool:
        """True if code replies to answers of this agent; otherwise its episodes are single answers."""
        return self.environment is not None or self.driven or bool(self.tools)

    @property
    def driven(self) -> bool:
        """True if a program or a command runs the episodes."""
        return self.program is not None or bool(self.command)

    @property
    def fewest_hosts(self) -> int:
        """Fewest hosts with which the run begins."""
        return self.hosts if self.min_hosts is None else self.min_hosts

    @property
    def most_contexts(self) -> int:
        """Most sequences of one episode of this agent."""
        return self.max_turns if self.context == "rerender" else self.max_contexts

    @property
    def scored_by(self) -> str:
        """Scorer of this agent: `environment`, `function` or `sum`."""
        return self.reward or ("environment" if self.environment is not None or self.driven else "function")

    @property
    def _isolated(self) -> bool:
        return self.isolation != "none"

    @property
    def _specs(self) -> list[object]:
        return [self.environment, *self.tools]

    def problems(self) -> dict[str, object]:
        """Return sentences on settings of episodes that exclude each other, each with True if it applies (see
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
