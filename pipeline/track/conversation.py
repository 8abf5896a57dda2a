"""A recorded row as a conversation: the prompt, then the policy's turns and the replies to them.

A row of an episode has its messages and the lengths of its spans of tokens (columns `messages`, `spans`). A row of one
response is a conversation with one turn. The row's sequences are the contexts of its episode.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from pipeline.agent.inside.forms import prompt_length, split
from pipeline.conversations import IMAGE, answered
from pipeline.rows import ANSWER, OBSERVATION

COLUMNS = (
    *("split", "chunk", "uid", "sample", "data_source", "ground_truth", "prompt", "prompt_ids", "response_ids"),
    *("response_mask", "rollout_log_probs", "response", "finish_reason", "version_runs", "engine", "generate_s"),
    *("score", "reward_parts", "reward_error", "spans", "contexts", "messages", "ended", "episode", "images"),
)
"""Columns that a conversation and the facts about it need; a run may lack some of them."""

WHY = {
    "done": "the environment ended it",
    "stop": "the model ended it",
    "turns": "it reached agent.max_turns",
    "length": "it reached the limit of its length",
    "timeout": "it reached agent.episode_timeout_s",
    "malformed": "a tool call could not be read",
    "error": "the environment failed",
    "abort": "the engine gave it up",
}
"""Explanations of the values of the columns `ended` and `finish_reason`."""


@dataclass(frozen=True)
class Turn:
    """One part of a conversation: an answer that the policy generated, or the reply to an answer."""

    answer: bool
    messages: list[dict[str, Any]]
    """Messages of the part: one for an answer, any number for a reply. Each has `role` and `content`, and if known
    `calls`, `reasoning`, `name`."""
    start: int
    """Index of the part's first token in the response."""
    tokens: int
    """Number of tokens of the part. 0 for a reply that the policy did not read, or that is in the prompt of the next
    sequence."""
    sequence: int
    """Number, from 0, of the sequence in the row to which the part belongs."""
    context: int
    """Number of tokens before the part in its sequence, the prompt included."""
    versions: list[int]
    """Policy versions of the part's tokens, in order."""
    reward: float | None = None
    """The environment's reward for an answer; None if there is none."""
    log_prob: float | None = None
    """Mean of the engine's log-probs of an answer's tokens; None for a reply."""
    trains: bool = False
    """True if at least one token of the part is in the loss."""
    opening: list[dict[str, Any]] = field(default_factory=list)
    """Messages before an answer that begins a further conversation; empty for all other parts."""


@dataclass(frozen=True)
class Trajectory:
    """One row as prompt and turns; a row may hold several conversations of a program."""

    prompt: list[dict[str, Any]]
    """Messages before the first answer."""
    prompts: list[list[int]]
    """Token ids of the prompt of each sequence; most rows have one sequence."""
    turns: list[Turn]


def conversation(row: Mapping[str, Any]) -> Trajectory:
    """Convert a row of `trajectories/` or `validation/`, with the `COLUMNS` that its run has, to a conversation."""
    images = row.get("images") or ()
    prompt = with_sizes(json.loads(row["prompt"]), images)
    spans: Sequence[Mapping[str, Any]]
    if row.get("messages") is None:
        messages = answered(prompt, row["response"])
        prompt = messages[:-1]
        spans = [{"kind": ANSWER, "tokens": len(row["response_ids"]), "reward": None}]
    else:
        messages, spans = with_sizes(json.loads(row["messages"]), images), row["spans"]
    spans = _in_pairs(spans)
    runs = np.array([(run["version"], run["tokens"]) for run in row["version_runs"]], dtype=np.int64).reshape(-1, 2)
    versions = np.repeat(runs[:, 0], runs[:, 1])
    mask, log_probs = np.array(row["response_mask"]), np.array(row["rollout_log_probs"], dtype=np.float64)
    contexts = row.get("contexts") or [{"prompt": None, "tokens": len(row["response_ids"])}]
    prompts = [row["prompt_ids"] if one["prompt"] is None else one["prompt"] for one in contexts]
    ends = np.cumsum([one["tokens"] for one in contexts])
    openings, parts = _of_contexts(messages, prompt, spans, ends)
    turns: list[Turn] = []
    start = 0
    for span, part in zip(spans, parts, strict=True):
        answer, end = span["kind"] == ANSWER, start + span["tokens"]
        # A reply without tokens belongs to the end of the sequence of its answer.
        sequence = min(int(np.searchsorted(ends, start, "right" if end > start else "left")), len(prompts) - 1)
        if part or end > start:
            turns.append(
                Turn(
                    answer=answer,
                    messages=part,
                    start=start,
                    tokens=span["tokens"],
                    sequence=sequence,
                    context=len(prompts[sequence]) + start - int(ends[sequence] - contexts[sequence]["tokens"]),
                    versions=list(dict.fromkeys(versions[start:end].tolist())),
                    reward=span["reward"],
                    log_prob=float(log_probs[start:end].mean()) if answer and end > start else None,
                    trains=bool(mask[start:end].any()),
                    opening=openings.pop(sequence, []) if answer and sequence else [],
                )
            )
        start = end
    return Trajectory(openings[0], prompts, turns)


def with_sizes(messages: list[dict[str, Any]], images: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return messages with the sizes of their images in place of each `<image>` that the policy did not write; without
    images, the messages as they are."""
    left = iter(images)

    def text(message: dict[str, Any]) -> str:
        first, *others = (message.get("content") or "").split(IMAGE)
        return "".join([first, *((described(image) if (image := next(left, b"")) else IMAGE) + o for o in others)])

    return (
        [message if message["role"] == "assistant" else message | {"content": text(message)} for message in messages]
        if images
        else messages
    )


def described(image: bytes) -> str:
    """Describe an encoded image by its size and format, such as `[image 448 x 448 PNG]`."""
    try:
        from PIL import Image

        with Image.open(io.BytesIO(image)) as opened:
            return f"[image {opened.width} x {opened.height} {opened.format}]"
    # A machine that only reads a run may lack the package, or the reader of a format.
    except (ImportError, OSError):
        return f"[image of {len(image)} bytes]"


def content(message: Mapping[str, Any]) -> str:
    """Return the text of a message; content that is not text becomes JSON, and None becomes ""."""
    text = message.get("content")
    return text if isinstance(text, str) else "" if text is None else json.dumps(text, ensure_ascii=False)


def why_ended(row: Mapping[str, Any]) -> str:
    """Return why the row ended, as `word: explanation`."""
    word = row.get("ended") or row["finish_reason"]
    return f"{word}: {WHY[word]}" if word in WHY else str(word)


def _in_pairs(spans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return `spans` with exactly one reply after each answer; a missing reply becomes one of 0 tokens."""
    none = {"kind": OBSERVATION, "tokens": 0, "reward": None}
    pairs: list[Mapping[str, Any]] = []
    for span in spans:
        if span["kind"] == ANSWER and len(pairs) % 2:
            pairs.append(none)
        pairs.append(span)
    return [*pairs, none] if len(pairs) % 2 else pairs


def _of_contexts(
    messages: list[dict[str, Any]], prompt: list[dict[str, Any]], spans: Sequence[Mapping[str, Any]], ends: np.ndarray
) -> tuple[dict[int, list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    """Divide the messages of a row among its sequences and spans.

    Args:
        messages: all messages of the row.
        prompt: the row's prompt.
        spans: answers and replies in turn.
        ends: index in the response, for each sequence, of the end of its tokens.

    Returns:
        The messages before the first answer of each conversation, by the number of its sequence; and the messages of
        each span.
    """
    talks = split(messages)
    if len(talks) != len(ends):
        # One conversation goes on through all sequences; older rows do not mark the beginning of another one.
        talks, ends = [[message for talk in talks for message in talk]], ends[-1:]
    starts = np.cumsum([0, *(span["tokens"] for span in spans)])[:-1][::2]
    answers = np.bincount(np.searchsorted(ends[:-1], starts, "right"), minlength=len(talks))
    openings, parts = {}, []
    for number, (talk, count) in enumerate(zip(talks, answers.tolist(), strict=True)):
        openings[number], further = _split(talk, prompt_length(talk, prompt), count)
        parts += further
    return openings, parts


def _split(
    messages: list[dict[str, Any]], prompt: int, answers: int
) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Divide a conversation. Returns the messages before the first answer, and the messages of each answer and reply.

    Args:
        messages: one conversation.
        prompt: number of messages at the start that are in the row's prompt, which may hold assistant's messages.
        answers: number of answers; an episode that failed may lack the message of the last one.
    """
    places = [place for place in range(prompt, len(messages)) if messages[place]["role"] == "assistant"]
    places = places[len(places) - answers :] if answers < len(places) else places
    places.append(len(messages))
    parts: list[list[dict[str, Any]]] = []
    for place, end in pairwise(places):
        parts += [messages[place : place + 1], messages[place + 1 : end]]
    parts += [[] for _ in range(2 * answers - len(parts))]
    return messages[: places[0]], parts
