"""The pool: which worker makes which call, and what rows cost each other."""

import ast
import os
import threading
import time
from pathlib import Path

import pytest

from pipeline.config.reward import RateLimitConfig, RewardConfig
from pipeline.reward import pool, worker
from pipeline.reward.functions import functions
from pipeline.reward.stage import Reward
from pipeline.reward.worker import RewardCall, RewardWorker
from tests.reward.rewards import GOOD, custom, errors, parts, scores, table
from tests.reward.test_worker import gone

SLEEPS_OR_RAISES = """
import asyncio, time
PREFIX def compute_score(solution_str, **row):
    if solution_str == "sleep":
        WAIT
    if solution_str == "raise":
        raise RuntimeError("by design")
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize(("prefix", "wait"), [("", "time.sleep(3600)"), ("async", "await asyncio.sleep(3600)")])
def test_rows_that_sleep_for_ever_and_rows_that_raise(tmp_path: Path, prefix: str, wait: str) -> None:
    """The right rows fail, and those that sleep do not cost one limit each."""
    limit = 4.0
    source = SLEEPS_OR_RAISES.replace("PREFIX ", prefix + " " if prefix else "").replace("WAIT", wait)
    reward = Reward(custom(tmp_path, source, timeout_s=limit))
    reward(table([GOOD]))
    kinds = {7: "sleep", 50: "raise"}
    responses = [kinds.get(i % 100, GOOD) for i in range(600)]
    begun = time.perf_counter()
    result = reward(table(responses))
    seconds = time.perf_counter() - begun
    expected = {"sleep": "TimeoutError: no score after 4 s", "raise": "RuntimeError: by design (mine.py, line 7)"}
    assert errors(result) == [expected.get(response) for response in responses]
    assert sum(scores(result)) == 600 - 6 - 6
    # One after the other they would take six limits; each that is stuck costs the start of another worker.
    assert seconds < 6 * limit


WHERE = """
import os, time
def compute_score(solution_str, pause=0.0, **row):
    if solution_str == "exit":
        os._exit(0)
    time.sleep(pause)
    return {"score": 1.0, "pid": os.getpid()}
"""


def pids(config: RewardConfig, responses: list[str]) -> set[int]:
    return {part["pid"] for part in parts(Reward(config)(table(responses))) if part}


def test_workers_are_kept_between_tables_and_replaced_when_lost(tmp_path: Path) -> None:
    config = custom(tmp_path, WHERE)
    (first,) = pids(config, [GOOD] * 5)
    assert pids(config, [GOOD] * 5) == {first} and first != os.getpid()
    assert pids(config, ["exit"] * 3) == set()
    (second,) = pids(config, [GOOD] * 5)
    assert second != first and gone(first)
    os.kill(second, 9)
    assert gone(second)
    # A worker that ended between two tables costs no row.
    (third,) = pids(config, [GOOD])
    pool.close()
    assert third != second and gone(third)


def test_slow_rows_get_more_workers_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE_S", 0.1)
    for limit in (1, 3):
        config = custom(tmp_path, WHERE, reward_kwargs={"pause": 0.3})
        config.max_processes = limit
        used = pids(config, [GOOD] * 12)
        assert min(limit, 2) <= len(used) <= limit


def test_a_worker_that_stops_in_the_middle_of_an_answer_does_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MESSAGE_S", 1)
    source = """
import os, sys, time
def compute_score(solution_str, **row):
    if solution_str == "half":
        os.write(int(sys.argv[2]), b"\\0\\0\\1\\0{")
        time.sleep(60)
    return 1.0
"""
    found = errors(Reward(custom(tmp_path, source, timeout_s=30.0))(table(["half", GOOD])))
    assert "in the middle of an answer" in str(found[0]) and not found[1]


def test_workers_that_are_not_needed_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stays: it makes the calls that follow, and no other is started for them."""
    monkeypatch.setattr(pool, "GRACE_S", 0.1)
    monkeypatch.setattr(pool, "IDLE_S", 0.5)
    config = custom(tmp_path, WHERE, reward_kwargs={"pause": 0.3})
    pids(config, [GOOD] * 8)
    workers = pool.pool_for(config)._workers
    started = {worker.process.pid for worker in workers}
    assert len(started) > 1
    end = time.monotonic() + 20
    while len(workers) > 1 and time.monotonic() < end:
        assert pids(config, [GOOD]) <= started
    (kept,) = workers
    assert pids(config, [GOOD]) == {kept.process.pid}
    assert all(gone(pid) for pid in started - {kept.process.pid})


def test_the_worker_of_async_functions_stays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients stay connected however long the next chunk takes, and no worker waits for plain calls beside it."""
    monkeypatch.setattr(pool, "IDLE_S", 0.1)
    config = custom(tmp_path, WHERE.replace("def ", "async def "))
    used = pids(config, [GOOD] * 4)
    time.sleep(0.5)
    assert pids(config, [GOOD] * 4) == used == {worker.process.pid for worker in pool.pool_for(config)._workers}


def test_rate_limits_hold_for_tables_scored_at_the_same_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = f"""
import asyncio, time
async def compute_score(**row):
    begun = time.time()
    await asyncio.sleep(0.1)
    with open({str(log)!r}, "a") as file:
        file.write(f"{{begun}},{{time.time()}}\\n")
    return 1.0
"""
    config = custom(tmp_path, source)
    config.rate_limit = RateLimitConfig(max_concurrent=3)
    threads = [threading.Thread(target=Reward(config), args=(table([GOOD] * 6),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    times = [ast.literal_eval(line) for line in log.read_text().splitlines()]
    assert len(times) == 18
    together = max(sum(begun <= moment < ended for begun, ended in times) for moment, _ in times)
    assert 2 <= together <= 3


def test_rules_are_not_held_back_by_the_rate_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reward.rate_limit.WINDOW_S", 0.5)
    path = custom(tmp_path, "def compute_score(**row):\n    return 1.0\n").custom_reward_function.path
    config = RewardConfig(functions={"rule": {}, "own": {"path": path}}, rate_limit=RateLimitConfig(max_per_minute=2))
    begun = time.perf_counter()
    result = Reward(config)(table([GOOD] * 5))
    # Five calls, two a window of half a second: the fifth begins two windows after the first.
    assert time.perf_counter() - begun >= 1.0
    assert scores(result) == [2.0] * 5


def test_a_pool_that_is_closed_fails_its_callers(tmp_path: Path) -> None:
    config = custom(tmp_path, "import time\ndef compute_score(**row):\n    time.sleep(3600)\n")
    reasons: list[str] = []

    def score() -> None:
        with pytest.raises(RuntimeError, match="closed") as caught:
            Reward(config)(table([GOOD] * 3))
        reasons.append(str(caught.value))

    thread = threading.Thread(target=score)
    thread.start()
    time.sleep(1.0)
    pool.close()
    thread.join(timeout=20)
    assert reasons == ["reward: the pool of reward workers was closed"]


def test_rows_given_to_a_worker_at_once_begin_once_and_fail_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that takes the function for a rule gives a worker many rows; those behind a bad one go elsewhere."""
    source = f"""
import os, time
def compute_score(solution_str, **row):
    with open({str(tmp_path / "log")!r}, "a") as log:
        log.write(solution_str + "\\n")
    if "exit" in solution_str:
        os._exit(3)
    if "sleep" in solution_str:
        time.sleep(3600)
    return float(solution_str)
"""
    config = custom(tmp_path, source, timeout_s=1.5)
    config.max_processes = 2
    given: list[int] = []
    begin = RewardWorker.begin
    made = pool.Pool(config)
    (function,) = functions(config)
    monkeypatch.setattr(RewardWorker, "begin", lambda worker, calls: (given.append(len(calls)), begin(worker, calls)))
    monkeypatch.setattr(RewardCall, "by_rule", True)
    responses = [str(number) for number in range(200)]
    responses[20:22], responses[120] = ["exit a", "exit b"], "sleep"
    try:
        answers = made.run([RewardCall(function, [["s", response, None, None]], 1.5) for response in responses])
    finally:
        made.close()
    for response, ((score, _, error),) in zip(responses, answers, strict=True):
        if "exit" in response:
            assert error == "WorkerError: the process of the reward function ended with exit code 3"
        elif "sleep" in response:
            assert error == "TimeoutError: no score after 1.5 s"
        else:
            assert error is None and score == float(response)
    assert sorted((tmp_path / "log").read_text().splitlines()) == sorted(responses)
    # One by one at first and after each loss.
    assert max(given) > 10 and given.count(1) >= 4 and len(given) < 150
