"""The tool calls of a served model: the choice of vLLM's parser for them, or a refusal of requests with tools.

The parser is proven as before a run (`agent/tokens/calls.py`): it must parse a call that the model's own chat template
writes.
"""

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from pipeline.export.served_model import ServedModel

NONE = "none"
REFUSAL = (
    "this model is served without tools, because its run showed it none. Leave out `tools`, or start the server with "
    "--tool-parser auto, if the model's chat template writes calls (python -m jobs.serve --help)"
)
_PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
_WEATHER = {"name": "weather", "description": "The weather of a place.", "parameters": _PLACE}
EXAMPLES = [{"type": "function", "function": _WEATHER}]
"""Tools with which a parser is proven, since the tools of requests are not known before."""


def with_parser(model: "ServedModel", chosen: str | None) -> "ServedModel":
    """Return the model with the arguments that make vLLM parse its tool calls, and with a note on the parser.

    Args:
        model: the model.
        chosen: `--tool-parser`; None takes the run's parser.

    Raises:
        ValueError: the chosen parser does not parse the calls of the model's chat template, or the template writes
            none.
    """
    settings = model.settings
    parser, reasoning = (NONE, NONE) if settings is None else (settings.tool_parser, settings.reasoning_parser)
    parser = chosen or parser
    if parser == NONE:
        return model
    # These imports take seconds.
    from pipeline.agent.tokens.bridge import Bridge
    from pipeline.agent.tokens.calls import AnswerParser
    from pipeline.config.model import ModelConfig
    from pipeline.models.tokenizer import load_tokenizer

    trusted = model.config is not None and model.config.model.trust_remote_code
    tokenizer = load_tokenizer(ModelConfig(path=model.path, trust_remote_code=trusted), key="RUN_OR_MODEL")
    kwargs = {} if settings is None else settings.chat_template_kwargs
    try:
        bridge = Bridge.prove(tokenizer, kwargs, {"user"}, EXAMPLES)
        reader = AnswerParser.prove(tokenizer, EXAMPLES, parser, reasoning, bridge)
    except ValueError as error:
        if chosen is not None:
            raise ValueError(f"--tool-parser {chosen}: {str(error).replace('agent.parser', '--tool-parser')}") from None
        note = f"requests with tools are refused, because no parser reads the model's calls: {error}"
        return replace(model, notes=[*model.notes, note])
    arguments = {"enable_auto_tool_choice": True, "tool_call_parser": reader.parser}
    if reasoning != NONE:
        arguments["reasoning_parser"] = reasoning
    return replace(model, notes=[*model.notes, f"calls of tools: {reader.summary()}"], calls=arguments)


class RefuseTools:
    """ASGI middleware for vLLM's app that refuses requests with tools, for a model without a parser for tool calls."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or respond with status 400."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        parts: list[Message] = []
        while not parts or parts[-1].get("more_body"):
            parts.append(await receive())
        if _has_tools(b"".join(part.get("body", b"") for part in parts)):
            error = {"message": REFUSAL, "type": "BadRequestError", "param": "tools", "code": 400}
            return await JSONResponse({"type": "error", "error": error}, status_code=400)(scope, receive, send)

        async def again() -> Message:
            return parts.pop(0) if parts else await receive()

        await self.app(scope, again, send)


def _has_tools(body: bytes) -> bool:
    if b"tools" not in body:
        return False
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        # The server reports the error.
        return False
    return isinstance(request, dict) and bool(request.get("tools")) and request.get("tool_choice") != NONE
