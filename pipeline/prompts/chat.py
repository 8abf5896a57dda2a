"""Chat messages to prompt tokens, through the model's own chat template.

The template is rendered and tokenised as `apply_chat_template` does it, many prompts at a time. Prompts longer than
`data.max_prompt_length` are filtered, truncated or refused exactly as the config says; nothing is cut silently.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.paths import named_folder
from pipeline.prompts.prompt_file import Place, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUNCATIONS = ("error", "left", "right", "middle")
# What the source decides itself, so it cannot come from `data.apply_chat_template_kwargs`.
FIXED_ARGUMENTS = (
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


def load_tokenizer(
    model: ModelConfig, needs_chat_template: bool = True, key: str | None = None
) -> "PreTrainedTokenizerBase":
    """Tokenizer of `model.tokenizer_path`, or else of `model.path`; sentences call it `key`.

    Raises:
        ValueError: the folder is missing or holds no tokenizer, the tokenizer cannot be loaded, or it has no chat
            template although one is needed.
    """
    key = key or ("model.tokenizer_path" if model.tokenizer_path else "model.path")
    path = model.tokenizer_path or model.path
    if not path:
        raise ValueError("model.path is not set; give it a model folder or a hub name")
    folder = named_folder(path, key)
    if folder is not None:
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ValueError(
                f"{key}: folder {path} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); save the tokenizer "
                "there, or name another folder with model.tokenizer_path"
            )
        path = str(folder)

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    # Damaged files surface as whatever the format's own reader raises (the Rust tokenizers raise plain Exception).
    except Exception as error:
        raise ValueError(
            f"{key}: the tokenizer of {path} cannot be loaded: {reason(error)}. Check that it is a model folder or "
            "a hub name this machine can reach; one that needs its own Python code also needs "
            "model.trust_remote_code=true."
        ) from error
    if needs_chat_template and not tokenizer.chat_template:
        raise ValueError(
            f"{key}: the tokenizer of {path} has no chat template; use an instruction-tuned model, put a "
            "chat_template.jinja into the folder, or name a tokenizer that has one with model.tokenizer_path"
        )
    return tokenizer


class ChatTokenizer:
    """Turns conversations into prompt tokens of at most `data.max_prompt_length`."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> None:
        """Raises ValueError where `data.truncation`, `data.max_prompt_length` or the template arguments are wrong."""
        if data.truncation not in TRUNCATIONS:
            raise ValueError(f"data.truncation is {data.truncation!r}; it must be one of {', '.join(TRUNCATIONS)}")
        if data.max_prompt_length < 1:
            raise ValueError(f"data.max_prompt_length is {data.max_prompt_length}; it must be at least 1 token")
        fixed = sorted(set(data.apply_chat_template_kwargs) & set(FIXED_ARGUMENTS))
        if fixed:
            raise ValueError(
                f"data.apply_chat_template_kwargs sets {', '.join(fixed)}, which the prompt source decides itself; "
                "leave it out"
            )
        self.tokenizer = tokenizer
        self.data = data
        self.template_kwargs = {str(key): value for key, value in data.apply_chat_template_kwargs.items()}

    def __call__(self, conversations: Sequence[Any], places: Sequence[Place]) -> list[list[int] | None]:
        """Prompt tokens of each conversation, or None where the prompt is overlong and filtered."""
        tokens = self.encode(conversations, places)
        return [self.fit(ids, place) for ids, place in zip(tokens, places, strict=True)]

    def encode(self, conversations: Sequence[Any], places: Sequence[Place]) -> list[list[int]]:
        """All prompt tokens of each conversation, generation prompt included.

        Raises:
            ValueError: a conversation is not a list of messages, the template fails on it, or it gives no token.
        """
        if not conversations:
            return []
        messages = [self._messages(value, place) for value, place in zip(conversations, places, strict=True)]
        texts = self._render(messages, places)
        encoded = self.tokenizer(
            texts,
            # The template writes the special tokens itself.
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )
        tokens: list[list[int]] = encoded["input_ids"]
        for ids, place in zip(tokens, places, strict=True):
            if not ids:
                raise ValueError(
                    f"{self._where(place)}: the chat template makes an empty prompt of it; give the message content"
                )
        return tokens

    def fit(self, ids: list[int], place: Place) -> list[int] | None:
        """`ids` cut to `data.max_prompt_length` where longer, or None where such prompts are filtered.

        Raises:
            ValueError: the prompt is overlong and `data.truncation` is `error`.
        """
        limit = self.data.max_prompt_length
        if len(ids) <= limit:
            return ids
        if self.data.filter_overlong_prompts:
            return None
        if self.data.truncation == "left":
            return ids[-limit:]
        if self.data.truncation == "right":
            return ids[:limit]
        if self.data.truncation == "middle":
            head = limit // 2
            return ids[:head] + ids[len(ids) - (limit - head) :]
        raise ValueError(
            f"{self._where(place)}: the prompt is {len(ids)} tokens long, more than data.max_prompt_length={limit}; "
            "raise data.max_prompt_length, or choose data.filter_overlong_prompts=true or "
            "data.truncation=left|right|middle"
        )

    def _messages(self, value: Any, place: Place) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not value:
            what = "null" if value is None else "an empty list" if value == [] else f"of type {type(value).__name__}"
            raise ValueError(
                f"{self._where(place)}: the prompt is {what} where at least one message {{role, content}} is needed"
            )
        messages = []
        for number, message in enumerate(value):
            if not isinstance(message, dict):
                raise ValueError(f"{self._where(place)}: message {number} is {message!r:.80}, not {{role, content}}")
            for name in ("role", "content"):
                if not isinstance(message.get(name), str):
                    raise ValueError(
                        f"{self._where(place)}: `{name}` of message {number} is {message.get(name)!r:.80} where text "
                        "is needed"
                    )
            # A parquet struct has every field in every row; templates ask whether a field is there.
            messages.append({name: field for name, field in message.items() if field is not None})
        return messages

    def _render(self, messages: list[list[dict[str, Any]]], places: Sequence[Place]) -> list[str]:
        # A template is foreign code and may raise anything; the batch is rendered again one by one to name the row.
        try:
            return self._apply(messages)
        except Exception:
            for conversation, place in zip(messages, places, strict=True):
                try:
                    self._apply([conversation])
                except Exception as error:
                    raise ValueError(
                        f"{self._where(place)}: the model's chat template fails on this prompt: {reason(error)}. "
                        "Change the messages (roles, their order) or data.apply_chat_template_kwargs."
                    ) from error
            raise

    def _apply(self, messages: list[list[dict[str, Any]]]) -> list[str]:
        rendered: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.template_kwargs
        )
        return list(rendered)

    def _where(self, place: Place) -> str:
        return f"{place}, column {self.data.prompt_key!r} (data.prompt_key)"
