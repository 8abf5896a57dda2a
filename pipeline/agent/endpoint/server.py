"""OpenAI's chat completions and Anthropic's messages on 127.0.0.1, for programs that know nothing of this project
(`agent.command`, and `agent.program` with a client of its own).

Each episode has a path of its own that cannot be guessed; it answers 410 when the episode has ended. The answers come
from `Conversation.chat`, so that tokens are recorded as they were sampled. The endpoint refuses a setting that it
cannot honour, such as another temperature than the run's, by name. A stream is the whole answer as one chunk.

`GET /v1/models` lists one model, which can be requested under any name.

A client that repeats a request because it waited too long gets the answer to the first request. The request is a
repetition if its header `x-stainless-retry-count` is not 0, or if the first client hung up before it had the answer.
While one client waits for an answer, the same request of another client is refused, because it may be either a
repetition or a wish for a second answer.
"""

import asyncio
import hashlib
import importlib
import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import http_exceptions, web

from pipeline.agent.endpoint.bodies import as_json, read
from pipeline.agent.endpoint.chat_server import ChatFailed, ChatHandler
from pipeline.agent.endpoint.messages import checked_messages, checked_tools
from pipeline.agent.endpoint.refused import RequestRefused
from pipeline.agent.inside.chat_client import MAX_CHATS
from pipeline.agent.inside.forms import tool_call
from pipeline.agent.inside.frames import MAX_HEARD
from pipeline.agent.inside.interface import EpisodeOver

IGNORED = (
    *("model", "user", "seed", "store", "metadata", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
"""Keys of a request that have no effect; the run has seeds of its own."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False, True),
    "stop": ([],),
    "logprobs": (False,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
}
"""Values that change nothing; other values are refused."""
SAMPLED = ("temperature", "top_p", "top_k")
LENGTHS = ("max_tokens", "max_completion_tokens")
MODEL = "policy"
"""Name of the model in answers to requests without a name."""
SHUTDOWN_S = 1.0
log = logging.getLogger(__name__)
log.addFilter(
    lambda record: (
        not (record.exc_info and isinstance(record.exc_info[1], (http_exceptions.HttpProcessingError, ConnectionError)))
    )
)
"""The filter drops aiohttp's tracebacks for clients that do not send HTTP, or leave before their request is whole."""


@dataclass
class PendingRequest:
    """A request to the policy."""

    completion: asyncio.Task[dict[str, Any]]
    left: list[Callable[[], bool]] = field(default_factory=list)
    """For each client that waits for the answer, a function that returns true if the client has hung up."""
    heard: bool = False
    """True if a client was connected when the answer was ready."""

    @property
    def lost(self) -> bool:
        """True if no client has, or will have, the answer."""
        return not self.heard and all(left() for left in self.left)


class Route:
    """The path of one episode.

    Args:
        chat: `chat` of the episode's conversation.
        sampling: `temperature`, `top_p` and `top_k` of the answers.
        longest: most tokens of an answer.
    """

    def __init__(self, chat: ChatHandler, sampling: dict[str, float], longest: int) -> None:
        self._chat, self._sampling, self.longest = chat, sampling, longest
        self.failed: asyncio.Future[ChatFailed] = asyncio.get_running_loop().create_future()
        """The error of a chat that ended the episode; the client can do nothing for it."""
        self._answers: dict[bytes, PendingRequest] = {}
        """Requests by their key."""
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()
        self.room = asyncio.Semaphore(MAX_CHATS)
        """Places for requests; further requests wait."""

    async def close(self) -> None:
        """Cancel all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def answer(
        self, request: dict[str, Any], key: bytes, repeated: bool, left: Callable[[], bool]
    ) -> dict[str, Any]:
        """Return the completion for a request.

        Args:
            request: request for a chat completion.
            key: key of the request; equal requests have equal keys, and other requests have others.
            repeated: true if the client marked the request as a repetition.
            left: function that returns true if the client has hung up.

        Raises:
            RequestRefused: the request has no answer.
        """
        messages, tools, most = self._checked(request)
        asked = self._answers.get(key)
        if asked is not None and not repeated and not asked.lost:
            if not asked.heard:
                raise RequestRefused(
                    "the same request is being answered; wait for its answer, or let a key such as `seed` or `user` "
                    "tell the two apart to get another one",
                    "already_asked",
                    409,
                )
            asked = None
        if asked is None:
            task = asyncio.create_task(self._complete(request, messages, tools, most))
            asked = self._answers[key] = PendingRequest(task)
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._forget(key, done))
        asked.left.append(left)
        task = asked.completion
        try:
            completion = await asyncio.shield(task)
            asked.heard = asked.heard or not left()
            return completion
        except EpisodeOver as over:
            length = "max_response_length" in str(over)
            code = "context_length_exceeded" if length else "max_turns_reached"
            raise RequestRefused(str(over), code, param="messages") from None
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise gone() from None
        # The run raises the error, and the client need not wait until it is killed.
        except Exception as error:  # noqa: BLE001
            if not self.failed.done():
                self.failed.set_result(ChatFailed(error))
            raise RequestRefused(f"the episode has failed: {error}", "episode_failed") from None
        finally:
            asked.left.remove(left)

    def _forget(self, key: bytes, task: asyncio.Task[dict[str, Any]]) -> None:
        self._tasks.discard(task)
        failed = task.cancelled() or task.exception() is not None
        if failed and key in self._answers and self._answers[key].completion is task:
            del self._answers[key]

    def _checked(self, request: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int | None]:
        """Check a request; returns its messages, its tools and the most tokens of the answer. Raises RequestRefused."""
        most = None
        for name, value in request.items():
            if value is None or name in ("messages", "tools", "stream_options", *IGNORED):
                continue
            if name in LENGTHS:
                if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= self.longest:
                    raise RequestRefused(
                        f"{name}={value!r:.40}: an answer of this run has 1 to {self.longest} tokens "
                        "(agent.max_turn_tokens, data.max_response_length); lower it or leave it out",
                        "unsupported_value",
                        param=name,
                    )
                most = min(value, most or value)
            elif name in SAMPLED:
                if value != self._sampling[name]:
                    raise RequestRefused(
                        f"{name}={value!r:.40}: the run samples this answer with {self._sampling[name]:g}, and the "
                        "importance ratios would be wrong with another one; leave it out",
                        "unsupported_value",
                        param=name,
                    )
            elif value not in NEUTRAL.get(name, ()):
                raise RequestRefused(
                    f"{name!r:.40}={value!r:.40} is not supported; leave it out", "unsupported", param=name
                )
        try:
            return checked_messages(request.get("messages")), checked_tools(request.get("tools")), most
        except ValueError as error:
            raise RequestRefused(str(error), "invalid_value", param="messages") from None

    async def _complete(
        self, request: dict[str, Any], messages: list[dict[str, Any]], tools: list[dict[str, Any]], most: int | None
    ) -> dict[str, Any]:
        answer = await self._chat(messages, tools, most)
        said = answer.message
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["content"] = said.text or None
            message["tool_calls"] = [
                tool_call(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in said.calls
            ]
        reason = "length" if said.truncated else "tool_calls" if said.calls else "stop"
        total = answer.prompt_tokens + answer.tokens
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model_of(request.get("model")),
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
            "usage": {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens, "total_tokens": total},
        }


def model_of(name: Any) -> str:
    """Return the name of the model in an answer: the name in the request, else `MODEL`."""
    return f"{name:.200}" if name and isinstance(name, str) else MODEL


def described(name: str) -> dict[str, Any]:
    """Describe a model as OpenAI's and Anthropic's clients read it."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "slipstream"}
    return openai | {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def gone() -> RequestRefused:
    """Return the refusal of a request to an episode that has ended."""
    return RequestRefused("the episode of this path has ended", "episode_ended", 410)


class Endpoint:
    """The server of one engine's episodes, on the event loop that starts it."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Start listening, unless the server listens already."""
        if self._runner is not None:
            return
        app = web.Application(client_max_size=MAX_HEARD)
        app.router.add_post("/{path}/v1/chat/completions", self._completions)
        app.router.add_post("/{path}/v1/messages", self._messages)
        app.router.add_get("/{path}/v1/models", self._models)
        app.router.add_get("/{path}/v1/models/{name:.+}", self._model)
        app.router.add_route("*", "/{rest:.*}", self._unknown)
        # aiohttp would unpack a body on the event loop, and without a bound.
        self._runner = web.AppRunner(
            app, access_log=None, logger=log, shutdown_timeout=SHUTDOWN_S, auto_decompress=False
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, route: Route) -> dict[str, str]:
        """Give a route a path; returns the environment variables that lead a client there."""
        path = secrets.token_urlsafe(24)
        self._routes[path] = route
        url = f"http://127.0.0.1:{self._port}/{path}"
        openai = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": path}
        return openai | {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": path}

    async def end(self, variables: dict[str, str]) -> None:
        """Remove the path of these variables, and close its route."""
        await self._routes.pop(variables["OPENAI_API_KEY"]).close()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        try:
            completion, asked = await self._answer(request, lambda asked, longest: asked)
        except RequestRefused as refused:
            return refused.response()
        if not asked.get("stream"):
            return web.json_response(completion)
        options = asked.get("stream_options")
        usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return web.Response(body=streamed(completion, usage), content_type="text/event-stream")

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        # The import takes half a second, so it runs only if a client uses this protocol.
        anthropic = await asyncio.to_thread(importlib.import_module, "pipeline.agent.endpoint.anthropic")
        try:
            completion, asked = await self._answer(request, anthropic.as_completion)
        except RequestRefused as refused:
            return anthropic.error(refused)
        message = anthropic.message(completion)
        if not asked.get("stream"):
            return web.json_response(message)
        return web.Response(body=anthropic.streamed(message), content_type="text/event-stream")

    async def _answer(
        self, request: web.Request, as_completion: Callable[[dict[str, Any], int], dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the completion, and the request in OpenAI's form.

        `as_completion` makes it from the client's request and the most tokens of an answer.
        """
        async with self._route(request).room:
            body = await read(request)
            given = as_json(body)
            repeated = request.headers.get("x-stainless-retry-count", "0") != "0"
            # The episode may have ended while the body came.
            route = self._route(request)
            asked, key = as_completion(given, route.longest), hashlib.sha256(body).digest()
            return await route.answer(asked, key, repeated, lambda: hung_up(request)), asked

    async def _models(self, request: web.Request) -> web.Response:
        if request.match_info["path"] not in self._routes:
            return gone().response()
        ends = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        return web.json_response({"object": "list", "data": [described(MODEL)], **ends})

    async def _model(self, request: web.Request) -> web.Response:
        if request.match_info["path"] not in self._routes:
            return gone().response()
        return web.json_response(described(model_of(request.match_info["name"])))

    def _route(self, request: web.Request) -> Route:
        route = self._routes.get(request.match_info["path"])
        if route is None:
            raise gone()
        return route

    async def _unknown(self, request: web.Request) -> web.Response:
        known = "POST /chat/completions, POST /messages and GET /models"
        text = f"{request.method:.20} {request.path[-40:]}: there is nothing but {known}"
        return RequestRefused(text, "unknown_url", 404).response()


def hung_up(request: web.Request) -> bool:
    """Return whether the client of a request has closed its connection."""
    return request.transport is None or request.transport.is_closing()


def streamed(completion: dict[str, Any], usage: bool) -> bytes:
    """Write a completion as a stream of events; the answer is one chunk."""
    [choice] = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    common = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if usage:
        chunks.append({"choices": [], "usage": completion["usage"]})
    events = [json.dumps(common | chunk) for chunk in chunks]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
