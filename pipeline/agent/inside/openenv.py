"""Environments that run on an OpenEnv server: `agent.environment=openenv:ws://HOST:PORT`.

This module needs the package `websockets` in the interpreter of the episodes; `load.py` imports it if the settings name
a server. Each episode has its own connection, on which each message gets one answer:

    {"type": "reset", "data": {"seed": 7}}          {"type": "observation", "data": {"observation": {...},
    {"type": "step", "data": {"message": "31"}}         "reward": 0.5, "done": false}}
    {"type": "state"}                               {"type": "state", "data": {...}}
    {"type": "close"}

and {"type": "error", "data": {"message": "...", "code": "..."}} if something failed.

The client in the package `openenv` is not used. After a broken connection, version 0.10 connects again and steps in a
new session without a reset, so rewards are wrong. It drops the `errors` of an answer, which the model should read. The
package needs `mcp` below 2.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, suppress
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect

from pipeline.agent.inside.frames import MAX_FRAME, cut, decode
from pipeline.agent.inside.interface import Environment, Message, Observation
from pipeline.agent.inside.remote import ServerFailed, cause, without_login

CLOSE_S = 2.0  # seconds in which the server must take leave
ROOM_S = 0.5  # seconds until a server that has no room for another episode is asked again
_FULL, _INVALID = "CAPACITY_REACHED", "VALIDATION_ERROR"


class OpenEnv(Environment):
    """The environment of one episode, on a server.

    Args:
        url: ws, wss, http or https URL, with or without the server's path `/ws`.
        within_s: seconds in which the server must accept a connection and have capacity for the episode.
        observation_field: field of observations that the model reads. None takes all fields other than `metadata`: a
            single one as text, several as JSON.
        action_field: field of actions that gets the text of a turn; None takes the turn as the JSON of the action.
        reset_kwargs: further arguments of `reset`; those in `extra_info.reset_kwargs` of a row take precedence.

    Raises:
        ValueError: the URL is malformed.
    """

    def __init__(
        self,
        url: str,
        within_s: float,
        *,
        observation_field: str | None = None,
        action_field: str | None = "message",
        reset_kwargs: dict[str, Any] | None = None,
    ) -> None:
        scheme, _, rest = url.rstrip("/").partition("://")
        if scheme not in ("ws", "wss", "http", "https") or not rest:
            raise ValueError(f"{url!r} is no URL of an OpenEnv server, such as ws://localhost:8000")
        self._url = f"{scheme.replace('http', 'ws')}://{rest}" + ("" if rest.endswith("/ws") else "/ws")
        self.name = f"the OpenEnv server {without_login(self._url)}"
        self._within_s = within_s
        self._observation_field, self._action_field = observation_field, action_field
        self._reset_kwargs = reset_kwargs or {}
        self._connection: ClientConnection | None = None
        self._stack = ExitStack()

    def check(self) -> None:
        """Raise ServerFailed if the server does not answer."""
        self._connect()
        try:
            # A server without room for another episode, or without a state before the first, has answered.
            self._ask("state", within_s=self._within_s)
        finally:
            self.close()

    def reset(self, row: dict[str, Any], seed: int) -> str | None:
        """Begin the episode. If the server is full, the request is repeated until shortly before `within_s` has
        passed."""
        given = (row["extra_info"] or {}).get("reset_kwargs") or {}
        arguments = {"seed": seed % (1 << 32), **self._reset_kwargs, **given}
        deadline = time.monotonic() + self._within_s - 2 * ROOM_S
        while True:
            self._connect()
            kind, data = self._ask("reset", arguments)
            if kind != "error" or data.get("code") != _FULL or time.monotonic() > deadline:
                break
            self.close()
            time.sleep(ROOM_S)
        observation = self._observation(kind, data, "reset")
        if observation.done:
            raise ServerFailed(f"{self.name} ended the episode as it began")
        return str(observation.content) or None

    def step(self, message: Message) -> Observation:
        field, action = self._action_field, message.text
        try:
            fields = {field: action} if field is not None else decode(action.encode())
        except ValueError as error:
            return Observation(f"Error: the answer must be a JSON object, but is {error}")
        kind, data = self._ask("step", fields)
        if kind == "error" and data.get("code") == _INVALID:
            problems = _problems(data.get("errors"), field)
            if problems:
                return Observation(f"Error: {problems}")
        return self._observation(kind, data, "step")

    def close(self) -> None:
        """End the episode on the server."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError, WebSocketException), self._stack:
                connection.send('{"type": "close"}')

    def _connect(self) -> None:
        try:
            connecting = connect(
                self._url,
                open_timeout=self._within_s,
                close_timeout=CLOSE_S,
                max_size=MAX_FRAME,
                compression=None,
                # A server that computes a step may not answer pings; the run has deadlines.
                ping_interval=None,
            )
            self._connection = self._stack.enter_context(connecting)
        except InvalidURI as error:
            raise ServerFailed(f"{self.name} cannot be named so: {error}") from None
        except (OSError, WebSocketException, ValueError) as error:
            raise ServerFailed(f"{self.name} does not accept a connection ({cause(error)})") from None

    def _ask(
        self, kind: str, data: dict[str, Any] | None = None, within_s: float | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Send a message to the server. Returns (type, data) of the answer.

        Args:
            kind: type of the message.
            data: data of the message.
            within_s: seconds until the answer must arrive; None leaves the limit to the run.

        Raises:
            ServerFailed: the server did not answer, or not with a message.
        """
        assert self._connection is not None
        # An answer that came before the connection was closed is still there.
        with suppress(ConnectionClosed):
            self._connection.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
        try:
            frame = self._connection.recv(within_s)
        except (OSError, WebSocketException) as error:
            raise ServerFailed(f"{self.name} gave no answer to {kind} ({cause(error)})") from None
        try:
            answer = decode(frame.encode() if isinstance(frame, str) else frame)
            found, inner = answer.get("type"), answer.get("data", {})
            if not isinstance(found, str) or not isinstance(inner, dict):
                raise ValueError("no message with `type` and `data`")
        except ValueError as error:
            raise ServerFailed(f"{self.name} answered {kind} with {error}") from None
        return found, inner

    def _observation(self, kind: str, data: dict[str, Any], asked: str) -> Observation:
        if kind == "error":
            words = f"{data.get('code')}: {data.get('message')}"
            details = f" {json.dumps(data['errors'])}" if "errors" in data else ""
            raise ServerFailed(cut(f"{self.name} failed in {asked} with {words}{details}", 1000))
        if kind != "observation":
            raise ServerFailed(f"{self.name} answered {asked} with a message of type {kind!r:.100}")
        return Observation(self._text(data.get("observation")), data.get("done", False), data.get("reward"))

    def _text(self, observation: Any) -> str:
        """Return the part of an observation that the model reads."""
        fields = observation
        if isinstance(fields, dict):
            chosen = self._observation_field
            if chosen is not None and chosen not in fields:
                raise ServerFailed(
                    f"{self.name} gives observations without {chosen} (agent.kwargs.observation_field); they have "
                    f"{', '.join(map(repr, fields)):.300}"
                )
            fields = {name: value for name, value in fields.items() if name == (chosen or name)}
            if chosen is None:
                fields.pop("metadata", None)
            if len(fields) == 1:
                (fields,) = fields.values()
        if fields is None or fields == {}:
            return ""
        return fields if isinstance(fields, str) else json.dumps(fields, ensure_ascii=False)


def _problems(errors: Any, field: str | None) -> str:
    """Describe the errors in an action for the model.

    Returns "" if the settings are wrong, since the model cannot correct them.
    """
    found = []
    for error in errors if isinstance(errors, list) else []:
        place, words = (error.get("loc"), error.get("msg")) if isinstance(error, dict) else (None, None)
        if not isinstance(place, list) or not isinstance(words, str):
            return ""
        if field is not None and (place[:1] != [field] or error.get("type") == "extra_forbidden"):
            # The settings name a field that actions do not have.
            return ""
        found.append(f"{'.'.join(map(str, place))}: {words}")
    return "; ".join(found)
