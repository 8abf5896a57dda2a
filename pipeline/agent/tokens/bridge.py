"""The tokens between two turns of an episode, derived from the model's own chat template and proven before the run.

Guaranteed: the prompt of turn k + 1 is the prompt of turn k, the tokens sampled in turn k, and the tokens of
`Bridge.after`, concatenated. Sampled tokens are never encoded again. `after` gives the tokens that the template writes
after an assistant's message (`template.py`): the closing marker, the separator, the new messages, the generation
prompt. They are exact for any content, because the real messages are rendered each time: templates trim contents, quote
them as JSON, or leave out empty ones. `proof.py` checks before the run that a template allows this.

Not guaranteed: that the template would write the same text for the whole conversation. Templates of reasoning models
remove the thinking from earlier turns once a user's message follows. The context of an episode keeps the thinking:
every token is trained in the context in which it was sampled. `Continuation.appends` is true if the template writes the
same.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.agent.inside.forms import call_id
from pipeline.agent.inside.interface import Call
from pipeline.agent.tokens.control import clean
from pipeline.agent.tokens.proof import Continuation, prove
from pipeline.agent.tokens.template import FORMS, QUESTION, Template, common_prefix, said
from pipeline.omissions import remedy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Bridge:
    """The tokens of prompts, and the tokens between a turn and the next one."""

    def __init__(self, template: Template, continuations: dict[str, Continuation]) -> None:
        """Make a bridge without proof. Use `prove`, which refuses templates that do not work."""
        self._template, self.continuations = template, continuations
        self.tokens, self.template_kwargs = template.tokens, template.kwargs

    @classmethod
    def prove(
        cls, tokenizer: "PreTrainedTokenizerBase", template_kwargs: dict[str, Any], roles: set[str], tools: list[dict]
    ) -> "Bridge":
        """Make a bridge that can continue a turn with messages of these roles.

        Args:
            tokenizer: tokenizer of the model, with its chat template.
            template_kwargs: further arguments of the template (`data.apply_chat_template_kwargs`).
            roles: roles of the messages that may follow a turn, such as `user` and `tool`.
            tools: schemas of the tools, for the first prompt.

        Raises:
            ValueError: the template cannot continue a turn with a message of one of the roles, or the tokenizer is not
                from the `tokenizers` library.
        """
        template = Template(tokenizer, template_kwargs, tools)
        return cls(template, {role: prove(template, role) for role in sorted(roles)})

    def prompt(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """Return the token ids of a whole conversation as a prompt, generation prompt included.

        Special tokens in contents are encoded as ordinary text (`models/special_tokens.py`).

        Args:
            messages: the conversation so far; arguments of calls in it are objects.
            tools: schemas of the tools, which servers may have written; None takes the schemas given to `prove`.

        Raises:
            ValueError: the template fails on the messages.
        """
        messages = [self._readable(message) if message.get("tool_calls") else message for message in messages]
        tools = self._template.tools if tools is None else tools
        return self.tokens.encode(lambda given: self._template.render(*given), [messages, tools])

    def after(self, sampled: Sequence[int], messages: list[dict], calls: Sequence[Call] = ()) -> list[int]:
        """Return the token ids between the sampled tokens of a turn and the start of the next turn.

        Special tokens in contents are encoded as ordinary text.

        Args:
            sampled: token ids of the turn, with or without its closing marker.
            messages: messages after the turn: at least one `{role, content}`, the first of a proven role.
            calls: the tool calls of the turn; the messages of role `tool` are their results in the same order.

        Raises:
            ValueError: the first message has a role that was not proven, the template fails on the messages, or there
                are several messages of this role and the template writes only one.
        """
        if not messages:
            raise ValueError("an answer is continued with at least one message, but there is none")
        proof = self.continuations.get(messages[0]["role"])
        if proof is None:
            raise ValueError(
                f"no continuation with a message of role {messages[0]['role']!r:.40} was proven, but those of "
                f"{', '.join(sorted(self.continuations))}; let the environment answer in one of these roles"
            )
        if not proof.several and sum(message["role"] == messages[0]["role"] for message in messages) > 1:
            raise ValueError(
                f"the model's chat template writes one message of role {messages[0]['role']!r} behind an answer, and "
                f"there are {len(messages)}; let the environment give one, or {remedy('writes several')}"
            )
        called = [[call.id, call.name] for call in calls]

        def tail(given: list[Any]) -> str:
            shown = [Call(number, name, {}) for number, name in given[1]]
            return self._template.tail(proof.way, proof.closing, given[0], shown)

        ids = self.tokens.encode(tail, [messages, called])
        if sampled and sampled[-1] in proof.closings:
            return ids[self.tokens.first_control(ids) + 1 :]
        return ids

    def content_ids(self, text: str) -> list[int]:
        """Encode text from outside to token ids, special tokens in it as ordinary text."""
        return self.tokens.ordinary(clean(text))

    def answer(self, text: str, calls: Sequence[Call]) -> list[int]:
        """Return the token ids of a turn as the template writes it, without its closing marker; used to test parsers.

        Raises:
            ValueError: the template cannot write the calls.
        """
        start = self._template.render([QUESTION], self._template.tools)
        whole, _ = self._with_calls(text, calls)
        length = len(common_prefix(start, whole))
        # The generation prompt and the turn may begin with different tokens of the same first characters.
        for match in self.tokens.control.finditer(whole):
            if match.start() < length < match.end():
                length = match.start()
        answer = whole[length:]
        ends = [match.start() for match in self.tokens.control.finditer(answer) if self._closes(match.group())]
        return self.tokens.as_template(answer[: ends[-1]] if ends else answer)

    def _with_calls(self, text: str, calls: Sequence[Call]) -> tuple[str, str]:
        """Render a conversation that ends with a turn of this text and these calls.

        Returns:
            The rendered text, and the first entry of `FORMS` in which the template writes the calls.

        Raises:
            ValueError: the template writes the calls in no form.
        """
        reason = "the model's chat template leaves out the tool calls of an answer"
        for form in FORMS if calls else ("none",):
            try:
                whole = self._template.render([QUESTION, said(text, calls, form)], self._template.tools, generate=False)
            except ValueError as error:
                reason = str(error) if form == FORMS[0] else reason
                continue
            # A template that expects text may write an object as Python does.
            as_python = any(call.arguments and str(call.arguments) in whole for call in calls)
            if all(call.name in whole.rpartition(QUESTION["content"])[2] for call in calls) and not as_python:
                return whole, form
        raise ValueError(f"{reason}; {remedy('writes tool calls')}")

    @cached_property
    def _form(self) -> str:
        """The entry of `FORMS` in which the template reads calls; the first entry if it reads none."""
        with suppress(ValueError):
            return self._with_calls("", [Call(call_id(0), "tool", {"value": "x"})])[1]
        return FORMS[0]

    def _readable(self, message: dict[str, Any]) -> dict[str, Any]:
        """Convert an assistant's message with calls to the form that the template reads."""
        calls = [
            Call(call.get("id") or call_id(number), call["function"]["name"], call["function"]["arguments"])
            for number, call in enumerate(message["tool_calls"])
        ]
        return message | said(message.get("content") or "", calls, self._form)

    @property
    def shows_tools(self) -> bool:
        """True if the template writes the schemas of the tools into the prompt."""
        return self._template.render([QUESTION], self._template.tools) != self._template.render([QUESTION], None)

    @property
    def closings(self) -> frozenset[int]:
        """Ids of the tokens that end a turn."""
        return frozenset().union(*(proof.closings for proof in self.continuations.values()))

    def text(self, ids: list[int]) -> str:
        """Decode token ids to text, control tokens included."""
        return str(self._template.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def summary(self) -> str:
        """Describe in one line, by role, how messages can follow a turn."""
        parts = []
        for role, proof in sorted(self.continuations.items()):
            notes = ["as the template writes it" if proof.appends else "earlier answers kept as sampled"]
            notes += ["contents trimmed"] if proof.trimmed else []
            notes += [] if proof.several else ["one message behind an answer"]
            parts.append(f"{role} ({', '.join(notes)})")
        return f"continuations proven for role {'; '.join(parts)}"

    def _closes(self, token: str) -> bool:
        return self.tokens.ids[token] in self.closings
