"""Control tokens: the added tokens of a tokenizer, special or not, which mark the parts of a conversation."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeline.models.special_tokens import BLANK, alternatives, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ControlTokens:
    """A tokenizer with its control tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Find the control tokens. Raises ValueError if the tokenizer is not from the `tokenizers` library."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise ValueError(
                f"the tokenizer is a {type(tokenizer).__name__}, not one of the `tokenizers` library (tokenizer.json), "
                "which episodes need; choose a model with a tokenizer.json"
            )
        self._backend, self._special = backend, special_tokens(tokenizer)
        self.ids = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if len(token.content.strip(BLANK)) > 1
        }
        """Id of each control token, by its text."""
        self.control = alternatives(self.ids)
        """Pattern that matches any control token."""
        self.special = self._special.special
        """Pattern that matches the control tokens that decoding leaves out."""
        self._control_ids = frozenset(self.ids.values())
        # Make the copy of the tokenizer now; later it would block the event loop.
        self.ordinary("")

    def as_template(self, text: str) -> list[int]:
        """Encode text that a template wrote: texts of control tokens in it become control tokens."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, template: Callable[[Any], str], given: Any) -> list[int]:
        """Encode the text that a template writes for `given`; strings in `given` are encoded without special tokens.

        Raises:
            ValueError: `Spellings.render` raised it.
        """
        given = clean(given)
        spellings = self._special.spellings(given)
        return self._special.encode([spellings.render(template, given)], [spellings])[0]

    def ordinary(self, text: str) -> list[int]:
        """Encode `text` without special tokens."""
        return self._special.ordinary(text)

    def count(self, ids: Iterable[int]) -> int:
        """Count the control tokens in `ids`."""
        return sum(map(self._control_ids.__contains__, ids))

    def first_control(self, ids: list[int]) -> int:
        """Return the index of the first control token in `ids`."""
        return next(place for place, number in enumerate(ids) if number in self._control_ids)


@lru_cache(maxsize=1)
def tokens_of(tokenizer: "PreTrainedTokenizerBase") -> ControlTokens:
    """Return the `ControlTokens` of a tokenizer; made once, since all lists of tools share it.

    Raises:
        ValueError: the tokenizer is not from the `tokenizers` library.
    """
    return ControlTokens(tokenizer)


def clean(value: Any) -> Any:
    """Copy a JSON value with all strings in valid UTF-8: a lone surrogate becomes a question mark."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {clean(key): clean(entry) for key, entry in value.items()}
    return [clean(entry) for entry in value] if isinstance(value, list | tuple) else value
