"""Chat messages to prompt tokens, through the model's own chat template, many prompts at a time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config.data import DataConfig
from pipeline.conversations import Messages, read_messages, rendered
from pipeline.errors import short_reason
from pipeline.models.template_arguments import check_template_arguments
from pipeline.omissions import Omissions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
"""Arguments of the chat template that `ChatTokenizer` sets itself."""


class ChatTokenizer:
    """Turns conversations into prompt tokens of at most `data.max_prompt_length`."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> None:
        """Raises ValueError if `data.apply_chat_template_kwargs` sets what the prompt loader decides, or what the
        template does not read."""
        fixed = sorted(set(data.apply_chat_template_kwargs) & set(FIXED_ARGUMENTS))
        if fixed:
            raise ValueError(
                f"data.apply_chat_template_kwargs sets {', '.join(fixed)}, which the prompt loader decides itself; "
                "leave it out"
            )
        check_template_arguments(tokenizer, data.apply_chat_template_kwargs)
        self.tokenizer = tokenizer
        self.data = data
        self.omissions = Omissions()
        self._template_kwargs = {str(key): value for key, value in data.apply_chat_template_kwargs.items()}
        self._column = f"column {data.prompt_key!r} (data.prompt_key)"

    def encode(self, conversations: Sequence[Any]) -> list[list[int]]:
        """All prompt tokens of each conversation, generation prompt included.

        Raises:
            ValueError: a conversation is not a list of messages, the template fails on it or leaves out some of it, or
                it gives no token.
        """
        if not conversations:
            return []
        messages = [self.read(conversation) for conversation in conversations]
        texts = [rendered(some, lambda one: self._render(one, True)) for some in messages]
        encoded = self.tokenizer(
            texts,
            # The template writes the special tokens itself.
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )
        tokens: list[list[int]] = encoded["input_ids"]
        if not all(tokens):
            raise ValueError(f"{self._column}: the chat template makes an empty prompt of it; give the message content")
        for conversation, text in zip(messages, texts, strict=True):
            self.omissions.check(conversation, text, self._without_opening, self._column)
        return tokens

    def fit(self, ids: list[int]) -> list[int] | None:
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
            f"{self._column}: the prompt is {len(ids)} tokens long, more than data.max_prompt_length={limit}; raise "
            "data.max_prompt_length, or choose data.filter_overlong_prompts=true or data.truncation=left|right|middle"
        )

    def _without_opening(self, messages: Messages) -> str:
        return rendered(messages, lambda some: self._render(some, False))

    def _render(self, messages: Messages, generate: bool) -> str:
        try:
            text: Any = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate, **self._template_kwargs
            )
        # A template is foreign code and may raise anything.
        except Exception as error:
            raise ValueError(
                f"{self._column}: the model's chat template fails on this prompt: {short_reason(error)}. "
                "Change the messages (roles, their order) or data.apply_chat_template_kwargs."
            ) from error
        return str(text)

    def read(self, conversation: Any) -> Messages:
        """The messages of a row. Raises ValueError if it holds none."""
        return read_messages(conversation, self._column)
