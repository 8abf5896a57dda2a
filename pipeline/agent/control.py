"""Control tokens: text from outside never becomes one.

Where a content holds the text of a control token, that text alone is encoded as ordinary text; all else stays as the
template and the tokenizer make it.
"""

import json
import re
import secrets
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeline.agent import Call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ORDINARY = " \t\r\n▁"
"""Added tokens of these characters alone are ordinary text: runs of white space, which some vocabularies add."""


class Marks:
    """Texts of control tokens in what comes from outside, each hidden behind a mark that templates leave alone."""

    def __init__(self, control: re.Pattern) -> None:
        self.control = control
        self.hidden: dict[str, str] = {}
        """Mark to text."""

    def hide(self, value: Any) -> Any:
        """`value` (text, list, dict, call) with marks, and as valid UTF-8."""
        if isinstance(value, str):
            return self.control.sub(self._mark, clean(value))
        if isinstance(value, dict):
            return {self.hide(key): self.hide(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(entry) for entry in value]
        if isinstance(value, Call):
            return Call(self.hide(value.id), self.hide(value.name), {})
        return value

    def show(self, text: str) -> str:
        """`text` with what its marks hide."""
        for mark, hidden in self.hidden.items():
            text = text.replace(mark, hidden)
        return text

    def _mark(self, match: re.Match) -> str:
        mark = f"M{secrets.token_hex(8)}M"
        self.hidden[mark] = match.group()
        return mark


class Tokens:
    """The tokenizer, and a copy of it that knows no control token."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raises ValueError where the tokenizer is not one of the `tokenizers` library."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise ValueError(
                f"the tokenizer is a {type(tokenizer).__name__}, not one of the `tokenizers` library (tokenizer.json), "
                "which episodes need; choose a model with a tokenizer.json"
            )
        from tokenizers import Tokenizer

        self._backend = backend
        added = {
            token.content: (number, token)
            for number, token in tokenizer.added_tokens_decoder.items()
            if len(token.content.strip(ORDINARY)) > 1
        }
        self.ids = {text: number for text, (number, _) in added.items()}
        """Control token to id."""
        self.control = alternatives(added)
        """Matches any control token."""
        self.special = alternatives(text for text, (_, token) in added.items() if token.special)
        """Matches those that decoding leaves out."""
        self._control_ids = frozenset(self.ids.values())
        self._strips = {text: (token.lstrip, token.rstrip) for text, (_, token) in added.items()}
        self._folds = backend.normalizer is not None and any(token.normalized for _, token in added.values())
        state = json.loads(backend.to_str())
        state |= {"truncation": None, "padding": None, "post_processor": None}
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in self.ids]
        # Text behind a control token is not the beginning of the text, where some vocabularies put a space.
        first = state["pre_tokenizer"] or {}
        for part in [first, *first.get("pretokenizers", [])]:
            if part.get("prepend_scheme") == "first":
                part["prepend_scheme"] = "never"
        self._plain = Tokenizer.from_str(json.dumps(state))

    def as_template(self, text: str) -> list[int]:
        """Tokens of what a template wrote: the texts of control tokens are control tokens."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, text: str, marks: Marks) -> list[int]:
        """Tokens of what a template wrote, with what the marks hide as ordinary text."""
        if not marks.hidden:
            ids = self.as_template(text)
            # A normalizer may turn other characters into the text of a control token.
            if not self._folds or self.count(ids) <= len(self.control.findall(text)):
                return ids
        ids = []
        position, strip = 0, False
        for match in self.control.finditer(text):
            before, after = self._strips[match.group()]
            ids += self._between(text[position : match.start()], strip, before, marks)
            ids.append(self.ids[match.group()])
            position, strip = match.end(), after
        return ids + self._between(text[position:], strip, False, marks)

    def ordinary(self, text: str) -> list[int]:
        """Tokens of `text`, none of which is a control token."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids) or len(text) < 2:
            return ids
        # The vocabulary itself holds the text of a control token: cut the text within it.
        cuts = [match.start() + 1 for match in self.control.finditer(text)] or [len(text) // 2]
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [number for piece in pieces for number in self.ordinary(piece)]

    def count(self, ids: Iterable[int]) -> int:
        """How many of `ids` are control tokens."""
        return sum(map(self._control_ids.__contains__, ids))

    def first_control(self, ids: list[int]) -> int:
        """Place of the first control token."""
        return next(place for place, number in enumerate(ids) if number in self._control_ids)

    def _between(self, text: str, strip_left: bool, strip_right: bool, marks: Marks) -> list[int]:
        text = text.lstrip() if strip_left else text
        text = text.rstrip() if strip_right else text
        return self.ordinary(marks.show(text))


@lru_cache(maxsize=1)
def tokens_of(tokenizer: "PreTrainedTokenizerBase") -> Tokens:
    """The `Tokens` of a tokenizer. All lists of tools share them: a copy of a large vocabulary takes seconds, in which
    the event loop stands still, and 100 MB.

    Raises:
        ValueError: as `Tokens`.
    """
    return Tokens(tokenizer)


def alternatives(texts: Iterable[str]) -> re.Pattern:
    """Matches any of `texts`, the longest first; nothing where there are none."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")


def clean(text: str) -> str:
    """`text` as valid UTF-8: a lone surrogate becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
