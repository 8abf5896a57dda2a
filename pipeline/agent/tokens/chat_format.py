"""Conversion of conversations to tokens, and of turns to messages, for one list of tools."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipeline.agent.tokens.bridge import Bridge
from pipeline.agent.tokens.calls import AnswerParser
from pipeline.config.agent import AgentConfig
from pipeline.errors import short_reason

MAX_TOOL_LISTS = 64
"""Maximum number of lists of tools for which an engine keeps the proven chat format. If programs show more, the list
that was shown the longest time ago is dropped, and is proven again when it is shown again."""
TOKEN = 128
"""Length of the longest tokens of known vocabularies, in characters; they are runs of spaces. A text with more
characters per allowed token surely does not fit."""
NO_TOOLS = "[]"


@dataclass(frozen=True)
class ChatFormat:
    """The bridge and the parser of all conversations of an engine's episodes with the same tools.

    Args:
        config: the section `agent`.
        bridge: conversion of messages to the policy's tokens.
        reader: parser of the policy's tokens.
        tools: schemas of the tools.
        max_prompt_length: maximum number of tokens of a context's prompt.
        max_response_length: maximum number of tokens after the prompt, observations included.
        prove: function that makes bridge and parser for other tools, which programs may show the policy; it raises
            ValueError if that fails.
    """

    config: AgentConfig
    bridge: Bridge
    reader: AnswerParser
    tools: list[dict[str, Any]]
    max_prompt_length: int
    max_response_length: int
    prove: Callable[[list[dict[str, Any]]], tuple[Bridge, AnswerParser]] | None = None
    _others: dict[str, "asyncio.Task[ChatFormat]"] = field(default_factory=dict, repr=False)

    @cached_property
    def key(self) -> str:
        """The tools as JSON text, to compare them. Order of tools and keys counts, since the policy reads them in this
        order."""
        return json.dumps(self.tools) if self.tools else NO_TOOLS

    async def with_tools(self, tools: list[dict[str, Any]]) -> "ChatFormat":
        """Return the chat format of conversations with these tools.

        Raises:
            ValueError: the tools are longer than a prompt, the chat template cannot write them, or no parser parses
                their calls.
        """
        key = json.dumps(tools)
        if key == self.key:
            return self
        if len(key) > self.max_prompt_length * TOKEN:
            raise ValueError(
                f"the tools of the program have {len(key):,} characters, more than a prompt of "
                f"data.max_prompt_length={self.max_prompt_length} tokens can hold"
            )
        proving = self._others.pop(key, None)
        if proving is None:
            proving = asyncio.create_task(self._with(tools))
        self._others[key] = proving
        if len(self._others) > MAX_TOOL_LISTS:
            del self._others[next(iter(self._others))]
        return await asyncio.shield(proving)

    async def _with(self, tools: list[dict[str, Any]]) -> "ChatFormat":
        assert self.prove is not None, "only programs show tools"
        try:
            bridge, reader = await asyncio.to_thread(self.prove, tools)
        # A program may show anything, and templates and parsers are foreign code.
        except Exception as error:
            raise ValueError(f"the policy cannot be shown the tools of the program: {short_reason(error)}") from error
        return ChatFormat(
            self.config, bridge, reader, tools, self.max_prompt_length, self.max_response_length, self.prove
        )
