"""Programs on a SandboxFusion server: a small one of the tests' own, with the fields of the real one."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import remote
from pipeline.reward.sandbox.isolation import SandboxError
from pipeline.reward.sandbox.runner import run
from tests.reward.conftest import Reply
from tests.reward.sandbox.programs import score

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Server:
    """Answers each request by the next of `answers`, the last one for all that follow; keeps the requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[dict[str, Any]] = []
        self.answers: list[Answer] = [self.execute]

    def execute(self, request: dict[str, Any]) -> tuple[int, Any]:
        """Runs the program as it comes, as a file."""
        path = self.folder / f"program{len(self.requests)}.py"
        path.write_text(request["code"])
        try:
            done = subprocess.run(
                [sys.executable, str(path)],
                input=request["stdin"],
                capture_output=True,
                text=True,
                timeout=10 * request["run_timeout"],
            )
        except subprocess.TimeoutExpired:
            return 200, {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "", "stderr": ""}}
        result = {"status": "Finished", "execution_time": 0.1, "return_code": done.returncode}
        result |= {"stdout": done.stdout, "stderr": done.stderr}
        status = "Failed" if done.returncode else "Success"
        return 200, {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}

    def answer(self, request: dict[str, Any]) -> tuple[int, Any]:
        self.requests.append(request)
        return (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])(request)


@pytest.fixture
def server(tmp_path: Path, serve: Callable[[Reply], str]) -> tuple[Server, SandboxConfig]:
    state = Server(tmp_path)
    url = serve(lambda request, _: state.answer(request)) + "/run_code"
    return state, SandboxConfig(url=url, timeout_s=10.0, url_timeout_s=20.0)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_S", 0.01)


ECHO = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"]}


def test_a_program_runs_on_the_server(server: tuple[Server, SandboxConfig]) -> None:
    state, config = server
    result = score("x = input()\nprint(x if x == '1' else 3)", ECHO, config)
    assert (result["score"], result["passed"], result["reason"]) == (0.5, 1, "test 2: wrong answer")
    request = state.requests[-1]
    assert (request["language"], request["stdin"], request["run_timeout"]) == ("python", "2\n", 10.0)
    assert request["memory_limit_MB"] == config.memory_mb


def test_what_a_program_does_wrong_is_a_score(server: tuple[Server, SandboxConfig]) -> None:
    _, config = server
    assert "ValueError: no" in score("raise ValueError('no')", ECHO, config)["reason"]
    state, _ = server
    state.answers = [lambda _: (200, {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}})]
    assert score("x", ECHO, config)["reason"] == "test 1: time limit exceeded"
    result = {"status": "Finished", "return_code": 0, "stdout": "x" * (2 << 20), "stderr": ""}
    state.answers = [lambda _: (200, {"status": "Success", "run_result": result})]
    assert score("x", ECHO, config)["reason"] == "test 1: output limit exceeded"


def test_functions_are_judged_beside_the_program(server: tuple[Server, SandboxConfig]) -> None:
    _, config = server
    asserts = ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]
    result = score("def add(a, b): return a + b", asserts, config)
    assert (result["passed"], result["reason"]) == (1, "test 2: assertion failed")
    calls = {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}
    assert score("def add(a, b): return a + b", calls, config)["score"] == 1.0
    for forgery in ("import os; os._exit(0)", "def add(*x): print('passed'); exit(0)"):
        assert score(forgery, asserts, config)["score"] == 0.0


FAILURES: dict[str, Answer] = {
    "HTTP 503": lambda _: (503, b"busy"),
    "HTTP 429": lambda _: (429, b"slowly"),
    "SandboxError": lambda _: (200, {"status": "SandboxError", "message": "no pod"}),
    "no JSON": lambda _: (200, b"<html>"),
    "no JSON object": lambda _: (200, []),
    "the run's status": lambda _: (200, {"status": "Success", "run_result": {"status": "Error"}}),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_of_the_server_is_tried_again(name: str, server: tuple[Server, SandboxConfig]) -> None:
    state, config = server
    state.answers = [FAILURES[name], FAILURES[name], state.execute]
    assert run("print(input())", "1\n", config).stdout == "1\n"
    assert len(state.requests) == 3


def test_a_request_that_the_server_does_not_take_is_not_repeated(server: tuple[Server, SandboxConfig]) -> None:
    state, config = server
    state.answers = [lambda _: (422, b"no such field")]
    with pytest.raises(SandboxError, match="the 1 attempts.*HTTP 422: no such field"):
        run("x", "", config)
    assert len(state.requests) == 1


def test_a_server_that_is_silent_or_not_there_is_an_error(server: tuple[Server, SandboxConfig]) -> None:
    state, config = server
    config.url_timeout_s = 0.5
    state.answers = [FAILURES["HTTP 503"]]
    with pytest.raises(SandboxError, match="within 0.5 s; the .* attempts at the last one failed with: HTTP 503: busy"):
        run("x", "", config)
    state.answers = [lambda _: (time.sleep(1.0), (200, {}))[1]]  # type: ignore[func-returns-value]
    with pytest.raises(SandboxError, match="ReadTimeout"):
        run("x", "", config)
    config.url = "http://127.0.0.1:1/run_code"
    with pytest.raises(SandboxError, match="ConnectError"):
        run("x", "", config)


def test_an_answer_without_end_is_the_programs_doing(
    server: tuple[Server, SandboxConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, config = server
    monkeypatch.setattr(remote.values, "MAX_FRAME", 1 << 20)
    state.answers = [lambda _: (200, b" " * (16 << 20))]
    assert run("x", "", config).failure == "output limit exceeded"


def test_only_the_time_that_programs_run_is_shared(server: tuple[Server, SandboxConfig]) -> None:
    state, config = server
    config.total_timeout_s = 0.25

    def slow(request: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.2)
        return state.execute(request)  # which says that it ran for 0.1 s

    state.answers = [slow]
    tests = {"inputs": ["1"] * 4, "outputs": ["1"] * 4}
    result = score("print(input())", tests, config)
    assert (result["passed"], result["reason"]) == (3, "test 4: time limit of all tests exceeded")
    assert state.requests[-1]["run_timeout"] == pytest.approx(0.05) or len(state.requests) == 3
