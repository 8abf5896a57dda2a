"""Episodes that a program drives, on the run's side: it asks for answers, and returns the reward at the end."""

from typing import Any, Protocol

from pipeline.agent import EpisodeOver, Observation
from pipeline.agent.conversation import Conversation
from pipeline.agent.processes import EpisodeFailed
from pipeline.agent.questions import Chat


class Program(Protocol):
    """A program that runs: a `Session`, or a `Command`."""

    async def run(self, row: dict[str, Any], chat: Chat) -> Observation:
        """See `processes.Session.run`."""

    async def place(self) -> str:
        """See `processes.Session.place`."""

    async def close(self) -> None:
        """See `processes.Session.close`."""


async def drive(conversation: Conversation, program: Program, row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Have a program drive an episode to its end.

    The reward that it returns stands on the last answer. A program that lets `EpisodeOver` pass is rewarded with 0.

    Returns:
        why the episode ended, as in the column `ended`, and further numbers of the program.

    Raises:
        EpisodeFailed: the program failed, asked for no answer, or returned no reward where it is the score.
    """
    config = conversation.config
    try:
        returned = await program.run(row, conversation.chat)
        if returned.reward is None and config.scored_by != "function":
            raise EpisodeFailed(
                "the program returned no reward; return a number or {'reward': number}, or set agent.reward=function"
            )
    except EpisodeOver as over:
        if not conversation.over:
            raise EpisodeFailed(f"EpisodeOver: {over}; the program raised it, and the episode was not over") from None
        returned = Observation(done=True)
    if not conversation.contexts:
        raise EpisodeFailed("the program ended without an answer of the policy, so that there is nothing to train")
    last = max(conversation.contexts, key=lambda context: context.turn)
    last.set_reward(returned.reward, trains=True)
    return conversation.over or "done", returned.parts
