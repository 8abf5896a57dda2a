"""Proof, before the run and on the model's own chat template, that messages of a role can follow a turn."""

from dataclasses import dataclass

from pipeline.agent.inside.forms import call_id
from pipeline.agent.inside.interface import Call
from pipeline.agent.tokens.template import QUESTION, Rendering, Template, answering, common_prefix, said
from pipeline.omissions import remedy

ANSWERS = ("Yes.", "12", "a\n", "é 中 😀")
CONTENTS = ("higher", "", "  x  ", "\n", "a\n\nb\n", "12 3.5", "é 中 😀", '{"a": [1, "b"]}')
WORD = "observed"
THOUGHT = "<think>\nSo.\n</think>\n\nYes."

USER_WAYS = (Rendering("none", False), Rendering("none", True))
TOOL_WAYS = (*(Rendering(form, tools) for form in ("objects", "texts") for tools in (False, True)), *USER_WAYS)


@dataclass(frozen=True)
class Continuation:
    """The proven way in which messages of a role can follow a turn."""

    way: Rendering
    closing: str
    """The control token that ends a turn; `after` begins with it if the turn was cut before its end."""
    closings: frozenset[int]
    """Ids of the tokens that the template writes to close a turn; if one of them was sampled, none is added."""
    several: bool
    """True if several messages of the role may follow one turn."""
    appends: bool
    """True if the template renders a conversation with more messages as the shorter one with text appended."""
    trimmed: bool
    """True if the template removes white space around contents."""


def prove(template: Template, role: str) -> Continuation:
    """Find a way in which messages of a role can follow a turn, preferably several messages.

    Raises:
        ValueError: the template cannot continue a turn with such a message.
    """
    reason, single = "", None
    for way in TOOL_WAYS if role == "tool" else USER_WAYS:
        if way.tools and not template.tools:
            continue
        try:
            proof = _try(template, role, way)
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
        f"agent.observation_role={other} where an environment answers, or {remedy('writes such messages')}"
    )


def _try(template: Template, role: str, way: Rendering) -> Continuation:
    """Check that messages of a role can follow a turn that is rendered in this way. Raises ValueError if they
    cannot."""
    name = template.tools[0]["function"]["name"] if template.tools else "tool"
    calls = [] if way.calls == "none" else [Call(call_id(number), name, {}) for number in range(2)]
    message = {"role": role, "content": WORD}
    closing, closings = _closing(template, way, message, calls[:1])
    tail = template.tail(way, closing, [message], calls[:1])
    if tail.count(WORD) != 1:
        raise ValueError(f"it writes the message {tail.count(WORD)} times, not once")
    others = [{"role": role, "content": content} for content in CONTENTS]
    for other in others:
        _check_border(template, way, closing, other, calls[:1])
    try:
        several = template.tail(way, closing, [message, message], calls).count(WORD) == 2
    except ValueError:
        several = False
    appends = all(_appends(template, way, closing, other, calls[:1]) for other in others)
    spaced = template.tail(way, closing, [{"role": role, "content": f" {WORD} "}], calls[:1])
    return Continuation(way, closing, closings, several, appends, f" {WORD} " not in spaced)


def _closing(template: Template, way: Rendering, message: dict, calls: list[Call]) -> tuple[str, frozenset[int]]:
    """Return the control token that ends a turn before `message`, and the ids of all tokens that end a turn."""
    text = template.behind(way, [message], calls)
    controls = list(template.tokens.control.finditer(text))
    if not controls:
        raise ValueError("it writes no token of its own behind an answer")
    last = template.behind(way, [], calls, generate=False)
    if way.calls == "none":
        if text[: controls[0].start()].strip():
            raise ValueError(f"behind an answer it writes {text[: controls[0].start()]!r:.40}, not a control token")
        # At the end of a conversation, some templates end a turn with another token.
        ends = [controls[0].group(), *(match.group() for match in [template.tokens.control.match(last)] if match)]
        return ends[0], frozenset(template.tokens.ids[end] for end in ends)
    # Both share the rest of the call, and the closing marker if the last turn of a conversation has one.
    shared = len(common_prefix(text, last))
    within = [control.group() for control in controls if control.end() <= shared]
    behind = [control.group() for control in controls if control.start() >= shared]
    closed = template.tokens.control.search(template.behind(Rendering("none", way.tools), [], [], generate=False))
    found = within[-1:] if closed else behind[:1]
    if not found:
        raise ValueError("it writes no token of its own behind a tool call")
    return found[0], frozenset({template.tokens.ids[found[0]]})


def _check_border(template: Template, way: Rendering, closing: str, message: dict, calls: list[Call]) -> None:
    """Raise ValueError if the text after a turn depends on the turn, or a token could cross the border between them."""
    tail = template.tail(way, closing, [message], calls)
    encode = template.tokens.as_template
    for answer in ANSWERS:
        whole = template.render(
            [QUESTION, said(answer, calls, way.calls, in_call=True), *answering([message], calls)],
            template.tools if way.tools else None,
        )
        if not whole.endswith(tail):
            raise ValueError(f"what it writes behind an answer depends on the answer ({answer!r})")
        if encode(whole) != encode(whole[: len(whole) - len(tail)]) + encode(tail):
            raise ValueError(f"a token crosses the border between the answer {answer!r} and what follows")


def _appends(template: Template, way: Rendering, closing: str, message: dict, calls: list[Call]) -> bool:
    """Return True if the template writes the whole conversation as the first prompt, the turn and the tail."""
    start = template.render([QUESTION], template.tools)
    answer = said(THOUGHT, calls, way.calls)
    try:
        whole = template.render([QUESTION, answer, *answering([message], calls)], template.tools)
    except ValueError:
        return False
    tail = template.tail(way, closing, [message], calls)
    return whole.startswith(start) and whole.endswith(tail) and "So." in whole[len(start) :]
