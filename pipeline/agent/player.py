"""The protocol of players, which lead an episode, and the methods that they need of the process of an episode."""

from typing import Any, Protocol

from pipeline.agent.conversation import Conversation
from pipeline.agent.endpoint.chat_server import ChatHandler
from pipeline.agent.inside.checks import ProgramResult
from pipeline.agent.inside.interface import Content, Message, Observation, ToolResult


class EpisodeProcess(Protocol):
    """The process of an episode, on this node (`session.Session`) or on a host (`ray_client.RemoteSession`)."""

    opened: Content
    """The content with which the environment began the episode."""
    opened_images: list[str]
    """Images in this content, in base64."""

    async def step(self, message: Message, timeout_s: float) -> Observation:
        """Send the environment a message of the policy and return the observation."""

    async def call(
        self, name: str, arguments: dict[str, Any], timeout_s: float, images: bool = False
    ) -> str | ToolResult:
        """Call a tool and return its result: text, or a `ToolResult` whose images are in base64.

        With `images` false, a result that has a text without images is this text.
        """

    async def run(self, row: dict[str, Any], chat: ChatHandler) -> ProgramResult:
        """Run the program of the episode and return its result."""

    async def place(self) -> str:
        """Return the file and line at which a process past its deadline is, such as ` (my_program.py, line 12)`.

        Returns "" if the process does not report them.
        """

    async def close(self, well: bool = False) -> None:
        """End the episode in the background.

        Args:
            well: true if the episode came to its end, so that its process may serve another one.
        """


class Player(Protocol):
    """The player leads one episode: `turns.TurnsPlayer` with environment and tools, or `program.ProgramPlayer`."""

    messages: list[dict[str, Any]]
    """The conversation so far, the prompt included; empty before it begins."""
    parts: dict[str, Any]
    """Further values that the user's code has reported so far, by name, such as `acc`."""

    async def play(self, conversation: Conversation, row: dict[str, Any]) -> str:
        """Lead the episode to its end.

        Returns:
            How the episode ended, as in the column `ended`.

        Raises:
            EpisodeFailed: the environment, a tool or the program failed.
        """

    async def place(self) -> str:
        """Return the file and line at which user code past its deadline is, as a clause; "" if they are not known."""

    async def close(self, well: bool = False) -> None:
        """End the process of the episode in the background.

        Args:
            well: true if the episode came to its end, so that its process may serve another one.
        """
