"""Environments of OpenEnv servers: what they reply, and what their failures become."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from pipeline.agent import Message, Observation
from pipeline.agent.errors import EpisodeFailed
from pipeline.agent.inside.remote import ServerFailed
from pipeline.agent.processes import Processes
from pipeline.config.agent import AgentConfig
from tests.agent.test_processes import ROW, run


class Game:
    """A server that speaks as OpenEnv's: guess a number."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.room, self._playing, self.sessions = 100, 0, 0
        self._lock = threading.Lock()
        self._server = serve(self._play, "127.0.0.1", 0, ping_interval=None)
        self.port = self._server.socket.getsockname()[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()

    def _play(self, connection: ServerConnection) -> None:
        assert connection.request is not None and connection.request.path == "/ws"
        with self._lock:
            self._playing += 1
            self.sessions += 1
            full = self._playing > self.room
        try:
            if full:
                said = {"type": "error", "data": {"message": "1 of 1 sessions", "code": "CAPACITY_REACHED"}}
                connection.send(json.dumps(said))
                return
            for text in connection:
                message = json.loads(text)
                self.asked.append(message)
                if message["type"] == "close":
                    return
                answer = self._answer(message, connection)
                connection.send(answer if isinstance(answer, (str, bytes)) else json.dumps(answer))
        finally:
            with self._lock:
                self._playing -= 1

    def _answer(self, message: dict[str, Any], connection: ServerConnection) -> Any:
        if message["type"] == "state":
            return {"type": "state", "data": {"episode_id": None, "step_count": 0}}
        if message["type"] == "reset":
            self.number = message["data"].get("number", 5)
            return observation({"text": f"Guess from {message['data'].get('least', 1)}."})
        if list(message["data"]) != ["guess"]:
            return invalid("guess", "missing")
        guess = message["data"]["guess"]
        if guess in BAD:
            return BAD[guess](connection)
        if not guess.isdecimal():
            return invalid("guess", "int_parsing")
        if int(guess) == self.number:
            return observation({"text": "found"}, 1.0, True)
        return observation({"text": "more" if int(guess) < self.number else "less", "metadata": {"x": 1}}, -0.5)


def observation(fields: Any, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


def invalid(place: str, kind: str) -> dict[str, Any]:
    error = {"type": kind, "loc": [place], "msg": "Input should be a valid integer", "input": "x", "url": "https://x"}
    data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [error]}
    return {"type": "error", "data": data}


BAD: dict[str, Any] = {
    "fail": lambda _: {"type": "error", "data": {"message": "division by zero", "code": "EXECUTION_ERROR"}},
    "close": lambda connection: connection.close() or "",
    "cut": lambda connection: connection.socket.shutdown(socket.SHUT_RDWR) or "",
    "last": lambda connection: connection.send(json.dumps(observation({"text": "more"}))) or connection.close() or "",
    "text": lambda _: "no JSON",
    "list": lambda _: "[1]",
    "deep": lambda _: "[" * 100_000,
    "untyped": lambda _: {"data": 5},
    "other": lambda _: {"type": "state", "data": {}},
    "huge": lambda _: observation({"text": "x" * (1 << 25)}),
    "hang": lambda _: time.sleep(2) or "",
    "nan": lambda _: '{"type": "observation", "data": {"observation": {"text": "x"}, "reward": NaN}}',
    "reward": lambda _: observation({"text": "x"}, "much"),  # type: ignore[arg-type]
    "lacks": lambda _: observation({"other": "x", "another": "y"}),
    "empty": lambda _: observation({}),
}
FAILURES = {
    "fail": "failed in step with EXECUTION_ERROR: division by zero",
    "close": "gave no answer to step (ConnectionClosed",
    "cut": "gave no answer to step (ConnectionClosedError",
    "text": "answered step with no JSON",
    "list": "answered step with no JSON object",
    "deep": "answered step with no JSON",
    "untyped": "answered step with no message with `type` and `data`",
    "other": "answered step with a message of type 'state'",
    "huge": "gave no answer to step (ConnectionClosedError: sent 1009 (message too big)",
    "hang": "TimeoutError: no answer from step after 1 s",
    "nan": "answered step with no JSON (NaN is no JSON)",
    "reward": "OpenEnv.step returned a reward of 'much'",
    "lacks": "gives observations without text (agent.kwargs.observation_field); they have 'other', 'another'",
}


@pytest.fixture
def game() -> Iterator[Game]:
    game = Game()
    yield game
    game.close()


def config(game: Game, **kwargs: Any) -> AgentConfig:
    return AgentConfig(environment=f"openenv:ws://127.0.0.1:{game.port}", kwargs={"action_field": "guess", **kwargs})


def test_an_episode(game: Game) -> None:
    async def play(processes: Processes) -> None:
        loaded = await processes.start()
        assert loaded.environment and loaded.forks
        row = {**ROW, "extra_info": {"reset_kwargs": {"number": 7}}}
        session = await processes.open(row, (1 << 40) + 3, 30)
        assert session.opened == "Guess from 2."
        assert await session.step(Message("9"), 30) == Observation("less", reward=-0.5)
        mistake = "Error: guess: Input should be a valid integer"
        assert await session.step(Message("many"), 30) == Observation(mistake)
        assert await session.step(Message("7"), 30) == Observation("found", done=True, reward=1.0)
        await session.close()
        assert session.closing is not None
        await session.closing

    run(config(game, reset_kwargs={"least": 2, "number": 1}), play)
    reset = {"type": "reset", "data": {"seed": 3, "least": 2, "number": 7}}
    steps = [{"type": "step", "data": {"guess": guess}} for guess in ("9", "many", "7")]
    assert game.asked == [{"type": "state"}, {"type": "close"}, reset, *steps, {"type": "close"}]


@pytest.mark.parametrize(
    ("kwargs", "answer", "content"),
    [
        ({"action_field": None}, '{"guess": "9"}', "less"),
        ({"action_field": None}, "9", "Error: the answer must be a JSON object, but is no JSON object"),
        ({"action_field": None}, '{"number": 9}', "Error: guess: Input should be a valid integer"),
        ({"observation_field": "metadata"}, "9", '{"x": 1}'),
    ],
)
def test_how_answers_become_actions_and_observations_text(
    game: Game, kwargs: dict[str, Any], answer: str, content: str
) -> None:
    from pipeline.agent.inside.openenv import OpenEnv

    environment = OpenEnv(f"http://127.0.0.1:{game.port}/ws", 10, **{"action_field": "guess", **kwargs})
    if "observation_field" not in kwargs:
        environment.reset(ROW, 1)
    else:
        environment._connect()
        environment._ask("reset", {})
    assert environment.step(Message(answer)).content == content
    environment.close()


def test_a_failure_of_the_server_is_an_error_of_the_row(game: Game) -> None:
    async def play(processes: Processes) -> None:
        await processes.start()
        for what, words in FAILURES.items():
            session = await processes.open(ROW, 1, 30)
            with pytest.raises(EpisodeFailed) as failed:
                await session.step(Message(what), 1 if what == "hang" else 30)
            assert words in str(failed.value), what
        assert (await (await processes.open(ROW, 1, 30)).step(Message("5"), 30)).done

    run(config(game, observation_field="text"), play)


def test_an_episode_never_goes_on_in_another_session(game: Game) -> None:
    """OpenEnv's own client connects again, and the server then steps in an environment that was not reset."""
    from pipeline.agent.inside.openenv import OpenEnv

    environment = OpenEnv(f"ws://127.0.0.1:{game.port}", 10, action_field="guess")
    environment.reset(ROW, 1)
    assert environment.step(Message("9")).content == "less"
    assert environment.step(Message("last")).content == "more"
    for _ in range(2):
        with pytest.raises(ServerFailed, match="gave no answer to step \\(ConnectionClosed"):
            environment.step(Message("5"))
    environment.close()
    assert game.sessions == 1


def test_a_field_that_actions_do_not_have_is_no_mistake_of_the_model(game: Game) -> None:
    async def play(processes: Processes) -> None:
        session = await processes.open(ROW, 1, 30)
        with pytest.raises(EpisodeFailed, match="failed in step with VALIDATION_ERROR: Invalid message .*missing"):
            await session.step(Message("9"), 30)

    run(config(game, action_field="message"), play)


def test_a_server_that_is_full_is_asked_again_until_the_deadline(game: Game) -> None:
    settings = config(game)
    settings.reset_timeout_s = 2

    async def play(processes: Processes) -> None:
        await processes.start()
        game.room = 0
        began = time.monotonic()
        with pytest.raises(EpisodeFailed, match="failed in reset with CAPACITY_REACHED: 1 of 1 sessions"):
            await processes.open(ROW, 1, 2)
        assert time.monotonic() - began > 0.9
        threading.Timer(0.3, lambda: setattr(game, "room", 100)).start()
        assert (await processes.open(ROW, 1, 2)).opened == "Guess from 1."

    run(settings, play)


@pytest.mark.parametrize(
    ("environment", "kwargs", "words"),
    [
        (
            "openenv:ws://127.0.0.1:1",
            {},
            "the OpenEnv server ws://127.0.0.1:1/ws does not accept a connection (Connect",
        ),
        ("openenv:https://a:b@127.0.0.1:1/x", {}, "OpenEnv server wss://127.0.0.1:1/x/ws does not accept a connection"),
        (
            "openenv:file:///x",
            {},
            "agent.environment: 'file:///x' is no URL of an OpenEnv server, such as ws://localho",
        ),
        ("openenv:ws://[", {}, "agent.environment: the OpenEnv server ws://[/ws"),
        (
            "openenv:ws://127.0.0.1:1",
            {"field": "x"},
            "agent.kwargs do not fit openenv:ws://127.0.0.1:1: got an unexpec",
        ),
        ("openenv:ws://127.0.0.1:{silent}", {}, "/ws does not accept a connection (TimeoutError"),
    ],
)
def test_a_server_that_does_not_answer_is_refused(environment: str, kwargs: dict[str, Any], words: str) -> None:
    async def start(processes: Processes) -> None:
        with pytest.raises(ValueError) as refused:
            await processes.start()
        assert words in str(refused.value)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = environment.replace("{silent}", str(silent.getsockname()[1]))
        run(AgentConfig(environment=environment, kwargs=kwargs, reset_timeout_s=1), start)


APP = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    guess: int

class Seen(Observation):
    text: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, least=1, **kwargs):
        self.number, self.steps = least + seed % 10, 0
        return Seen(text=f"Guess from {least} to {least + 9}.")

    def step(self, action, **kwargs):
        self.steps += 1
        if action.guess == 99:
            raise RuntimeError("out of range")
        found = action.guess == self.number
        words = "found" if found else "more" if action.guess < self.number else "less"
        return Seen(text=words, reward=float(found), done=found)

    @property
    def state(self):
        return State(step_count=self.steps)

uvicorn.run(create_app(Game, Guess, Seen, max_concurrent_envs=2), port=int(sys.argv[1]))
"""


@pytest.mark.long
def test_an_episode_on_a_server_of_openenv(tmp_path: Path) -> None:
    python = os.environ.get("OPENENV_PYTHON")
    if python is None:
        pytest.skip("OPENENV_PYTHON names no interpreter that has the package openenv or openenv-core")
    (tmp_path / "app.py").write_text(APP)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    server = subprocess.Popen([python, str(tmp_path / "app.py"), str(port)], start_new_session=True)

    async def play(processes: Processes) -> None:
        await processes.start()
        row = {**ROW, "extra_info": {"reset_kwargs": {"least": 20}}}
        session = await processes.open(row, 7, 30)
        assert session.opened == "Guess from 20 to 29."
        assert await session.step(Message("21"), 30) == Observation("more", reward=0.0)
        wrong = await session.step(Message("The answer is 42."), 30)
        assert str(wrong.content).startswith("Error: guess: Input should be a valid integer")
        other = await processes.open(row, 8, 30)
        with pytest.raises(EpisodeFailed, match="failed in reset with CAPACITY_REACHED"):
            await processes.open(row, 9, 30)
        with pytest.raises(EpisodeFailed, match="failed in step with EXECUTION_ERROR: out of range"):
            await other.step(Message("99"), 30)
        assert await session.step(Message("27"), 30) == Observation("found", done=True, reward=1.0)
        await session.close()
        assert session.closing is not None
        await session.closing
        assert (await processes.open(row, 9, 30)).opened == "Guess from 20 to 29."

    environment = f"openenv:http://127.0.0.1:{port}"
    settings = AgentConfig(environment=environment, kwargs={"action_field": "guess"}, reset_timeout_s=3)
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.1)
        run(settings, play)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
