"""Special tokens: a chat template writes them, and text from outside never becomes one.

1. If a text of a conversation spells a special token, the template gets the text with a stand-in for the last character
   of that spelling (`Spellings`). So every special token in its output is its own.
2. A copy of the tokenizer knows the special tokens by random names. The template's own ones are renamed, the characters
   are put back, and the copy encodes the whole text at once. So merges, and spaces that a tokenizer puts in front of
   texts, are the tokenizer's.
3. If no text spells one, the tokenizer encodes the template's output.

Added tokens that are not special, such as `<think>`, stay what they are. So do tokens of one character.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

BLANK = " \t\r\n▁"
"""Added tokens of only these characters are ordinary text: runs of white space, which some vocabularies add."""
STAND_INS = [chr(number) for number in range(0x10600, 0x10737)]
"""Letters of Linear A: no text has them. They are printable and have no case, so templates do not change them."""


class Spellings:
    """Special tokens that the texts of one conversation spell."""

    def __init__(self, special: re.Pattern, given: Any, place: str) -> None:
        self._special, self._place = special, place
        self._characters: dict[str, str] = {}
        """Character of each stand-in."""
        texts = [*texts_of(given)]
        self._found = sorted({found for text in texts for found in special.findall(text)})
        if self._found:
            whole = "\n".join(texts)
            unused = (letter for letter in STAND_INS if letter not in whole and _escaped(letter) not in whole)
            # The rest of a spelling may spell a shorter one.
            characters = sorted({character for text in self._found for character in text})
            self._characters = dict(zip(unused, characters, strict=False))
        self._stand_ins = {character: letter for letter, character in self._characters.items()}

    @property
    def note(self) -> str:
        """A sentence on the spellings that are there; empty if there are none."""
        if not self._found:
            return ""
        return f"texts spell special tokens of the tokenizer ({', '.join(self._found):.200}), and are read as text"

    def hide(self, value: Any) -> Any:
        """Return `value`, of JSON's types, with stand-ins."""
        if not self._found:
            return value
        if isinstance(value, str):
            while self._special.search(value):
                value = self._special.sub(lambda match: match[0][:-1] + self._stand_ins[match[0][-1]], value)
            return value
        if isinstance(value, dict):
            return {self.hide(key): self.hide(entry) for key, entry in value.items()}
        return [self.hide(entry) for entry in value] if isinstance(value, list | tuple) else value

    def show(self, text: str) -> str:
        """Return `text` with the characters in place of their stand-ins."""
        for letter, character in self._characters.items():
            text = text.replace(letter, character).replace(_escaped(letter), character)
        return text

    def render(self, template: Callable[[Any], str], given: Any) -> str:
        """Return the template's output, with stand-ins.

        Args:
            template: writes `given`.
            given: the conversation or a part of it.

        Raises:
            ValueError: the template fails, or it changes a spelling, so that it cannot be found.
        """
        text = template(given)
        hidden = self.hide(given)
        if hidden == given:
            return text
        written = template(hidden)
        if self.show(written) == text:
            return written
        if self._special.findall(written) == self._special.findall(text):
            # The template writes it in a way that spells no special token.
            return text
        raise ValueError(
            f"{self._place}the model's chat template changes a text that spells a special token of the tokenizer "
            f"({', '.join(self._found):.200}), so it cannot be taken as text; remove it from the text"
        )


class SpecialTokens:
    """The special tokens of a tokenizer, and its way to encode a template's output."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        marked = {*(token.content for token in added if token.special), *map(str, tokenizer.all_special_tokens)}
        self.texts = {text for text in marked if len(text.strip(BLANK)) > 1}
        self.special = alternatives(self.texts)
        """Matches any special token."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Any = backend if hasattr(backend, "to_str") else None
        normalizer = self._backend is not None and self._backend.normalizer is not None
        self._folds = normalizer and any(token.normalized and token.content in self.texts for token in added)
        self._names = {text: f"\ue000{secrets.token_hex(8)}\ue000" for text in self.texts}

    def spellings(self, given: Any, place: str = "") -> Spellings:
        """Find the spellings in the texts of a conversation, at any depth; `place` is the beginning of errors."""
        return Spellings(self.special, given, place)

    def encode(self, texts: Sequence[str], spellings: Sequence[Spellings]) -> list[list[int]]:
        """Encode a template's output.

        Args:
            texts: with stand-ins (`Spellings.render`), or parts of such texts.
            spellings: spellings of each text's conversation.

        Raises:
            ValueError: a text spells a special token, and the tokenizer is not one of the `tokenizers` library.
        """
        shown = [some.show(text) for text, some in zip(texts, spellings, strict=True)]
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = list(self.tokenizer(shown, **options)["input_ids"])
        for place, (text, one) in enumerate(zip(texts, shown, strict=True)):
            # A normalizer may turn other characters into the text of a special token.
            if text != one or (self._folds and self.count(ids[place]) > len(self.special.findall(text))):
                ids[place] = self._encode(text, spellings[place])
        return ids

    def ordinary(self, text: str) -> list[int]:
        """Encode `text` as ordinary text: no id is a special token's."""
        ids: list[int] = self._copy.encode(text, add_special_tokens=False).ids
        return [self._ids.get(number, number) for number in ids]

    def count(self, ids: Iterable[int]) -> int:
        """Count the special tokens among `ids`."""
        return sum(map(self._special_ids.__contains__, ids))

    def _encode(self, text: str, spellings: Spellings) -> list[int]:
        if self._backend is None:
            raise ValueError(
                f"{spellings._place}a text spells a special token of the tokenizer, which a "
                f"{type(self.tokenizer).__name__} cannot take as text (only tokenizers of the `tokenizers` library, "
                "with a tokenizer.json, can); remove it from the text"
            )
        renamed = self.special.sub(lambda match: self._names[match[0]], text)
        return self.ordinary(spellings.show(renamed))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        number: Any = self.tokenizer.convert_tokens_to_ids
        return frozenset(map(number, self.texts))

    @cached_property
    def _copy(self) -> "Tokenizer":
        """The tokenizer with random names of its special tokens. It takes seconds and 100 MB for a large vocabulary."""
        from tokenizers import Tokenizer

        names = self._names
        state = json.loads(self._backend.to_str())
        state |= {"truncation": None, "padding": None, "post_processor": None}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = state["model"]
        vocabulary = model["vocab"]
        # Some vocabularies hold the texts of special tokens, which a model may then find in any text.
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        if isinstance(unknown := model.get("unk_token"), str):
            model["unk_token"] = names.get(unknown, unknown)
        if "merges" in model and not names.keys().isdisjoint(vocabulary):
            model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_parts(merge))]
        return Tokenizer.from_str(json.dumps(state))

    @cached_property
    def _ids(self) -> dict[int, int]:
        """Map from the copy's ids to the tokenizer's, for ids that differ."""
        found = {}
        for number, token in self.tokenizer.added_tokens_decoder.items():
            copied = self._copy.token_to_id(self._names.get(token.content, token.content))
            if copied is not None and copied != number:
                found[copied] = number
        return found


@lru_cache(maxsize=2)
def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> SpecialTokens:
    """Return the `SpecialTokens` of a tokenizer; all callers share them, as the copy is large."""
    return SpecialTokens(tokenizer)


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts in a value of JSON's types."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from texts_of(key)
            yield from texts_of(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from texts_of(entry)


def alternatives(texts: Iterable[str]) -> re.Pattern:
    """Compile a pattern that matches any of `texts`, the longest first; without texts it matches nothing.

    The time of a match does not grow with the number of texts.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_pattern(tree) if tree else r"(?!)")


def _pattern(tree: dict[str, Any]) -> str:
    branches = [re.escape(character) + _pattern(node) for character, node in tree.items() if character]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and "" not in tree else f"(?:{'|'.join(branches)})"
    return pattern + "?" if "" in tree else pattern


def _parts(merge: str | list[str]) -> list[str]:
    """Return the two parts of a BPE merge, and their join."""
    pair = merge.split(" ", 1) if isinstance(merge, str) else merge
    return [*pair, "".join(pair)]


def _escaped(letter: str) -> str:
    """Return the letter as JSON in ASCII has it."""
    return json.dumps(letter)[1:-1]
