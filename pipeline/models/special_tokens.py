"""Protection against injected special tokens: only the chat template writes them, never the text of a message.

1. If the text of a message spells a special token (contains its characters, such as `<|im_end|>`), the template gets
   the text with another character, a stand-in, in place of the last one of that spelling (`Spellings`). So each special
   token in the template's output was written by the template.
2. A copy of the tokenizer knows the special tokens by random names. In the template's output the special tokens get
   these names, the stand-ins become the original characters again, and the copy encodes the whole text at once. So
   merges and leading spaces are the same as with the original tokenizer.
3. If no text spells a special token, the tokenizer itself encodes the template's output.

Added tokens that are not special, such as `<think>`, and tokens of a single character are not protected.
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
"""Whitespace characters. Added tokens that consist only of these, in some vocabularies, count as ordinary text."""
STAND_INS = [chr(number) for number in range(0x10600, 0x10737)]
"""Characters that serve as stand-ins: letters of Linear A, a script that texts do not contain. They are printable and
have no case, so templates do not change them."""


class Spellings:
    """The special tokens that texts of one conversation spell, and a stand-in for each of their characters.

    Args:
        special: matches any special token.
        given: the conversation, of JSON's types.
        place: beginning of errors, such as a file and line.
    """

    def __init__(self, special: re.Pattern, given: Any, place: str) -> None:
        self._special, self._place = special, place
        self._characters: dict[str, str] = {}
        """Stand-in to the character that it stands for."""
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
        """Sentence on the special tokens that texts spell; "" if there are none."""
        if not self._found:
            return ""
        return f"texts spell special tokens of the tokenizer ({', '.join(self._found):.200}), and are read as text"

    def hide(self, value: Any) -> Any:
        """Return `value`, of JSON's types, with a stand-in for the last character of each spelled special token."""
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
        """Return `text` with the original characters in place of stand-ins."""
        for letter, character in self._characters.items():
            text = text.replace(letter, character).replace(_escaped(letter), character)
        return text

    def render(self, template: Callable[[Any], str], given: Any) -> str:
        """Return the template's output for `given`, with stand-ins.

        Args:
            template: function that renders a conversation.
            given: the conversation or a part of it.

        Raises:
            ValueError: the template fails, or it changes a text that spells a special token, so that the spelling
                cannot be found in the output.
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
    """The special tokens of a tokenizer, and the encoding of a template's output in which texts never become one."""

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
        """Find the special tokens that texts of a conversation spell.

        Args:
            given: the conversation, of JSON's types; texts at any depth count.
            place: beginning of errors, such as a file and line.
        """
        return Spellings(self.special, given, place)

    def encode(self, texts: Sequence[str], spellings: Sequence[Spellings]) -> list[list[int]]:
        """Encode outputs of a template. Returns the token ids of each text.

        Args:
            texts: outputs with stand-ins (`Spellings.render`), or parts of such outputs.
            spellings: the spellings in the conversation of each text.

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
        """Return the token ids of `text`, none of them special, even if the text spells a special token."""
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
        """A copy of the tokenizer with random names for special tokens. For a large vocabulary, making the copy takes
        seconds and 100 MB."""
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
        """Id in the copy to id in the tokenizer, for special tokens whose ids differ."""
        found = {}
        for number, token in self.tokenizer.added_tokens_decoder.items():
            copied = self._copy.token_to_id(self._names.get(token.content, token.content))
            if copied is not None and copied != number:
                found[copied] = number
        return found


@lru_cache(maxsize=2)
def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> SpecialTokens:
    """Return the `SpecialTokens` of a tokenizer, cached, since its copy of the tokenizer is large."""
    return SpecialTokens(tokenizer)


def texts_of(value: Any) -> Iterator[str]:
    """Yield all strings, dict keys included, in a value of JSON's types."""
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
    """Compile a pattern that matches any of `texts`, and prefers the longest; without texts it matches nothing.

    The pattern is a prefix tree, so the time of a match does not grow with the number of texts.
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
    """Return the two parts of a BPE merge, and the two joined."""
    pair = merge.split(" ", 1) if isinstance(merge, str) else merge
    return [*pair, "".join(pair)]


def _escaped(letter: str) -> str:
    """Return the letter in the form in which ASCII-only JSON writes it, with escapes."""
    return json.dumps(letter)[1:-1]
