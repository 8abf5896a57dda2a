"""The interface of the user's files: `from pipeline.agent import Environment, Observation`.

This module needs Python 3.9 and nothing but the standard library, because environments may run in an interpreter of
their own (`agent.python`), with packages that conflict with the trainer's packages.

    class HigherLower(Environment):
        def reset(self, row, seed):
            self.number = random.Random(seed).randint(1, 63)
            return "Guess a number from 1 to 63."

        def step(self, message):
            ...
            return Observation("higher", reward=0.0, done=False)

    @tool(timeout_s=2)
    def calc(expression: str) -> str:
        '''The value of an arithmetic expression.

        Args:
            expression: such as "(3 + 4) * 25".
        '''

    async def run(row, chat):                          # a program, which drives the episode itself
        draft = await chat([{"role": "user", "content": "Count to three."}])
        return {"reward": float(draft.text == "1 2 3")}     # and {"rewards": [...]}, one for each answer
"""

from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable, Dict, List, Optional, Sequence, Union  # noqa: UP035 (Python 3.9)

Content = Union[str, List[Dict[str, Any]], None]  # noqa: UP006, UP007
"""The next input of the model: a text, which becomes one message of role `agent.observation_role` (`user` if `reset`
returned it); or a list of messages `{role, content}`; or None for no message."""


class ToolError(Exception):
    """A mistake of the model, raised by a tool. The model reads the message. Any other exception fails the row."""


class EpisodeOver(Exception):
    """The policy generates no further turns: `agent.max_turns` is reached, or no further tokens fit.

    A program need not catch it.
    """


@dataclass
class Call:
    """A tool call that the model wrote."""

    id: str
    name: str
    arguments: Dict[str, Any]  # noqa: UP006


@dataclass
class Message:
    """One turn of the model."""

    text: str
    """Text of the turn without special tokens, reasoning and tool calls."""
    reasoning: str = ""
    """Text that the reasoning parser took out of the turn."""
    calls: List[Call] = field(default_factory=list)  # noqa: UP006
    """Tool calls that the tool parser took out of the turn."""
    truncated: bool = False
    """True if the turn reached its length limit before the model ended it."""


@dataclass
class Observation:
    """The observation after a turn of the model."""

    content: Content = None
    """The next message or messages that the model reads."""
    done: bool = False
    """True if the episode ends here."""
    reward: Optional[float] = None  # noqa: UP045
    """Reward of the turn; None for none. The rewards of an episode are summed."""
    parts: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    """Further values for metrics, such as `acc`; a later observation replaces values of the same name."""
    images: List[bytes] = field(default_factory=list)  # noqa: UP006
    """Encoded images (PNG, JPEG) in a run with `model.vision`. Each `<image>` in `content` stands for the next one."""


@dataclass
class ToolResult:
    """The result of a tool with images."""

    text: str
    """Text that the model reads. Each `<image>` in it stands for the next image."""
    images: Sequence[Union[bytes, str]] = ()  # noqa: UP007
    """Encoded images (PNG, JPEG), or their base64."""
    plain: Optional[str] = None  # noqa: UP045
    """Text in place of `text` in a run without `model.vision`. None makes the row an error there."""


Chat = Callable[..., Awaitable[Message]]
"""A function that lets the policy generate the turn after a program's messages: `await chat(messages, tools=None)`.

`messages` have the form of OpenAI's chat completions; earlier turns of the policy may be `Message` objects.
Messages that repeat an earlier chat with its turn, and add more, continue that conversation. Other messages begin a
new conversation; an episode may have `agent.max_contexts` conversations. `tools` are schemas
(`pipeline.agent.schema.schema_of` makes them); the turn then has `calls`, which the program carries out itself. A
program may run several chats at once (`asyncio.gather`); a cancelled chat leaves no trace. A chat raises

    EpisodeOver     The policy generates no further turns. The program may still return a result; if it does not catch
                    the exception, its reward is 0. The row is not an error.
    ValueError      The messages or the tools are malformed.

and never returns if the episode fails, for example because the messages begin one conversation too many.
"""


class Environment:
    """The environment of one episode. Each episode has a new object, in a process without other episodes.

    Methods may be `async def`.
    """

    def reset(self, row: Dict[str, Any], seed: int) -> Union[Content, Observation]:  # noqa: UP006, UP007
        """Begin the episode.

        Args:
            row: `prompt` (messages), `data_source`, `ground_truth` and `extra_info` of the prompt.
            seed: seed of the episode, the same for all episodes of a group if `agent.same_seed_in_group` is set.

        Returns:
            The text or messages that follow the row's prompt; or an `Observation` of these, to add images.
        """
        return None

    def step(self, message: Message) -> Union[Observation, str]:  # noqa: UP007
        """Return the observation after a turn of the model. A text stands for `Observation(text)`."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the episode holds, such as files. Afterwards the process ends, or serves another episode."""


def tool(function: Optional[Callable] = None, *, timeout_s: Optional[float] = None, name: Optional[str] = None) -> Any:  # noqa: UP045
    """Mark a function as a tool. The model reads a schema that is made from the function's signature and docstring.

    The tool returns text, a value that becomes JSON, or a `ToolResult` with images.

    A marked method of an environment is a tool that can use the state of the episode.

    Args:
        function: plain or `async def`; its parameters have type hints.
        timeout_s: maximum seconds of one call; None takes `agent.step_timeout_s`.
        name: name by which the model calls the tool; None takes the function's name.
    """

    def mark(function: Callable) -> Callable:
        function.__tool__ = {"name": name or function.__name__, "timeout_s": timeout_s}  # type: ignore[attr-defined]
        return function

    return mark if function is None else mark(function)
