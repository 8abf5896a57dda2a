"""Tokens between two answers of an episode, derived from the model's own chat template and proven before the run.

What is guaranteed: the prompt of answer k + 1 is the prompt of answer k, the tokens sampled for answer k, and
`Bridge.after`, one list behind the other. Nothing that was sampled is encoded again. `after` gives what the template
writes behind an assistant's message: the closing marker, the separator, the new messages, the generation prompt. It is
found by rendering `[user, assistant(SENTINEL), *messages]` and keeping what stands behind the sentinel. It is exact for
any content, because the real messages are rendered each time: templates trim contents, quote them as JSON, or leave out
empty ones.

What is not guaranteed: that the template, given the whole conversation, would write the same. Templates of reasoning
models remove the thinking from earlier answers when a user speaks. The context of an episode keeps it: every token is
trained in the context that it was sampled in. `Proof.appends` tells which of both holds.
"""

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.agent import Call
from pipeline.agent.control import Marks, Tokens, clean
from pipeline.agent.forms import call_id, tool_call
from pipeline.errors import short_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = {"role": "user", "content": "Hello."}
ANSWERS = ("Yes.", "12", "a\n", "é 中 😀")
CONTENTS = ("higher", "", "  x  ", "\n", "a\n\nb\n", "12 3.5", "é 中 😀", '{"a": [1, "b"]}')
WORD = "observed"
THOUGHT = "<think>\nSo.\n</think>\n\nYes."


FORMS = ("objects", "texts", "alone")
"""How templates read calls: with arguments as objects, as JSON texts, or as JSON texts without content beside them."""


class Way(NamedTuple):
    """How the answer in front of new messages is rendered."""

    calls: str
    """`none`, or `objects` or `texts` of `FORMS`: some templates need the call in front of its result."""
    tools: bool
    """Whether with the tools' schemas."""


USER_WAYS = (Way("none", False), Way("none", True))
TOOL_WAYS = (*(Way(form, tools) for form in ("objects", "texts") for tools in (False, True)), *USER_WAYS)


@dataclass(frozen=True)
class Proof:
    """How messages of a role follow an answer."""

    way: Way
    closing: str
    """The control token that `after` begins with where the answer was cut."""
    closings: frozenset[int]
    """Ids of the tokens that the template writes behind an answer; where one was sampled, none is added."""
    several: bool
    """Whether several such messages may follow one answer."""
    appends: bool
    """Whether the template renders the longer conversation as the shorter one and more."""
    trimmed: bool
    """Whether the template removes white space around contents."""


class Bridge:
    """Makes first prompts, and what stands between an answer and the next one."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", template_kwargs: dict[str, Any], tools: list[dict]
    ) -> None:
        """Use `prove`, which refuses what does not work."""
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self.tools = tools
        self.proofs: dict[str, Proof] = {}
        self.tokens = Tokens(tokenizer)
        self._sentinel = f"S{secrets.token_hex(8)}S"

    @classmethod
    def prove(
        cls, tokenizer: "PreTrainedTokenizerBase", template_kwargs: dict[str, Any], roles: set[str], tools: list[dict]
    ) -> "Bridge":
        """A bridge for messages of these roles.

        Args:
            tokenizer: tokenizer of the model, with its chat template.
            template_kwargs: further arguments of the template (`data.apply_chat_template_kwargs`).
            roles: roles of the messages that may follow an answer, such as `user` and `tool`.
            tools: schemas of the tools, for the first prompt.

        Raises:
            ValueError: the template cannot continue an answer with a message of one of the roles, or the tokenizer is
                not one of the `tokenizers` library.
        """
        bridge = cls(tokenizer, template_kwargs, tools)
        for role in sorted(roles):
            bridge.proofs[role] = bridge._prove(role)
        return bridge

    def prompt(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """Tokens of the first prompt, generation prompt included.

        Special tokens in contents are encoded as ordinary text. Other added tokens, such as `<think>`, stay what the
        tokenizer makes of them, because prompts use them in instructions.

        Args:
            messages: the conversation so far; arguments of calls in it are objects.
            tools: schemas of the tools, which servers may have written; None takes those of `prove`.

        Raises:
            ValueError: the template fails on the messages.
        """
        marks = Marks(self.tokens.special)
        messages = [self._readable(message) if message.get("tool_calls") else message for message in messages]
        text = self._render(marks.hide(messages), marks.hide(self.tools if tools is None else tools))
        return self.tokens.encode(text, marks)

    def after(self, sampled: Sequence[int], messages: list[dict], calls: Sequence[Call] = ()) -> list[int]:
        """Tokens behind the sampled ones, up to where the next answer begins. No content gives a control token.

        Args:
            sampled: tokens of the answer, with or without its closing marker.
            messages: what follows the answer: at least one `{role, content}`, the first of a proven role.
            calls: the tool calls of the answer, which the messages of role `tool` answer in their order.

        Raises:
            ValueError: the first message has a role that was not proven, the template fails on the messages, or it
                writes one of them only.
        """
        if not messages:
            raise ValueError("an answer is continued with at least one message, but there is none")
        proof = self.proofs.get(messages[0]["role"])
        if proof is None:
            raise ValueError(
                f"no continuation with a message of role {messages[0]['role']!r:.40} was proven, but those of "
                f"{', '.join(sorted(self.proofs))}; let the environment answer in one of these roles"
            )
        if not proof.several and sum(message["role"] == messages[0]["role"] for message in messages) > 1:
            raise ValueError(
                f"the model's chat template writes one message of role {messages[0]['role']!r} behind an answer, and "
                f"there are {len(messages)}; let the environment give one, or put another chat_template.jinja into the "
                "model's folder"
            )
        marks = Marks(self.tokens.control)
        text = self._tail(proof.way, proof.closing, marks.hide(messages), marks.hide(calls))
        ids = self.tokens.encode(text, marks)
        if sampled and sampled[-1] in proof.closings:
            return ids[self.tokens.first_control(ids) + 1 :]
        return ids

    def content_ids(self, text: str) -> list[int]:
        """Tokens of text from outside, none of which is a control token."""
        return self.tokens.ordinary(clean(text))

    def answer(self, text: str, calls: Sequence[Call]) -> list[int]:
        """Tokens of an answer as the template writes it, without its closing marker: what a parser must read.

        Raises:
            ValueError: the template cannot write the calls.
        """
        start = self._render([QUESTION], self.tools)
        whole, _ = self._with_calls(text, calls)
        length = len(common_prefix(start, whole))
        # The generation prompt and the answer may begin with different tokens of the same first characters.
        for match in self.tokens.control.finditer(whole):
            if match.start() < length < match.end():
                length = match.start()
        answer = whole[length:]
        ends = [match.start() for match in self.tokens.control.finditer(answer) if self._closes(match.group())]
        return self.tokens.as_template(answer[: ends[-1]] if ends else answer)

    def _with_calls(self, text: str, calls: Sequence[Call]) -> tuple[str, str]:
        """A conversation that ends with the answer, and the first form in which the template writes the calls."""
        reason = "the model's chat template leaves out the tool calls of an answer"
        for form in FORMS if calls else ("none",):
            try:
                whole = self._render([QUESTION, said(text, calls, form)], self.tools, generate=False)
            except ValueError as error:
                reason = str(error) if form == FORMS[0] else reason
                continue
            if all(call.name in whole.rpartition(QUESTION["content"])[2] for call in calls):
                return whole, form
        raise ValueError(f"{reason}; put a chat_template.jinja that writes tool calls into the model's folder")

    @cached_property
    def _form(self) -> str:
        """One of `FORMS`, in which the template reads calls; the first where it reads none."""
        with suppress(ValueError):
            return self._with_calls("", [Call(call_id(0), "tool", {"value": "x"})])[1]
        return FORMS[0]

    def _readable(self, message: dict[str, Any]) -> dict[str, Any]:
        """An answer with calls as the template reads it."""
        calls = [Call(call["id"], **call["function"]) for call in message["tool_calls"]]
        return message | said(message.get("content") or "", calls, self._form)

    @property
    def closings(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset().union(*(proof.closings for proof in self.proofs.values()))

    def text(self, ids: list[int]) -> str:
        """Text of tokens, control tokens included (conversation.py)."""
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def summary(self) -> str:
        """What was proven, in one line."""
        parts = []
        for role, proof in sorted(self.proofs.items()):
            notes = ["as the template writes it" if proof.appends else "earlier answers kept as sampled"]
            notes += ["contents trimmed"] if proof.trimmed else []
            notes += [] if proof.several else ["one message behind an answer"]
            parts.append(f"{role} ({', '.join(notes)})")
        return f"continuations proven for role {'; '.join(parts)}"

    def _closes(self, token: str) -> bool:
        return self.tokens.ids[token] in self.closings

    def _render(self, messages: list[dict], tools: list[dict] | None, generate: bool = True) -> str:
        try:
            text: Any = self.tokenizer.apply_chat_template(
                messages,
                tools=[*tools] if tools else None,
                tokenize=False,
                add_generation_prompt=generate,
                **self.template_kwargs,
            )
        # A template is foreign code and may raise anything.
        except Exception as error:
            roles = ", ".join(str(message.get("role"))[:40] for message in messages)
            raise ValueError(
                f"the model's chat template fails on messages of the roles {roles}: {short_reason(error)}"
            ) from error
        return text

    def _behind(self, way: Way, messages: list[dict], calls: Sequence[Call], generate: bool = True) -> str:
        """What the template writes behind the sentinel of an answer."""
        if way.calls != "none" and not calls:
            results = [message for message in messages if message["role"] == "tool"]
            calls = [Call(call_id(number), "tool", {}) for number in range(len(results) or 1)]
        answer = said(self._sentinel, calls, way.calls, in_call=True)
        text = self._render(
            [QUESTION, answer, *answering(messages, calls)], self.tools if way.tools else None, generate
        )
        count = text.count(self._sentinel)
        if count != 1:
            raise ValueError(f"the chat template writes an assistant's text {count} times, not once")
        return text[text.index(self._sentinel) + len(self._sentinel) :]

    def _tail(self, way: Way, closing: str, messages: list[dict], calls: Sequence[Call]) -> str:
        """What the template writes behind an answer: `_behind` without the end of a call."""
        text = self._behind(way, messages, calls)
        return text if way.calls == "none" else text[text.index(closing) :]

    def _prove(self, role: str) -> Proof:
        reason, single = "", None
        for way in TOOL_WAYS if role == "tool" else USER_WAYS:
            if way.tools and not self.tools:
                continue
            try:
                proof = self._try(role, way)
            except ValueError as error:
                reason = str(error)
                continue
            if proof.several:
                return proof
            single = single or proof
        if single is not None:
            return single
        other = "user" if role == "tool" else "tool"
        raise ValueError(
            f"the model's chat template cannot continue an answer with a message of role {role!r}: {reason}. Choose "
            f"agent.observation_role={other} where an environment answers, or put a chat_template.jinja that writes "
            "such messages into the model's folder"
        )

    def _try(self, role: str, way: Way) -> Proof:
        """The proof of one way. Raises ValueError where it fails."""
        name = self.tools[0]["function"]["name"] if self.tools else "tool"
        calls = [] if way.calls == "none" else [Call(call_id(number), name, {}) for number in range(2)]
        message = {"role": role, "content": WORD}
        closing, closings = self._closing(way, message, calls[:1])
        tail = self._tail(way, closing, [message], calls[:1])
        if tail.count(WORD) != 1:
            raise ValueError(f"it writes the message {tail.count(WORD)} times, not once")
        others = [{"role": role, "content": content} for content in CONTENTS]
        for other in others:
            self._check_border(way, closing, other, calls[:1])
        try:
            several = self._tail(way, closing, [message, message], calls).count(WORD) == 2
        except ValueError:
            several = False
        appends = all(self._appends(way, closing, other, calls[:1]) for other in others)
        spaced = self._tail(way, closing, [{"role": role, "content": f" {WORD} "}], calls[:1])
        return Proof(way, closing, closings, several, appends, f" {WORD} " not in spaced)

    def _closing(self, way: Way, message: dict, calls: list[Call]) -> tuple[str, frozenset[int]]:
        """The control token that ends an answer in front of `message`, and the ids of all that end one."""
        text = self._behind(way, [message], calls)
        controls = list(self.tokens.control.finditer(text))
        if not controls:
            raise ValueError("it writes no token of its own behind an answer")
        last = self._behind(way, [], calls, generate=False)
        if way.calls == "none":
            if text[: controls[0].start()].strip():
                raise ValueError(f"behind an answer it writes {text[: controls[0].start()]!r:.40}, not a control token")
            # Where nothing follows, some templates end an answer with another token.
            ends = [controls[0].group(), *(match.group() for match in [self.tokens.control.match(last)] if match)]
            return ends[0], frozenset(self.tokens.ids[end] for end in ends)
        # What both share is the rest of the call, and the closing marker if answers in last place have one.
        shared = len(common_prefix(text, last))
        within = [control.group() for control in controls if control.end() <= shared]
        behind = [control.group() for control in controls if control.start() >= shared]
        closed = self.tokens.control.search(self._behind(Way("none", way.tools), [], [], generate=False))
        found = within[-1:] if closed else behind[:1]
        if not found:
            raise ValueError("it writes no token of its own behind a tool call")
        return found[0], frozenset({self.tokens.ids[found[0]]})

    def _check_border(self, way: Way, closing: str, message: dict, calls: list[Call]) -> None:
        """Raises ValueError where what follows an answer depends on it, or a token could cross the border."""
        tail = self._tail(way, closing, [message], calls)
        encode = self.tokens.as_template
        for answer in ANSWERS:
            whole = self._render(
                [QUESTION, said(answer, calls, way.calls, in_call=True), *answering([message], calls)],
                self.tools if way.tools else None,
            )
            if not whole.endswith(tail):
                raise ValueError(f"what it writes behind an answer depends on the answer ({answer!r})")
            if encode(whole) != encode(whole[: len(whole) - len(tail)]) + encode(tail):
                raise ValueError(f"a token crosses the border between the answer {answer!r} and what follows")

    def _appends(self, way: Way, closing: str, message: dict, calls: list[Call]) -> bool:
        """Whether the whole conversation, as the template writes it, is the first prompt, the answer and the tail."""
        start = self._render([QUESTION], self.tools)
        answer = said(THOUGHT, calls, way.calls)
        try:
            whole = self._render([QUESTION, answer, *answering([message], calls)], self.tools)
        except ValueError:
            return False
        tail = self._tail(way, closing, [message], calls)
        return whole.startswith(start) and whole.endswith(tail) and "So." in whole[len(start) :]


def said(text: str, calls: Sequence[Call], form: str, in_call: bool = False) -> dict[str, Any]:
    """An assistant's message.

    Args:
        text: its content; the argument of its last call with `in_call`, where there are calls.
        calls: its calls, whose arguments are left out with `in_call`.
        form: one of `FORMS`, or `none`.
        in_call: see `text`.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if form == "none" or not calls:
        return message
    if in_call:
        message["content"] = ""
        calls = [Call(call.id, call.name, {"value": "x"}) for call in calls]
        calls[-1].arguments = {"value": text}
    if form == "alone":
        message["content"] = None
    message["tool_calls"] = [tool_call(call.id, call.name, arguments(call, form)) for call in calls]
    return message


def arguments(call: Call, form: str) -> Any:
    """Arguments as templates read them."""
    return call.arguments if form == "objects" else json.dumps(call.arguments, ensure_ascii=False)


def answering(messages: list[dict], calls: Sequence[Call]) -> list[dict]:
    """`messages`, those of role `tool` with id and name of the call that they answer."""
    waiting = iter(calls)
    named = []
    for message in messages:
        call = next(waiting, None) if message["role"] == "tool" else None
        named.append(message if call is None else {"tool_call_id": call.id, "name": call.name, **message})
    return named


def common_prefix(one: str, other: str) -> str:
    """What both begin with."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
