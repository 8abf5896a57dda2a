"""The two kinds of players, and what they need of the process of an episode."""

from typing import Any, Protocol

from pipeline.agent.conversation import Conversation
from pipeline.agent.endpoint.chat_server import ChatHandler
from pipeline.agent.inside.interface import Content, Message, Observation
from pipeline.agent.inside.replies import ProgramResult


class EpisodeProcess(Protocol):
    """The process of an episode, on this node (`session.Session`) or on a host (`ray_client.RemoteSession`)."""

    opened: Content
    """The content with which the environment began the episode."""

    async def step(self, message: Message, timeout_s: float) -> Observation:
        """Return the environment's answer to a message."""

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call a tool and return its result as text."""

    async def run(self, row: dict[str, Any], chat: ChatHandler) -> ProgramResult:
        """Run the program of the episode and return its result."""

    async def place(self) -> str:
        """Return the place of the late process, such as ` (my_program.py, line 12)`; "" if it does not report one."""

    async def close(self, well: bool = False) -> None:
        """End the episode in the background."""


class Player(Protocol):
    """The player of one episode: `turns.TurnsPlayer` with environment and tools, or `program.ProgramPlayer`."""

    messages: list[dict[str, Any]]
    """The conversation so far, the prompt included; empty before its begin."""
    parts: dict[str, Any]
    """Further numbers of the user's code so far, such as `acc`."""

    async def play(self, conversation: Conversation, row: dict[str, Any]) -> str:
        """Play the episode.

        Returns:
            The end of the episode, as in the column `ended`.

        Raises:
            EpisodeFailed: the environment, a tool or the program failed.
        """

    async def place(self) -> str:
        """Return the place of user code that is late, as a clause; "" if it is not known."""

    async def close(self, well: bool = False) -> None:
        """End the process of the episode in the background.

        Args:
            well: true if the episode came to its end, so that its process may serve another one.
        """
