"""A context: one token sequence of an episode, as the engine saw and sampled it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.agent.inside.interface import Call, Message
from pipeline.generation import Generation
from pipeline.rows import ANSWER, OBSERVATION, UNROUTED

Span = tuple[int, int, float | None]
"""A part of a context: (kind, `ANSWER` or `OBSERVATION`; number of tokens; reward of a turn or None)."""


@dataclass
class Answer:
    """One turn that the policy generated."""

    message: Message
    malformed: str | None
    """The reason if a tool call in the turn could not be parsed; else None."""
    full: bool
    """True if no token fits after the turn."""
    prompt_tokens: int = 0
    """Number of tokens in the context before the turn."""
    tokens: int = 0
    """Number of tokens of the turn."""


@dataclass
class Context:
    """A prompt, and the turns and observations after it. Lists of tokens leave out the prompt."""

    prompt_ids: list[int]
    messages: list[dict[str, Any]]
    """The conversation as the policy saw it, with long messages cut."""
    chat_format: Any = None
    """The `ChatFormat` of the context."""
    heard: list[Any] = field(default_factory=list)
    """The conversation as the program knows it, with long messages whole; used to recognise its continuation."""
    ids: list[int] = field(default_factory=list)
    """Token ids after the prompt."""
    mask: list[int] = field(default_factory=list)
    """For each token after the prompt, 1 if the policy sampled it and it is trained, else 0."""
    log_probs: list[float] = field(default_factory=list)
    """For each token after the prompt, the log-prob if the policy sampled it, else 0."""
    supports: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """For each span, the columns `support` and `support_sizes` of its tokens (`models/support.py`)."""
    routes: np.ndarray | None = None
    """[t, W] int16, the experts of the tokens up to the last turn's end, prompt included; None if not noted."""
    images: list[bytes] = field(default_factory=list)
    """Encoded images of prompt and observations, in order."""
    image_hashes: list[bytes] = field(default_factory=list)
    """Hash of each image with the processor's settings."""
    sent: list[int] | None = None
    """All tokens with one placeholder for each image, as engines read them; None in a run without images."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Runs of tokens as (policy version, number of tokens); an observation has the version of the turn before it."""
    spans: list[Span] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    """Token ids of the last turn."""
    calls: Sequence[Call] = ()
    """Tool calls of the last turn."""
    call_ids: Sequence[str] = ()
    """Ids of the tool calls of the last turn, as the program knows them."""
    text: str = ""
    """Text of the last turn."""
    turns: list[int] = field(default_factory=list)
    """Numbers of the turns, in the order of the episode's requests to the policy."""
    finish_reason: str = "abort"
    """Finish reason of the last turn, from the engine."""

    @property
    def turn(self) -> int:
        """Number of the last turn; -1 before the first."""
        return self.turns[-1] if self.turns else -1

    def add_answer(self, generation: Generation) -> None:
        """Append the tokens of a turn."""
        self.answer = generation.token_ids.tolist()
        self.finish_reason = generation.finish_reason
        self.ids += self.answer
        if self.sent is not None:
            self.sent += self.answer
        self.log_probs += generation.log_probs.tolist()
        self.mask += [1] * len(self.answer)
        self.supports.append(generation.support or _whole(len(self.answer)))
        self._add_routes(generation.routes)
        for version, tokens in generation.version_runs:
            self._add_run(version, tokens)
        self.spans.append((ANSWER, len(self.answer), None))

    def add_observation(self, ids: list[int], sent: Sequence[int] = ()) -> None:
        """Append the tokens of an observation, which the policy did not sample.

        Args:
            ids: the tokens, with the features of images.
            sent: the tokens with one placeholder for each image.
        """
        self.ids += ids
        if self.sent is not None:
            self.sent += sent
        self.log_probs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        self.supports.append(_whole(len(ids)))
        self._add_run(self.runs[-1][0], len(ids))
        self.spans.append((OBSERVATION, len(ids), None))

    def drop_observation(self, messages: int) -> None:
        """Remove the observation at the end of the context, which has no images.

        Args:
            messages: number of messages in the observation.
        """
        _, count, _ = self.spans.pop()
        self.supports.pop()
        kept: tuple[list[Any], ...] = (self.ids, self.log_probs, self.mask, self.sent or [])
        for values in kept:
            del values[len(values) - count :]
        del self.messages[-messages:], self.heard[-messages:]
        version, tokens = self.runs.pop()
        self.runs.append((version, tokens - count))

    def set_rewards(self, rewards: Sequence[float | None]) -> None:
        """Set the reward of each turn; None for a turn without one."""
        answers = [place for place, span in enumerate(self.spans) if span[0] == ANSWER]
        for place, reward in zip(answers, rewards, strict=True):
            self.spans[place] = (ANSWER, self.spans[place][1], reward)

    def set_reward(self, reward: float | None, trains: bool) -> None:
        """Set the reward of the last turn, which must be the last span.

        Args:
            reward: the reward, or None.
            trains: false to leave the tokens of the turn out of the loss.
        """
        kind, count, _ = self.spans[-1]
        self.spans[-1] = (kind, count, reward)
        if not trains:
            self.mask[len(self.mask) - count :] = [0] * count

    def _add_routes(self, routes: np.ndarray | None) -> None:
        """Append the experts of the tokens since the turn before; earlier ones stay as they were when it was sampled.

        Args:
            routes: [t, W], the experts of all tokens.
        """
        if self.routes is not None and routes is not None:
            # The last token of a turn has passed through the model only now.
            known = len(self.routes) - 1
            routes = np.concatenate([self.routes[:known], routes[known:]])
        self.routes = routes

    def _add_run(self, version: int, tokens: int) -> None:
        if self.runs and self.runs[-1][0] == version:
            tokens += self.runs.pop()[1]
        self.runs.append((version, tokens))


def trained(contexts: Sequence[Context]) -> list[Context]:
    """Return the contexts that a row has: the first one, and further ones with tokens after their prompt.

    An episode may end between a prompt and the turn after it.
    """
    return [context for number, context in enumerate(contexts) if context.ids or number == 0]


def joined(contexts: Sequence[Context], finish_reason: str, version: int) -> tuple[Generation, np.ndarray]:
    """Join the tokens of all contexts into one response.

    Args:
        contexts: contexts of one episode.
        finish_reason: finish reason of the last turn.
        version: policy version of an episode without tokens.

    Returns:
        The response of T tokens, and its mask [T] int8: 1 for tokens that are trained.
    """
    runs = tuple(itertools.chain.from_iterable(context.runs for context in contexts))
    supports = [support for context in contexts for support in context.supports]
    sizes = np.concatenate([_whole(0)[1], *(own for _, own in supports)])
    ids = np.concatenate([_whole(0)[0], *(listed for listed, _ in supports)])
    routes: np.ndarray | None = None
    if noted := [context.routes for context in contexts if context.routes is not None]:
        width = noted[0].shape[1]
        routes = np.concatenate([_all_routes(context, width) for context in trained(contexts)])
    generation = Generation(
        np.array([token for context in contexts for token in context.ids], dtype=np.int32),
        np.array([value for context in contexts for value in context.log_probs], dtype=np.float32),
        finish_reason,
        runs or ((version, 0),),
        (ids, sizes) if sizes.any() else None,
        routes,
    )
    return generation, np.array([bit for context in contexts for bit in context.mask], dtype=np.int8)


def _whole(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns of supports for tokens that were not sampled from a part of the vocabulary."""
    return np.empty(0, np.int32), np.zeros(tokens, np.int32)


def _all_routes(context: Context, width: int) -> np.ndarray:
    """[P + T, width] the experts of all tokens of a context, unknown after its last turn."""
    made = np.full((len(context.prompt_ids) + len(context.ids), width), UNROUTED, np.int16)
    if context.routes is not None:
        made[: len(context.routes)] = context.routes
    return made
