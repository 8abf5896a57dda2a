"""Rewards in processes of their own: what hangs, crashes or misbehaves costs its own row and nothing else."""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeline.reward import worker
from pipeline.reward.config import RateLimitConfig, RewardConfig
from pipeline.reward.functions import ONLY, functions
from pipeline.reward.limits import RateLimit
from pipeline.reward.process import Call, Lane, trusted
from pipeline.reward.stage import Reward
from tests.reward.rewards import GOOD, custom, errors, parts, scores, table

LIMIT_S = 1.5

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
    """One percent each of 600 rows: the right rows fail, and all together cost about one limit."""
    limit = 4.0
    source = SLEEPS_OR_RAISES.replace("PREFIX ", prefix + " " if prefix else "").replace("WAIT", wait)
    reward = Reward(custom(tmp_path, source, timeout_s=limit))
    reward(table([GOOD]))
    responses = [GOOD] * 600
    asleep, raising = set(range(7, 600, 100)), set(range(50, 600, 100))
    for i in asleep:
        responses[i] = "sleep"
    for i in raising:
        responses[i] = "raise"
    begun = time.perf_counter()
    result = reward(table(responses))
    seconds = time.perf_counter() - begun
    found = errors(result)
    assert {
        i for i, error in enumerate(found) if error and error.startswith("TimeoutError: no score after 4 s")
    } == asleep
    assert {i for i, error in enumerate(found) if error and error.startswith("RuntimeError: by design")} == raising
    assert sum(scores(result)) == 600 - len(asleep) - len(raising)
    # One after the other they would take six limits; each that is stuck costs the start of another lane.
    assert seconds < 4 * limit


HOSTILE = """
import ctypes, os, signal, sys, threading, time
def compute_score(solution_str, **row):
    return globals()[solution_str]()
def fine(): return 1.0
def exits(): os._exit(3)
def leaves(): sys.exit(4)
def segfaults(): ctypes.string_at(0)
def kills_itself(): os.kill(os.getpid(), signal.SIGKILL)
def kills_its_group(): os.killpg(0, signal.SIGKILL)
def prints():
    for _ in range(20): print("x" * 1_000_000)
    print("x" * 1_000_000, file=sys.stderr, flush=True)
    return 1.0
def writes_to_stdout():
    os.write(1, b"x" * 1_000_000); os.write(2, b"y" * 1_000_000)
    return 1.0
def forks():
    return 1.0 if os.fork() else 2.0
def forks_and_dies():
    if os.fork():
        os._exit(5)
    time.sleep(3600)
def closes_everything():
    os.closerange(0, 1000)
    return 1.0
def ignores_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)
def counts_in_c():
    sum(range(10 ** 12))
def recurses():
    return recurses()
def alarms():
    def ring(*_): raise TimeoutError("its own alarm")
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(3600)
def hangs_in_thread_too():
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return 1.0
def writes_junk():
    for number in range(3, 256):
        try: os.write(number, b"\\x00\\x00\\x00\\x05hello" * 10)
        except OSError: pass
    time.sleep(3600)
def says_it_is_huge():
    for number in range(3, 256):
        try: os.write(number, b"\\xff" * 10)
        except OSError: pass
    time.sleep(3600)
def big(): return {"score": 1.0, "text": "x" * 10_000_000}
def starts_a_process():
    import subprocess
    child = subprocess.Popen(["sleep", "3600"])
    raise ValueError(child.pid)
def returns_a_liar():
    class Liar(float):
        def __float__(self): raise RuntimeError("no")
    return Liar(1)
"""

OUTCOMES = {
    "fine": None,
    "exits": "LaneError: the process of the reward function ended with exit code 3",
    "leaves": "SystemExit: 4",
    "segfaults": "LaneError: the process of the reward function ended with signal SIGSEGV",
    "kills_itself": "LaneError: the process of the reward function ended with signal SIGKILL",
    "kills_its_group": "LaneError: the process of the reward function ended with signal SIGKILL",
    "prints": None,
    "writes_to_stdout": None,
    "forks": None,
    "forks_and_dies": "LaneError: the process of the reward function ended with exit code 5",
    # It answers into nothing and ends, or is ended where that takes it long.
    "closes_everything": "LaneError: the ",
    "ignores_signals": "TimeoutError: no score after 1.5 s",
    "counts_in_c": "TimeoutError: no score after 1.5 s",
    "recurses": "RecursionError: ",
    "alarms": "TimeoutError: its own alarm",
    "hangs_in_thread_too": None,
    "writes_junk": "LaneError: the reward function wrote to the connection of its process",
    "says_it_is_huge": "LaneError: the reward function wrote to the connection of its process",
    "big": "ValueError: the parts of the reward are ",
    "returns_a_liar": "RuntimeError: no",
}


@pytest.mark.slow
def test_hostile_functions_cost_their_own_rows(tmp_path: Path) -> None:
    names = list(OUTCOMES)
    responses = [response for name in names for response in (name, "fine")]
    begun = time.perf_counter()
    result = Reward(custom(tmp_path, HOSTILE, timeout_s=LIMIT_S))(table(responses))
    seconds = time.perf_counter() - begun
    found = dict(zip(responses, errors(result), strict=True))
    for name, expected in OUTCOMES.items():
        assert found[name] is None if expected is None else (found[name] or "").startswith(expected), (
            name,
            found[name],
        )
    assert scores(result)[1::2] == [1.0] * len(names)
    assert [score for name, score in zip(responses, scores(result), strict=True) if name == "forks"] == [1.0]
    assert seconds < 20 * LIMIT_S


def test_a_killed_row_takes_its_processes_with_it(tmp_path: Path) -> None:
    reward = Reward(custom(tmp_path, HOSTILE))
    (error,) = errors(reward(table(["starts_a_process"])))
    assert error is not None
    pid = int(error.removeprefix("ValueError: ").split()[0])
    os.kill(pid, 0)
    reward(table(["exits"]))
    assert gone(pid)


def gone(pid: int, patience_s: float = 5.0) -> bool:
    """Whether a process ends."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_an_async_function_that_blocks_its_loop_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LAG_S", 0.3)
    source = """
import asyncio, time
async def compute_score(solution_str, **row):
    if solution_str == "block":
        time.sleep(3600)
    return 1.0
"""
    reward = Reward(custom(tmp_path, source, timeout_s=0.5))
    begun = time.perf_counter()
    result = reward(table([GOOD, "block", GOOD]))
    assert time.perf_counter() - begun < 5
    assert (
        errors(result)[1]
        == "TimeoutError: no score after 0.5 s; an async function blocked the event loop, which all rows share"
    )
    assert errors(reward(table([GOOD] * 3))) == [None] * 3


def test_a_function_may_start_an_event_loop_of_its_own(tmp_path: Path) -> None:
    source = """
import asyncio
async def answer():
    return 2.0
def compute_score(solution_str, **row):
    return asyncio.run(answer()) if solution_str == "run" else answer()
"""
    assert scores(Reward(custom(tmp_path, source))(table(["run", "return"]))) == [2.0, 2.0]


def test_lanes_are_kept_between_tables_and_replaced_when_lost(tmp_path: Path) -> None:
    source = """
import os
def compute_score(solution_str, **row):
    if solution_str == "exit":
        os._exit(0)
    return {"score": 1.0, "lane": os.getpid()}
"""
    config = custom(tmp_path, source)

    def lanes(response: str = GOOD) -> set[int]:
        return {part["lane"] for part in parts(Reward(config)(table([response] * 5))) if part}

    (first,) = lanes()
    assert lanes() == {first} and first != os.getpid()
    assert lanes("exit") == set()
    (second,) = lanes()
    assert second != first and gone(first)
    worker.close()
    assert gone(second)


def test_slow_rows_get_more_lanes_up_to_the_most(tmp_path: Path) -> None:
    source = """
import os, time
def compute_score(**row):
    time.sleep(0.2)
    return {"score": 1.0, "lane": os.getpid()}
"""
    used = {}
    for most in (1, 3):
        config = custom(tmp_path, source, timeout_s=1.0)
        config.max_processes = most
        used[most] = len({part["lane"] for part in parts(Reward(config)(table([GOOD] * 12)))})
    assert used[1] == 1 and 2 <= used[3] <= 3


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
    with worker.using(config) as pool:
        pool.start()
        threads = [threading.Thread(target=Reward(config), args=(table([GOOD] * 6),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    times = [ast.literal_eval(line) for line in log.read_text().splitlines()]
    assert len(times) == 18
    most = max(sum(begun <= moment < ended for begun, ended in times) for moment, _ in times)
    assert 2 <= most <= 3


def test_rules_are_not_held_back_by_the_rate_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reward.limits.WINDOW_S", 1.0)
    path = custom(tmp_path, "def compute_score(**row):\n    return 1.0\n").custom_reward_function.path
    config = RewardConfig(functions={"rule": {}, "own": {"path": path}}, rate_limit=RateLimitConfig(max_per_minute=2))
    begun = time.perf_counter()
    result = Reward(config)(table([GOOD] * 5))
    # Five calls, two a window of one second: the fifth begins two windows after the first.
    assert 2.0 <= time.perf_counter() - begun < 10
    assert scores(result) == [2.0] * 5


def test_lanes_end_with_their_process(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from pipeline.reward.stage import Reward
from tests.reward.rewards import custom, parts, table
from pathlib import Path
source = "import os\\ndef compute_score(**row):\\n    return {{'score': 1.0, 'lane': os.getpid()}}\\n"
print(parts(Reward(custom(Path({str(tmp_path)!r}), source))(table(["x"])))[0]["lane"], flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        lane = int(parent.stdout.readline())
        os.kill(lane, 0)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=10)
    assert gone(lane)


def test_lanes_inherit_no_descriptors(tmp_path: Path) -> None:
    secret = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(secret, True)
    source = """
import os
def compute_score(**row):
    return {"score": 1.0, "open": [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                                   if os.path.exists(f"/proc/self/fd/{n}")]}
"""
    try:
        (part,) = parts(Reward(custom(tmp_path, source))(table([GOOD])))
    finally:
        os.close(secret)
    assert str(tmp_path) not in part["open"]
    assert sum(name.startswith("socket:") for name in part["open"]) <= 1


@pytest.mark.parametrize(
    "answers",
    [
        None,
        [],
        [[1.0, "{}", None], [1.0, "{}", None]],
        [[float("nan"), "{}", None]],
        [[1e39, "{}", None]],
        [["1", "{}", None]],
        [[1.0, {}, None]],
        [[1.0, "x" * 200_000, None]],
        [[1.0, "{}"]],
        [1.0],
    ],
)
def test_answers_that_are_none_are_refused(answers: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        trusted(answers, 1)
    assert trusted([[1, "{}", None]], 1) == [(1.0, "{}", None)]
    assert trusted([[5.0, "{}", "E" * 900]], 1) == [(0.0, "{}", "E" * 500)]


def test_calls_of_one_pool_do_not_mix(tmp_path: Path) -> None:
    config = custom(tmp_path, "def compute_score(solution_str, **row):\n    return float(solution_str)\n")
    found: dict[int, list[float]] = {}

    def score(number: int) -> None:
        found[number] = scores(Reward(config)(table([str(number * 100 + i) for i in range(40)])))

    threads = [threading.Thread(target=score, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {number: [float(number * 100 + i) for i in range(40)] for number in range(4)}


def test_a_call_has_its_own_limit(tmp_path: Path) -> None:
    config = custom(tmp_path, "import time\ndef compute_score(**row):\n    time.sleep(3600)\n")
    with worker.using(config) as pool:
        pool.start()
        begun = time.perf_counter()
        ((answer,),) = pool.run([Call("", [["s", "text", None, None]], 0.3)])
    assert answer == (0.0, "{}", "TimeoutError: no score after 0.3 s") and time.perf_counter() - begun < 3


def test_rows_given_to_a_lane_at_once_begin_once_and_fail_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that takes the function for a rule gives a lane many rows; those behind a bad one go elsewhere."""
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
    config = custom(tmp_path, source, timeout_s=LIMIT_S)
    (function,) = functions(config)
    settings = {"functions": [asdict(function)], "rule_kwargs": {}, "sandbox": asdict(config.sandbox)}
    frames: list[int] = []
    send = Lane.send
    monkeypatch.setattr(
        Lane, "send", lambda lane, content: (frames.append(len(content.get("rows", []))), send(lane, content))
    )
    pool = worker.Pool([replace(function, path=None)], settings, 2, RateLimit(None, None))
    responses = [str(number) for number in range(200)]
    responses[20:22], responses[120] = ["exit a", "exit b"], "sleep"
    try:
        found = pool.run([Call(ONLY, [["s", response, None, None]], LIMIT_S) for response in responses])
    finally:
        pool.close()
    for response, ((score, _, error),) in zip(responses, found, strict=True):
        if "exit" in response:
            assert error == "LaneError: the process of the reward function ended with exit code 3"
        elif "sleep" in response:
            assert error == "TimeoutError: no score after 1.5 s"
        else:
            assert error is None and score == float(response)
    assert sorted((tmp_path / "log").read_text().splitlines()) == sorted(responses)
    # One by one at first, and after each loss.
    assert max(frames) > 10 and frames.count(1) >= 4 and len(frames) < 100


def test_overhead_of_a_row_is_small() -> None:
    reward = Reward(RewardConfig())
    reward(table([GOOD]))
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        reward(table([GOOD] * 64))
        seconds.append(time.perf_counter() - begun)
    # 0.15 ms a row on a quiet core; the bound leaves room for a busy machine.
    assert min(seconds) / 64 < 2e-3
