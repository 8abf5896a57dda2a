"""Prints one recorded row on the terminal: the conversation with facts about each part, then the score.

Colours mark the roles. All that they show is also in words, for output without a terminal or with `NO_COLOR`.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from pipeline.track.conversation import Trajectory, Turn, content, why_ended
from pipeline.track.printable import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
CONTROL_STYLE = "bold reverse"
CONTROL_MARKS = "⟦", "⟧"
"""Marks around a control token. Text that only looks like a control token has no marks."""
LABEL_WIDTH = 10


class Page:
    """A printer of rows.

    Args:
        console: the console to print on.
        tokenizer: if given, decoded tokens are shown instead of messages.
    """

    def __init__(self, console: Console, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        self._console, self._tokenizer = console, tokenizer
        self._controls: frozenset[int] = frozenset()
        if tokenizer is not None:
            self._controls = frozenset([*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder])

    def show(self, row: Mapping[str, Any], talk: Trajectory, title: str, place: str) -> None:
        """Print a row.

        Args:
            row: the row, with the columns of `conversation`.
            talk: the row's conversation.
            title: the title, which names the row.
            place: the row's file.
        """
        self._print(Text(title, "bold"))
        if self._tokenizer is None:
            for message in talk.prompt:
                self._heading(_name(message), "prompt")
                self._message(message)
        else:
            self._prompt(talk, 0)
        answers = sum(turn.answer for turn in talk.turns)
        number = sequence = 0
        for turn in talk.turns:
            number += turn.answer
            about = [f"answer {number} of {answers}"] if turn.answer else []
            about += _facts(turn)
            if self._tokenizer is not None:
                if turn.sequence > sequence:
                    self._prompt(talk, turn.sequence)
                sequence = turn.sequence
                self._heading("assistant" if turn.answer else "reply", *about)
                self._tokens(row["response_ids"][turn.start : turn.start + turn.tokens])
                continue
            for message in turn.opening:
                self._heading(_name(message), f"prompt of sequence {turn.sequence + 1}")
                self._message(message)
            for message in turn.messages:
                self._heading(_name(message), *about)
                self._message(message)
                about = []
            if not turn.messages:
                self._heading("assistant" if turn.answer else "reply", *about, "without a message")
        self._print(Text())
        for label, value in (_summary(row, talk, answers) | {"file": place}).items():
            style = "bold red" if label == "error" else ""
            self._print(Text.assemble((f"{label:<{LABEL_WIDTH}}", "bold"), (printable(value), style)))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=not self._console.is_terminal, highlight=False)

    def _heading(self, name: str, *about: str) -> None:
        style = STYLES.get(name.partition(" ")[0], "blue")
        self._print(Text())
        facts = "".join(f" · {word}" for word in about)
        self._print(Text.assemble((f"── {printable(name)}", f"bold {style}"), (facts, "dim")))

    def _prompt(self, talk: Trajectory, sequence: int) -> None:
        ids = talk.prompts[sequence]
        self._heading(f"prompt of sequence {sequence + 1}" if sequence else "prompt", _count(len(ids)))
        self._tokens(ids)

    def _message(self, message: Mapping[str, Any]) -> None:
        style = STYLES.get(str(message["role"]), "blue")
        if message.get("reasoning"):
            self._print(Text(f"reasoning: {printable(message['reasoning'])}", f"italic {style}"))
        if text := content(message):
            self._print(Text(printable(text), style))
        for call in message.get("calls") or []:
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            self._print(Text(printable(f"→ {call['name']} {arguments}"), f"bold {style}"))

    def _tokens(self, ids: list[int]) -> None:
        """Print token ids as text, with control tokens marked and line ends visible."""
        text, plain = Text(), list[int]()
        for token in [*ids, None]:
            if token is not None and token not in self._controls:
                plain.append(token)
                continue
            text.append(printable(self._decode(plain)).replace("\n", "⏎\n"))
            plain.clear()
            if token is not None:
                name = printable(self._decode([token])).replace("\n", "⏎")
                text.append(name.join(CONTROL_MARKS), CONTROL_STYLE)
        self._print(text)

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        options: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, **options)) if ids else ""


def _name(message: Mapping[str, Any]) -> str:
    return f"{message['role']} {message['name']}" if message.get("name") else str(message["role"])


def _count(tokens: int) -> str:
    return f"{tokens} token" if tokens == 1 else f"{tokens} tokens"


def _facts(turn: Turn) -> list[str]:
    """Return the known facts about a turn, as short texts."""
    facts = [_count(turn.tokens)] if turn.tokens else ["not in the response"]
    if turn.sequence and turn.answer:
        facts.append(f"sequence {turn.sequence + 1}")
    if turn.answer and turn.versions:
        versions = ", ".join(str(version) for version in turn.versions)
        facts.append(f"version {versions}" if len(turn.versions) == 1 else f"versions {versions}")
    if turn.log_prob is not None:
        facts.append(f"mean log-prob {turn.log_prob:.3f}")
    if turn.reward is not None:
        facts.append(f"reward {turn.reward:g}")
    if turn.answer and turn.tokens and not turn.trains:
        facts.append("not in the loss")
    return facts


def _summary(row: Mapping[str, Any], talk: Trajectory, answers: int) -> dict[str, str]:
    own = sum(turn.tokens for turn in talk.turns if turn.answer)
    replies = sum(turn.tokens for turn in talk.turns) - own
    lines: dict[str, str] = {}
    truth = json.loads(row.get("ground_truth") or "null")
    if truth is not None:
        lines["truth"] = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    if row["reward_error"] is None:
        lines["score"] = f"{row['score']:g}"
    else:
        lines["error"] = row["reward_error"]
    if parts := json.loads(row["reward_parts"] or "{}"):
        lines["parts"] = ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in parts.items())
    lines["ended"] = why_ended(row)
    prompt = ", ".join(f"prompt {len(ids)}" for ids in talk.prompts)
    lines["tokens"] = f"{prompt}, {answers} answers {own}, replies {replies}"
    if answers == 1 and not replies:
        lines["tokens"] = f"{prompt}, response {own}"
    runs = row["version_runs"]
    if len(runs) > 1:
        lines["versions"] = ", ".join(f"{run['version']} ({_count(run['tokens'])})" for run in runs)
    if row.get("episode"):
        numbers = json.loads(row["episode"])
        lines["numbers"] = ", ".join(f"{name} {json.dumps(value)}" for name, value in numbers.items() if value)
    return lines
