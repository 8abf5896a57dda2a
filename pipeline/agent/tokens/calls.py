"""Conversion of a turn's tokens to a `Message` with text, reasoning and tool calls, by vLLM's own parsers.

A parser is proven before the run: it must parse the calls that the model's chat template writes. vLLM's parsers report
"no call" both if a turn has none and if a call cannot be parsed, and some log a traceback. This module recognises the
second case by the marks that the template puts around calls: a turn with such a mark and without a call is malformed,
and the model reads the reason. No text that a model writes makes this module raise.
"""

import contextlib
import importlib.util
import json
import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.agent.inside.forms import call_id
from pipeline.agent.inside.frames import depth, loads
from pipeline.agent.inside.interface import Call, Message
from pipeline.agent.tokens.bridge import Bridge
from pipeline.agent.tokens.template import QUESTION
from pipeline.errors import short_reason
from pipeline.omissions import remedy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFERRED = (
    *("hermes", "qwen3_coder", "llama3_json", "mistral", "glm47", "openai", "gemma4", "deepseek_v31", "deepseek_v3"),
    *("kimi_k2", "minimax_m2", "granite4", "lfm2", "phi4_mini_json", "pythonic"),
)
"""Parsers that `agent.parser=auto` tries, in this order."""
MAX_TEXT = 1 << 16
"""Maximum length of a turn with calls, in characters; a longer one is malformed. Some parsers take quadratic time."""
MAX_CALLS = 64
"""Maximum number of calls in a turn; a turn with more is malformed."""
MAX_DEPTH = 64
"""Maximum depth of nested lists and objects in arguments."""
LOGGERS = ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning")
"""Loggers that write a traceback for a call that cannot be parsed."""
TAG = re.compile(r"<[^<>\s=]{1,40}(?:>|=)|\[[A-Z_]{3,40}\]")
"""Pattern of the marks that templates put around calls: `<tool_call>`, `<function=`, `[TOOL_CALLS]`."""


Probe = tuple[list[int], list[Call]]


class Malformed(Exception):
    """A call cannot be parsed; the model reads the message, which is the reason."""


class AnswerParser:
    """Parses the tokens of a turn into text, reasoning and tool calls. Safe to use from several threads."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tools: list[dict], bridge: Bridge) -> None:
        """Make a parser that leaves calls and reasoning in the text. Use `prove` for one that takes them out."""
        self.tokenizer = tokenizer
        self.tools = tools
        self.bridge = bridge
        self.parser = "none"
        self.reasoning_parser = "none"
        self.marks: list[str] = []
        """Texts that show that a turn is meant to call a tool; each of them is enough."""
        self._mark_per_call = False
        """True if the template writes the first of `marks` once for each call."""
        self._class: Any = None
        self._request: Any = None
        self._prompt: list[int] = []

    @classmethod
    def prove(
        cls, tokenizer: "PreTrainedTokenizerBase", tools: list[dict], parser: str, reasoning_parser: str, bridge: Bridge
    ) -> "AnswerParser":
        """Make a parser of turns, and prove that it parses the calls that the model's chat template writes.

        Args:
            tokenizer: tokenizer of the model.
            tools: schemas of the tools; without tools, calls are not looked for.
            parser: name of one of vLLM's tool parsers; `auto` takes the first of `PREFERRED` that fits; `none`.
            reasoning_parser: name of one of vLLM's reasoning parsers, or `none`.
            bridge: bridge of the model, which writes the calls.

        Raises:
            ValueError: a parser of the name does not exist, or it does not parse the template's calls.
        """
        reader = cls(tokenizer, tools, bridge)
        parser = parser if tools else "none"
        if parser == "none" and reasoning_parser == "none":
            return reader
        if importlib.util.find_spec("vllm") is None:
            what = f"agent.parser={parser}" if parser != "none" else f"agent.reasoning_parser={reasoning_parser}"
            raise ValueError(
                f"{what}: the turns are read by vLLM's parsers, whatever the engine, and vLLM is not installed here; "
                "install it, or set agent.parser and agent.reasoning_parser to none"
            )
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if reasoning_parser != "none":
            reader._prove_reasoning(reasoning_parser)
        if parser == "none":
            return reader
        probes = reader._probes()
        reader._find_marks(probes)
        reasons = {}
        for name in PREFERRED if parser == "auto" else (parser,):
            reason = reader._misread(name, reasoning_parser, probes)
            if reason is None:
                return reader
            reasons[name] = reason
        known = registered()
        fitting = [name for name in known if reader._misread(name, reasoning_parser, probes) is None]
        which = f"These do: {', '.join(fitting)}" if fitting else f"None of vLLM's parsers does ({', '.join(known)})"
        what = f"{parser} does not: {reasons[parser]}" if parser != "auto" else f"none of {', '.join(PREFERRED)} does"
        written = reader._decode(probes[0][0], skip=False).strip()
        raise ValueError(
            f"agent.parser={parser}: the parser must read {written!r:.200}, a call as the model's chat template writes "
            f"it, and {what}. {which}. Set agent.parser to one that does, or {remedy('writes calls otherwise')}"
        )

    def read(self, ids: Sequence[int], truncated: bool) -> tuple[Message, str | None]:
        """Parse the tokens of a turn.

        Args:
            ids: sampled token ids, with or without the closing marker.
            truncated: true if the turn was cut at its length limit.

        Returns:
            The message, and the reason if a call in it could not be parsed, else None. A message with a reason has no
            calls.
        """
        plain = self._decode(ids, skip=True)
        if self._class is None:
            return Message(plain, truncated=truncated), None
        raw = self._decode(ids, skip=False)
        reasoning, text, calls = "", plain, []
        try:
            if len(raw) > MAX_TEXT and not any(mark in raw for mark in self.marks):
                return Message(plain, truncated=truncated), None
            self._check_size(raw)
            reasoning, text, made = self._parse(raw, ids)
            calls = [self._call(number, name, arguments) for number, (name, arguments) in enumerate(made)]
            self._check_count(raw, reasoning, calls, truncated)
        except Malformed as error:
            return Message(text or plain, reasoning, [], truncated), str(error)
        return Message(text, reasoning, calls, truncated), None

    def summary(self) -> str:
        """Name the parsers that parse the turns, in one line."""
        if self.parser == "none":
            return f"tool calls are not read; reasoning parser {self.reasoning_parser}"
        return f"tool parser {self.parser}, proven on {len(self.tools)} tools; reasoning parser {self.reasoning_parser}"

    def _use(self, parser: str, reasoning_parser: str) -> None:
        """Parse with these of vLLM's parsers from now on.

        Raises:
            ValueError: vLLM has no such parser, or the parser refuses the tokenizer.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser.parser_manager import ParserManager

        manager: Any = ParserManager
        request: Any = ChatCompletionRequest
        try:
            self._class = manager.get_parser(
                tool_parser_name=None if parser == "none" else parser,
                reasoning_parser_name=None if reasoning_parser == "none" else reasoning_parser,
                enable_auto_tools=parser != "none",
                tokenizer=self.tokenizer,
            )
            self._request = request(messages=[], tools=self.tools or None, model="policy")
        # A parser may raise anything on a tokenizer that lacks its tokens.
        except Exception as error:
            raise ValueError(short_reason(error)) from error
        self._prompt = self.bridge.prompt([QUESTION])
        self.parser, self.reasoning_parser = parser, reasoning_parser

    def _prove_reasoning(self, name: str) -> None:
        """Raise ValueError if the reasoning parser does not find the reasoning between its own marks."""
        from vllm.reasoning import ReasoningParserManager

        known = sorted(ReasoningParserManager.list_registered())
        if name not in known:
            raise ValueError(f"agent.reasoning_parser={name} is none of vLLM's reasoning parsers: {', '.join(known)}")
        try:
            self._use("none", name)
        except ValueError as error:
            raise ValueError(f"agent.reasoning_parser={name} cannot be used with this model: {error}") from error
        parser = self._parser().reasoning_parser
        start = getattr(parser, "start_token", None) or parser.reasoning_start_str
        end = getattr(parser, "end_token", None) or parser.reasoning_end_str
        if not start or not end:
            return
        answers = [f"{start}\nSo.\n{end}\n\nYes.", f"\nSo.\n{end}\n\nYes."]
        for answer in answers:
            message, _ = self.read(self.bridge.tokens.as_template(answer), truncated=False)
            if (message.reasoning.strip(), message.text.strip()) == ("So.", "Yes."):
                return
        raise ValueError(
            f"agent.reasoning_parser={name} does not read the reasoning of {answers[0]!r}, but gives the reasoning "
            f"{message.reasoning!r} and the text {message.text!r}; choose the one of the model's family: "
            f"{', '.join(known)}"
        )

    def _misread(self, name: str, reasoning_parser: str, probes: list[Probe]) -> str | None:
        """Test a parser on the probes. Returns its error or wrong result on the first one that fails; None if all
        succeed."""
        try:
            self._use(name, reasoning_parser)
        except ValueError as error:
            return str(error)
        for ids, calls in probes:
            message, problem = self.read(ids, truncated=False)
            got = [(call.name, call.arguments) for call in message.calls]
            if got != [(call.name, call.arguments) for call in calls]:
                return f"it reads {problem or got!r:.200}"
        return None

    def _probes(self) -> list[Probe]:
        """Make test turns with calls as the template writes them: one for each tool, and one with two calls if
        possible.

        Raises:
            ValueError: the template cannot write a call.
        """
        calls = [Call(call_id(0), tool["function"]["name"], example(tool)) for tool in self.tools]
        probes = [(self.bridge.answer("", [call]), [call]) for call in calls]
        two = [calls[0], Call(call_id(1), calls[-1].name, calls[-1].arguments)]
        # Some templates write one call at a time.
        with contextlib.suppress(ValueError):
            probes.append((self.bridge.answer("", two), two))
        return probes

    def _find_marks(self, probes: list[Probe]) -> None:
        """Set `marks`: tags that the template writes in front of a call, or else the beginning of a call."""
        ids, (call,) = probes[0]
        text = self._decode(ids, skip=False)
        before = text[: text.index(call.name)]
        plain = self._decode(self.bridge.answer("x", []), skip=False)
        self.marks = [tag for tag in dict.fromkeys(TAG.findall(before)) if tag not in plain]
        if not self.marks and len(before.strip()) > 1:
            self.marks = [before.strip()]
        last, calls = probes[-1]
        if self.marks and len(calls) == 2:
            self._mark_per_call = self._decode(last, skip=False).count(self.marks[0]) == 2

    def _parser(self) -> Any:
        """Make a parser for one turn; parsers keep state, so each turn needs its own."""
        parser = self._class(
            self.tokenizer, self._request.tools, chat_template_kwargs=dict(self.bridge.template_kwargs)
        )
        parser.set_prompt_token_ids(self._prompt)
        return parser

    def _parse(self, raw: str, ids: Sequence[int]) -> tuple[str, str, list[tuple[str, str]]]:
        """Parse a turn. Returns (reasoning, text, [(name, arguments as JSON) of each call]). Raises Malformed."""
        try:
            reasoning, text, calls = self._parser().parse(
                raw, self._request, enable_auto_tools=self.parser != "none", model_output_token_ids=list(ids)
            )
        # Parsers are foreign code on hostile input.
        except Exception as error:
            raise Malformed(f"the tool call cannot be read: {short_reason(error)}") from error
        without = self.bridge.tokens.special
        named = [(call.name, call.arguments) for call in calls or []]
        return without.sub("", reasoning or ""), without.sub("", text or ""), named

    def _call(self, number: int, name: Any, text: Any) -> Call:
        """Make a `Call` from what a parser found. Raises Malformed if the name or the arguments cannot be used."""
        if not isinstance(name, str) or not name:
            raise Malformed(f"call {number + 1} has no name")
        try:
            # Some parsers give an object in place of its JSON.
            arguments = loads((text or "{}") if isinstance(text, str) else json.dumps(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise Malformed(f"the arguments of {name:.80} are not valid JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise Malformed(f"the arguments of {name:.80} are of type {type(arguments).__name__}, not an object")
        if depth(arguments) > MAX_DEPTH:
            raise Malformed(f"the arguments of {name:.80} are nested more than {MAX_DEPTH} levels deep")
        try:
            json.dumps([name, arguments], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Malformed(f"the arguments of {name:.80} hold half a character (a lone surrogate)") from error
        return Call(call_id(number), name, arguments)

    def _check_size(self, raw: str) -> None:
        """Raise Malformed if a turn is too long or has too many calls for parsers. Some parsers take quadratic time."""
        if len(raw) > MAX_TEXT:
            raise Malformed(f"the answer has {len(raw)} characters; calls are read in answers of up to {MAX_TEXT}")
        for mark in self.marks:
            if raw.count(mark) > MAX_CALLS:
                raise Malformed(f"the answer holds {mark} {raw.count(mark)} times, more than {MAX_CALLS}")

    def _check_count(self, raw: str, reasoning: str, calls: list[Call], truncated: bool) -> None:
        """Raise Malformed if a turn has more marks of calls than calls that could be parsed."""
        if not self.marks or self.parser == "none":
            return
        mark = self.marks[0]
        marked = raw.count(mark) - reasoning.count(mark)
        marked -= sum(json.dumps(call.arguments, ensure_ascii=False).count(mark) for call in calls)
        if marked <= 0 or (calls and (not self._mark_per_call or marked <= len(calls))):
            return
        if truncated:
            raise Malformed("the answer was cut at its length limit within a tool call")
        if calls:
            raise Malformed(f"the answer holds {mark} {marked} times, but {len(calls)} calls can be read")
        raise Malformed(f"no tool call can be read behind {mark}{why(raw.partition(mark)[2])}")

    def _decode(self, ids: Sequence[int], skip: bool) -> str:
        """Decode token ids without the closing marker.

        Args:
            ids: the token ids.
            skip: true to leave out special tokens.
        """
        ids = list(ids)
        while ids and ids[-1] in self.bridge.closings:
            ids.pop()
        text: Any = self.tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return text


def registered() -> list[str]:
    """List the names of vLLM's tool parsers."""
    from vllm.tool_parsers import ToolParserManager

    return sorted(ToolParserManager.list_registered())


def why(text: str) -> str:
    """Describe the error in the JSON at the beginning of `text`; "" if `text` does not begin with JSON or has no
    error."""
    if not text.lstrip().startswith(("{", "[")):
        return ""
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
    except RecursionError:
        return ": its JSON is nested too deep"
    except ValueError as error:
        return f": its JSON is not valid: {error}"
    return ""


def example(tool: dict) -> dict[str, Any]:
    """Make example arguments of a tool that fit its schema."""
    properties = tool["function"].get("parameters", {}).get("properties", {})
    return {name: _value(schema) for name, schema in properties.items()}


def _value(schema: Any) -> Any:
    """Make an example value that fits a JSON schema."""
    schema = schema if isinstance(schema, dict) else {}
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        return {name: _value(entry) for name, entry in schema.get("properties", {}).items()} or {"a": 1}
    if kind == "array":
        return [_value(schema.get("items", {"type": "string"}))]
    return {"integer": 12, "number": 2.5, "boolean": True, "null": None}.get(str(kind), 'a "b" é 中')
