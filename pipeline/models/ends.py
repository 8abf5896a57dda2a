"""End tokens: the tokens after which the generation of a response stops.

    eos of generation_config.json, or else of config.json ─┐
    eos of the tokenizer ──────────────────────────────────┼─► ids
    the chat template's text after an assistant message ───┘

Engines and `generate` of transformers read only the first two. A base model that is trained with the chat template of
another model would end its responses with a token at which generation does not stop. So every command takes its end
tokens from here: engines stop at them, responses are trained up to and including them, and generation_config.json of a
saved model lists them.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.model import ModelConfig
from pipeline.errors import short_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = {"role": "user", "content": "Hello."}


@dataclass(frozen=True)
class Ends:
    """End tokens of a model's responses."""

    ids: tuple[int, ...]
    """Ids of the tokens after which generation stops."""
    missing: tuple[int, ...]
    """Members of `ids` that are not an eos token in the model's configuration files, so that `generate` of transformers
    would not stop at them."""
    line: str
    """Sentence for the user that names the end tokens, with a warning if generation may continue after the text with
    which the chat template ends an assistant message."""
    learnt: bool
    """True if the chat template writes an end token after the last assistant message of a conversation, or if there is
    no template."""


def find_ends(model: ModelConfig, tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, Any]) -> Ends:
    """Find the end tokens of `model` from the configuration files of `model.path`, the tokenizer and the chat template.

    Args:
        model: path of the model.
        tokenizer: the tokenizer of the model, or of `model.tokenizer_path`.
        arguments: further arguments of the chat template (`data.apply_chat_template_kwargs`).

    Raises ValueError if the model's generation_config.json cannot be used.
    """
    from transformers import AutoConfig, GenerationConfig

    path, stored, vocabulary = model.path or "", list[int](), None
    # The loader of the model reports errors in its files.
    with suppress(OSError, ValueError):
        config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        stored = as_list(GenerationConfig.from_model_config(config).eos_token_id)
        vocabulary = config.get_text_config().vocab_size
    try:
        stored = as_list(GenerationConfig.from_pretrained(path).eos_token_id) or stored
    # `transformers` raises OSError if the file is missing, and if it is not JSON.
    except (OSError, ValueError, TypeError, AttributeError) as error:
        file = Path(path) / "generation_config.json"
        if not isinstance(error, OSError) or file.is_file():
            raise ValueError(f"{file} cannot be used ({short_reason(error)}); mend it, or remove it") from error
    return ends_of(tokenizer, arguments, stored, vocabulary)


def ends_of(
    tokenizer: "PreTrainedTokenizerBase",
    arguments: Mapping[str, Any],
    stored: Sequence[int] = (),
    vocabulary: int | None = None,
) -> Ends:
    """Find the end tokens of a model whose configuration was read already; see `find_ends`.

    Args:
        tokenizer: has the chat template and an eos token.
        arguments: further arguments of the chat template.
        stored: ids of the eos tokens in the model's configuration files.
        vocabulary: number of tokens of the model (`vocab_size`); None if it is not known.
    """
    known = list(dict.fromkeys([*stored, *as_list(tokenizer.eos_token_id)]))
    turn, learnt, problem = None, True, ""
    if getattr(tokenizer, "chat_template", None):
        turn, problem, last = _turn_end(tokenizer, arguments, known)
        learnt = not {turn, *known}.isdisjoint(last)
    if turn is not None and vocabulary is not None and turn >= vocabulary:
        problem = f"the chat template ends answers with token {turn}, and the model has {vocabulary} tokens"
    lost = [number for number in known if vocabulary is not None and not 0 <= number < vocabulary]
    if lost and not problem:
        problem = f"the files of the model name {lost[0]} as an end, and it has {vocabulary} tokens"
    ids = [number for number in dict.fromkeys([*known, *as_list(turn)]) if 0 <= number < (vocabulary or number + 1)]
    named = [
        f"{tokenizer.decode([number])} ({number}{', in the chat template only' * (number not in known)})"
        for number in ids
    ]
    line = f"answers end with {' or '.join(named)}" if ids else "no token ends an answer, so each is as long as can be"
    missing = tuple(number for number in ids if number not in stored)
    return Ends(tuple(ids), missing, f"{line}; {problem}" if problem else line, learnt)


def as_list(ids: Any) -> list[int]:
    """Return as a list the token ids that `generation_config.json` stores as a number, a list, or null."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def as_stored(ids: Sequence[int]) -> int | list[int]:
    """Return token ids in the form of `generation_config.json`: a single id as a number, several as a list."""
    return ids[0] if len(ids) == 1 else list(ids)


def _turn_end(
    tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, Any], known: Sequence[int]
) -> tuple[int | None, str, list[int]]:
    """Find the token with which the chat template ends an assistant message.

    Args:
        tokenizer, arguments: as in `ends_of`.
        known: ids of end tokens that are known already; one of these is preferred.

    Returns:
        the token or None; a sentence on the problem if it is None, else ""; and the ids of the template's text after
        the last assistant message of a conversation.
    """
    try:
        last = _behind(tokenizer, arguments, [])
    # A template is foreign code and may raise anything.
    except Exception as error:  # noqa: BLE001
        return None, f"the chat template fails on an answer, so its end is not known: {short_reason(error)}", []
    try:
        followed = _behind(tokenizer, arguments, [QUESTION])
    except Exception:  # noqa: BLE001
        followed = last
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}

    def tokens(text: str) -> list[int]:
        ids: Any = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids)

    # The common beginning closes the assistant message; then a template may open the next message, or end the text.
    closing = os.path.commonprefix([last, followed])
    for text in (closing, last, *([] if closing.strip() else [followed])):
        controls = [number for number in tokens(text) if number in added]
        if controls:
            return next((number for number in controls if number in known), controls[0]), "", tokens(last)
    text = (closing or last).strip()
    if not text:
        return None, "the chat template writes no end after an answer, so only these can end one", []
    return (
        None,
        f"the chat template ends an answer with {text!r:.60}, which is {len(tokens(text))} tokens, so generation does "
        "not stop there: make it one special token of the tokenizer (rollout.stop ends answers at a text, but only in "
        "runs and evaluations)",
        [],
    )


def _behind(tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, Any], following: list[dict]) -> str:
    """Return the text that the chat template writes after an assistant message.

    Args:
        tokenizer, arguments: as in `ends_of`.
        following: messages after the assistant message.
    """
    answer = f"S{secrets.token_hex(8)}S"
    messages = [QUESTION, {"role": "assistant", "content": answer}, *following]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
    if answer not in text:
        raise ValueError("it leaves the answer out")
    return text.rpartition(answer)[2]
