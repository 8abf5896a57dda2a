"""A check that a model's embedding has a row for each token id that the tokenizer may produce."""

from typing import TYPE_CHECKING

from pipeline.config.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GIVEN = ("bos_token", "eos_token", "unk_token")
"""Roles of special tokens that prompts and responses may contain. Others, such as padding, do not occur in them."""
DIALOGUE = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Hello."},
]


def vocabulary(model: ModelConfig) -> int | None:
    """Return the number of rows of the embedding of `model.path` (`vocab_size` of its configuration).

    None if the configuration cannot be read.
    """
    from transformers import AutoConfig

    # The loader of the model reports errors in its files.
    try:
        config = AutoConfig.from_pretrained(model.path or "", trust_remote_code=model.trust_remote_code)
    except Exception:  # noqa: BLE001 (each class has errors of its own)
        return None
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def check_vocabulary(tokenizer: "PreTrainedTokenizerBase", source: str | None, rows: int | None, model: str) -> str:
    """Check that each token id that can occur has a row in the embedding.

    Returns a note if the tokenizer has ids without a row that cannot occur in prompts or responses; "" if all ids have
    rows.

    Args:
        tokenizer: the tokenizer whose ids the model reads.
        source: folder or Hub name of the tokenizer, for sentences.
        rows: number of rows of the model's embedding; None if it is not known.
        model: setting and path of the model, for sentences.

    Raises:
        ValueError: an id without a row can occur: in the tokens of a text, in the chat template, or as the token of a
            role in `GIVEN`.
    """
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if rows is not None and number >= rows}
    if not beyond:
        return ""
    roles = [tokenizer.special_tokens_map.get(role) for role in GIVEN]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    written = _written(tokenizer)
    given = {n: token for n, token in beyond.items() if n not in special or token in roles or token in written}
    first = min(given or beyond)
    named = (
        f"the tokenizer of {source} has {len(tokenizer):,} tokens with ids up to {max(beyond)}, and the embedding of "
        f"{model} has {rows:,} rows (vocab_size of its config.json): {len(beyond)} tokens have none, such as "
        f"{(given or beyond)[first]!r} ({first})"
    )
    if given:
        raise ValueError(
            f"{named}; name the tokenizer that the model was trained with, or give the model rows for them: "
            "model.resize_token_embeddings(len(tokenizer)) of transformers, saved with both"
        )
    return f"{named}; they are special, and neither text nor the chat template gives one"


def _written(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the chat template and, since it may put special tokens together from parts, its output for a dialogue."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return ""
    texts = [str(text) for text in (template.values() if isinstance(template, dict) else [template])]
    # A template is foreign code and may raise anything; the commands that use it report that.
    try:
        texts.append(str(tokenizer.apply_chat_template(DIALOGUE, tokenize=False, add_generation_prompt=True)))
    except Exception:  # noqa: BLE001
        return "\n".join(texts)
    return "\n".join(texts)
