"""Episodes that a program drives, on the run's side: it requests answers, and returns rewards at the end."""

from typing import Any, Protocol

from pipeline.agent.conversation import Conversation
from pipeline.agent.endpoint.chat_server import Chat
from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.inside.interface import EpisodeOver
from pipeline.agent.inside.replies import Returned


class Program(Protocol):
    """The program of an episode: a `Session`, or a `Command`."""

    async def run(self, row: dict[str, Any], chat: Chat) -> Returned:
        """See `session.Session.run`."""

    async def place(self) -> str:
        """See `session.Session.place`."""

    async def close(self, well: bool = False) -> None:
        """See `session.Session.close`."""


async def drive(conversation: Conversation, program: Program, row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Have a program drive an episode to its end.

    Each answer gets its entry of the program's `rewards`. If the program returns a score as `reward`, the last answer
    gets the score minus the rewards of the other answers. A program that does not catch `EpisodeOver` scores 0.

    Returns:
        The end of the episode, as in the column `ended`, and further numbers of the program.

    Raises:
        EpisodeFailed: the program failed, requested no answer, returned no reward although it scores the episode, or
            returned more or fewer `rewards` than the episode has answers.
    """
    config = conversation.config
    try:
        returned = await program.run(row, conversation.chat)
        if returned.reward is None and returned.rewards is None and config.scored_by != "function":
            how = "the program returned no reward; return a number,"
            if config.command:
                how = "the last line that agent.command printed is no object with a reward; print"
            raise EpisodeFailed(
                how + ' {"reward": number} or {"rewards": [one for each answer]}, or set agent.reward=function'
            )
    except EpisodeOver as over:
        if not conversation.over:
            raise EpisodeFailed(f"EpisodeOver: {over}; the program raised it, and the episode was not over") from None
        returned = Returned()
    if not conversation.contexts:
        raise EpisodeFailed("the program ended without an answer of the policy, so that there is nothing to train")
    answers = sorted(turn for context in conversation.contexts for turn in context.turns)
    rewards: list[float | None] = [None] * len(answers) if returned.rewards is None else [*returned.rewards]
    if len(rewards) != len(answers):
        raise EpisodeFailed(
            f"the program returned {len(rewards)} `rewards`, and the episode has {len(answers)} answers of the policy; "
            "return one for each answer, in the order in which they were asked for"
        )
    if returned.reward is not None:
        rewards[-1] = returned.reward - sum(reward or 0.0 for reward in rewards[:-1])
    by_turn = dict(zip(answers, rewards, strict=True))
    for context in conversation.contexts:
        context.set_rewards([by_turn[turn] for turn in context.turns])
    return conversation.over or "done", returned.parts
