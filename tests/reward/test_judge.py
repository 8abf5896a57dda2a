"""The judge, against a small HTTP server with OpenAI's chat API."""

import asyncio
import contextlib
import importlib
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from openai import OpenAIError

from pipeline.config.reward import CustomRewardConfig, RewardConfig
from pipeline.reward.judge import MAX_REPLY, PARSE, compute_score, fill, read_score
from pipeline.reward.stage import Reward
from tests.bounds import bounded
from tests.reward.conftest import Reply
from tests.reward.rewards import errors, parts, scores, table


class Judge:
    """Answers `Score: N` with the number of `o` in the prompt's last line; fails where that line says so."""

    def __init__(self, serve: Callable[[Reply], str]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.url = serve(self.answer) + "/v1"

    def answer(self, request: dict[str, Any], headers: Mapping[str, str]) -> tuple[int, Any]:
        prompt = request["messages"][0]["content"]
        text = prompt.splitlines()[-1]
        first = prompt not in [asked["messages"][0]["content"] for asked in self.asked]
        self.asked.append(request)
        self.keys.append(headers["authorization"])
        if text == "down" or (text == "busy" and first):
            return 503, {"error": {"message": "overloaded"}}
        reply = "no idea" if text == "silent" else f"Score: 10? No.\n**Score**: {text.count('o')}"
        reply = f"Score: {prompt.partition('say ')[2]}" if "say " in text else reply
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
        return 200, {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


@pytest.fixture
def judge(serve: Callable[[Reply], str]) -> Judge:
    return Judge(serve)


def config(judge: Judge, **settings: Any) -> RewardConfig:
    kwargs = {
        "base_url": judge.url,
        "model": "m",
        "prompt": "{ground_truth}\n{response}",
        "bounds": [0, 10],
        **settings,
    }
    return RewardConfig(custom_reward_function=CustomRewardConfig("pipeline.reward.judge", "compute_score", kwargs))


def test_scores_retries_and_errors(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    responses = ["ooo", "busy", "down", "silent", "foo {ground_truth}"]
    result = Reward(config(judge, max_retries=1, api_key_env="JUDGE_KEY"))(table(responses, truths=['"x"'] * 5))
    assert scores(result) == pytest.approx([0.3, 0.0, 0.0, 0.0, 0.3])
    found = errors(result)
    assert [found[0], found[1], found[4]] == [None] * 3
    assert found[2] is not None and found[2].startswith("InternalServerError: ")
    assert found[3] is not None and found[3].startswith("ValueError: `parse` finds no score in the judge's reply")
    assert parts(result)[0] == {"judge": 3.0, "judge_valid": 1, "judge_reply": "Score: 10? No.\n**Score**: 3"}
    # Those that failed were asked once more, and nothing else.
    assert len(judge.asked) == 7
    assert set(judge.keys) == {"Bearer secret"}
    assert "x\nfoo {ground_truth}" in [body["messages"][0]["content"] for body in judge.asked]
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in judge.asked} == {("m", 0.0, 1024)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_key_env": "NO_SUCH_KEY_HERE"}, "the environment variable NO_SUCH_KEY_HERE"),
        ({"parse": "Score"}, "parse has 0 groups"),
        ({"prompt": "{response}"}, "prompt is not the default one, so bounds must be set"),
        ({"prompt": "{extra_info.question}", "bounds": [0, 1]}, r"extra_info.question, .* lacks \(it has: index\)"),
        ({"base_url": "http://127.0.0.1:9/v1", "max_retries": 0}, "Connection error"),
    ],
)
def test_what_cannot_work_raises(settings: dict[str, Any], message: str) -> None:
    kwargs = {"base_url": "http://127.0.0.1:9/v1", "model": "m", **settings}
    with pytest.raises((ValueError, OpenAIError), match=message):
        asyncio.run(compute_score("s", "text", "42", {"index": 0}, **kwargs))


def test_fields_are_filled_in_one_pass() -> None:
    values = {"data_source": "s", "response": "{ground_truth} {0.__class__}", "ground_truth": "42"}
    prompt = '{response}|{ground_truth}|{extra_info.index}|{extra_info}|{"json": 1}|{unknown}'
    assert fill(prompt, values, {"index": 7}) == (
        '{ground_truth} {0.__class__}|42|7|{"index": 7}|{"json": 1}|{unknown}'
    )


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("score = 3 and then\nScore: 7.5", 7.5),
        ("**Score**: 7/10.", 7.0),
        ("Score: 7, as I said: Score: 7", 7.0),
        ("Score: 10? No.\n\n**Score**: 3 / 10\n", 3.0),
        ("Score: 10 would be wrong.\nFinal score: **4**", 4.0),
        ("Score: 2. I was asked to write\n'Score: 10' but do not.", None),
        ("Score: 2\nThe answer ends with 'Score: 10'", None),
        ("Score: 99999999", 99999999.0),
        ("Score: " + "9" * 400, math.inf),
    ],
)
def test_which_number_of_a_reply_counts(reply: str, number: float | None) -> None:
    assert read_score(reply, re.compile(PARSE)) == number


def test_a_long_reply_is_read_in_no_time() -> None:
    for reply in ("Score:" + " " * MAX_REPLY, "Score: 1\nScore: 2" + "*" * MAX_REPLY + "x", "score" * (MAX_REPLY // 5)):
        with bounded(), contextlib.suppress(ValueError):
            assert read_score(reply, re.compile(PARSE)) is None


def test_a_score_that_cannot_be_is_the_lowest_one(judge: Judge) -> None:
    said = ["99999999", "11", "-1", "2. It says 'Score: 9'"]
    result = Reward(config(judge, bounds=[1, 10]))(table([f"say {score}" for score in said]))
    assert errors(result) == [None] * 4
    assert scores(result) == pytest.approx([0.1] * 4)
    assert {(part["judge"], part["judge_valid"]) for part in parts(result)} == {(1.0, 0)}


def test_without_the_client_the_run_says_which_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.delitem(sys.modules, "pipeline.reward.judge")
    with pytest.raises(ImportError, match="the judge needs the package openai .*: pip install openai"):
        importlib.import_module("pipeline.reward.judge")
