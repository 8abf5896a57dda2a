"""An engine's side of one agent: the settings, the processes of the agent's episodes, and the chat format."""

import asyncio
from typing import TYPE_CHECKING, Any

from pipeline.agent.endpoint.server import SAMPLED, Endpoint
from pipeline.agent.player import Player
from pipeline.agent.processes import Processes
from pipeline.agent.program import ClientPlayer, ProgramPlayer
from pipeline.agent.ray_hosts import Hosts
from pipeline.agent.session import Session
from pipeline.agent.tokens.bridge import Bridge
from pipeline.agent.tokens.calls import AnswerParser
from pipeline.agent.tokens.chat_format import ChatFormat
from pipeline.agent.turns import TurnsPlayer
from pipeline.agent.zygote import LoadedCode
from pipeline.config.agent import AgentConfig
from pipeline.config.data import DataConfig
from pipeline.sampling import Sampling

if TYPE_CHECKING:
    from pipeline.agent.ray_client import RemoteProcesses

NOTHING = LoadedCode([], {}, environment=False, closes=False, forks=False)
"""The description of the user code of an agent that has none, since its episodes are single responses."""


class Agent:
    """One agent of an engine: opens the episodes of the rows that choose the agent.

    Args:
        name: name of the agent on hosts, the same for all engines.
        config: settings of the agent.
        data: the section `data`.
        tokenizer: tokenizer of the model.
        endpoint: HTTP server for the requests of all agents' commands.
        hosts: hosts that run the processes of episodes; if there are none, the engine's node runs them.
    """

    def __init__(
        self,
        name: str | None,
        config: AgentConfig,
        data: DataConfig,
        tokenizer: Any,
        endpoint: Endpoint,
        hosts: Hosts,
    ) -> None:
        self.config, self.loaded = config, NOTHING
        self.places = asyncio.Semaphore(config.max_episodes)
        self._data, self._tokenizer, self._endpoint = data, tokenizer, endpoint
        self._processes = processes(name, config, hosts)
        self._starting = asyncio.Lock()
        self._chat_format: ChatFormat | None = None

    async def load(self) -> LoadedCode:
        """Load the agent's environment and tools, unless they are loaded already; returns a description.

        Raises:
            ValueError: environment or tools do not load.
            TimeoutError: too few hosts have started (`RemoteProcesses.start`).
        """
        if self.config.plays:
            self.loaded = await self._processes.start()
        if self.loaded.client:
            self._check_client()
        return self.loaded

    def _check_client(self) -> None:
        """Raise ValueError if a client could not reach the endpoint, which listens on 127.0.0.1 of the engine's
        node."""
        config = self.config
        what = f"agent.program={config.program} uses its own client, which needs an address on the engine's node"
        if config.hosts:
            raise ValueError(f"{what}; leave agent.hosts out, or write async def run(row, chat)")
        if config.isolation != "none":
            raise ValueError(f"{what}, and agent.isolation leaves it without a network; set agent.isolation=none")

    async def start(self) -> ChatFormat:
        """Load environment and tools, and prove that the chat template can continue conversations; both only once.

        Raises:
            ValueError: the code does not load, the template cannot continue conversations, or no parser parses its tool
                calls.
        """
        async with self._starting:
            if self._chat_format is None:
                loaded = await self.load()
                if self.config.command or loaded.client:
                    await self._endpoint.start()
                self._chat_format = await asyncio.to_thread(
                    chat_format, self.config, self._data, self._tokenizer, loaded.tools
                )
            return self._chat_format

    async def open(self, row: dict[str, Any], seed: int, sampling: Sampling) -> Player:
        """Begin an episode, and return its player; see `Processes.open` and `RemoteProcesses.open`.

        Args:
            row: `prompt`, `data_source`, `ground_truth` and `extra_info`.
            seed: seed of the environment.
            sampling: sampling settings of the turns that a client requests.
        """
        config = self.config
        if not config.plays:
            return TurnsPlayer(config, None, {}, environment=False)
        session = await self._processes.open(row, seed, config.reset_timeout_s)
        if config.command or self.loaded.client:
            # Requests go to an address of this node (`AgentConfig.problems`, `_check_client`).
            assert isinstance(session, Session)
            chosen = {name: getattr(sampling, name) for name in SAMPLED}
            longest = min(sampling.max_tokens, config.max_turn_tokens or sampling.max_tokens)
            return ClientPlayer(session, self._endpoint, chosen, longest)
        if config.program is not None:
            return ProgramPlayer(session)
        return TurnsPlayer(config, session, self.loaded.timeouts, config.environment is not None)

    async def close(self) -> None:
        """End the processes of environment, tools and programs."""
        await self._processes.close()


def processes(name: str | None, config: AgentConfig, hosts: Hosts) -> "Processes | RemoteProcesses":
    """Make the object that opens an agent's episodes: on `hosts` if there are any, else on this node."""
    if not hosts.actors:
        return Processes(config)
    # Imports Ray, which a dry run does without.
    from pipeline.agent.ray_client import RemoteProcesses

    return RemoteProcesses(name, config, hosts)


def chat_format(config: AgentConfig, data: DataConfig, tokenizer: Any, tools: list[dict[str, Any]]) -> ChatFormat:
    """Make the chat format in which conversations with these tools are continued for this tokenizer.

    Raises:
        ValueError: the tokenizer's chat template cannot continue them, or no parser parses its tool calls.
    """

    def prove(tools: list[dict[str, Any]]) -> tuple[Bridge, AnswerParser]:
        roles = {config.observation_role} if config.environment is not None else set()
        if tools or config.driven:
            roles |= {"user"}
        if tools:
            roles |= {"tool"}
        bridge = Bridge.prove(tokenizer, data.apply_chat_template_kwargs, roles, tools)
        return bridge, AnswerParser.prove(tokenizer, tools, config.parser, config.reasoning_parser, bridge)

    bridge, reader = prove(tools)
    return ChatFormat(config, bridge, reader, tools, data.max_prompt_length, data.max_response_length, prove)
