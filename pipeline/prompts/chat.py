"""Convert chat messages to prompt tokens with the model's own chat template, many prompts at a time.

If the last message of a prompt has the role `assistant`, the policy continues it: the template writes neither an end of
that turn nor the opening of another one. A conversation must end with such a message, or with one that the policy can
respond to.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config.data import DataConfig
from pipeline.conversations import Messages, begun_answer, read_messages, rendered, with_images
from pipeline.errors import short_reason
from pipeline.models.special_tokens import Spellings, special_tokens
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

QUESTIONS = ("user", "tool")
"""Roles of messages after which a template always opens the assistant's turn."""
CONTINUED = (
    "prompts end with a message of the assistant: the policy continues it, and rewards judge the whole; remove the "
    "message if it is an answer that was left in the file"
)


class ChatTokenizer:
    """Convert conversations to prompt tokens, and cut them to `data.max_prompt_length`."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", data: DataConfig) -> None:
        """Store tokenizer and settings.

        Raises ValueError if `data.apply_chat_template_kwargs` has an argument of `FIXED_ARGUMENTS`, or one that the
        template does not read.
        """
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
        self._special = special_tokens(tokenizer)
        self._template_kwargs = {str(key): value for key, value in data.apply_chat_template_kwargs.items()}
        self._column = f"column {data.prompt_key!r} (data.prompt_key)"

    def encode(self, conversations: Sequence[Any], images: Sequence[int] | None = None) -> list[list[int]]:
        """Return the prompt tokens of each conversation, up to the position at which the policy's response begins.

        `images` is the number of images of each conversation; each is one placeholder in the tokens. None: no images.

        Raises:
            ValueError: a conversation is not a list of messages, does not end with a message that the policy can
                respond to or continue, or gives no token; or its text has a special token that cannot be encoded as
                text; or the template fails on the conversation or leaves out a part of it.
        """
        if not conversations:
            return []
        counts = images or [0] * len(conversations)
        messages = [
            with_images(self.read(conversation, count), count, self._column)
            for conversation, count in zip(conversations, counts, strict=True)
        ]
        spellings = [self._special.spellings(some, f"{self._column}: ") for some in messages]
        texts = [self._text(some, spelled) for some, spelled in zip(messages, spellings, strict=True)]
        tokens = self._special.encode(texts, spellings)
        if not all(tokens):
            raise ValueError(f"{self._column}: the chat template makes an empty prompt of it; give the message content")
        for conversation, text, spelled in zip(messages, texts, spellings, strict=True):
            self.omissions.note(spelled.note)
            self.omissions.check(conversation, spelled.show(text), self._without_opening, self._column)
        return tokens

    def fit(self, ids: list[int]) -> list[int] | None:
        """Cut the prompt tokens `ids` to `data.max_prompt_length` if there are more.

        Returns None for such a prompt if `data.filter_overlong_prompts` is true.

        Raises:
            ValueError: the prompt is too long and `data.truncation` is `error`.
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

    def _text(self, messages: Messages, spellings: Spellings) -> str:
        """Render the prompt as text. Special tokens in the messages are replaced by the stand-ins of `spellings`."""
        if (begun := begun_answer(messages)) is None:
            self._check_question(messages)
            return spellings.render(self._with_opening, messages)
        if messages[-1].get("tool_calls"):
            raise ValueError(
                f"{self._column}: the last message is the assistant's and has tool calls without results; add the "
                "results, or remove the message"
            )
        if not begun.strip():
            raise ValueError(
                f"{self._column}: the last message is the assistant's and has no text that the policy could continue; "
                "remove it"
            )
        text = spellings.render(
            lambda some: rendered(some, lambda one: self._render(one, False, continue_final_message=True)), messages
        )
        self._check_begun(messages[:-1], spellings.show(text), begun)
        self.omissions.note(CONTINUED)
        return text

    def _check_question(self, messages: Messages) -> None:
        """Raise ValueError if the rendered prompt ends with a finished turn of the assistant, although the last message
        has another role."""
        *before, last = messages
        if last["role"] in QUESTIONS or not before:
            return
        text, opened = self._without_opening(messages), self._with_opening(before)
        ends = opened != self._without_opening(before) and text.startswith(opened)
        while before and before[-1]["role"] == last["role"]:
            before.pop()
        if begun := begun_answer(before):
            # Some templates write all messages of the system at the beginning.
            answer = self._without_opening(before)
            said = answer.rfind(begun.strip()) + len(begun.strip())
            ends = ends or len(os.path.commonprefix([answer, text])) < said
        if ends:
            raise ValueError(
                f"{self._column}: the last message, of role {last['role']!r:.40}, is none that the chat template lets "
                "the policy answer: it would read a finished answer at the end; remove it, or write its role as "
                "assistant if it is an answer that the policy is to continue"
            )

    def _check_begun(self, before: Messages, text: str, begun: str) -> None:
        """Raise ValueError if the template changes the beginning of a response that the policy is to continue.

        Args:
            before: the messages before the response.
            text: the rendered prompt, which should end with `begun`.
            begun: text of the response so far.
        """
        wanted = "give the policy a message to answer, or begin its answer in the form that the template writes"
        if not text.endswith(begun):
            raise ValueError(
                f"{self._column}: the last message is the assistant's, which the policy is to continue, and the chat "
                f"template changes its beginning or its end ({begun!r:.80}); {wanted}"
            )
        opening = self._with_opening(before) if before else ""
        head = text[: len(text) - len(begun)]
        inserted = head[len(os.path.commonprefix([opening, head])) :]
        for token in self.tokenizer.added_tokens_decoder.values() if inserted.strip() else ():
            if token.content in inserted and token.content in begun and token.content not in self._special.texts:
                raise ValueError(
                    f"{self._column}: the last message is the assistant's, which the policy is to continue, and the "
                    f"chat template writes {inserted!r:.80} in front of it, though it has {token.content} itself; "
                    f"{wanted}"
                )

    def _with_opening(self, messages: Messages) -> str:
        return rendered(messages, lambda some: self._render(some, True))

    def _without_opening(self, messages: Messages) -> str:
        return rendered(messages, lambda some: self._render(some, False))

    def _render(self, messages: Messages, generate: bool, **more: Any) -> str:
        try:
            text: Any = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate, **more, **self._template_kwargs
            )
        # A template is foreign code and may raise anything.
        except Exception as error:
            raise ValueError(
                f"{self._column}: the model's chat template fails on this prompt: {short_reason(error)}. "
                "Change the messages (roles, their order) or data.apply_chat_template_kwargs."
            ) from error
        return str(text)

    def read(self, conversation: Any, images: int = 0) -> Messages:
        """Read the messages in the prompt column of a row with `images` images. Raises ValueError if it does not hold
        messages."""
        return read_messages(conversation, self._column, images > 0)
