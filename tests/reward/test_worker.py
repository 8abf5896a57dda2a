"""Rewards in processes of their own: what hangs, crashes or misbehaves costs its own row and nothing else."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.reward import RewardConfig
from pipeline.reward import pool
from pipeline.reward.rules import RULES
from pipeline.reward.rules.budget import within
from pipeline.reward.stage import Reward
from tests.reward.rewards import GOOD, custom, errors, parts, scores, table, written

LIMIT_S = 1.5

MISBEHAVING = """
import ctypes, os, signal, subprocess, sys, threading, time
def compute_score(solution_str, **row):
    return globals()[solution_str]()
def fine(): return 1.0
def exits(): os._exit(3)
def leaves(): sys.exit(4)
def segfaults(): ctypes.string_at(0)
def kills_its_group(): os.killpg(0, signal.SIGKILL)
def prints():
    for _ in range(20): print("x" * 1_000_000)
    print("x" * 1_000_000, file=sys.stderr, flush=True)
    os.write(1, b"x" * 1_000_000)
    return 1.0
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
def hangs_in_a_thread():
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return 1.0
def starts_a_process():
    raise ValueError(subprocess.Popen(["sleep", "3600"]).pid)
"""
DEAD = "WorkerError: the process of the reward function ended with "
OUTCOMES = {
    "fine": None,
    "exits": DEAD + "exit code 3",
    "leaves": "SystemExit: 4",
    "segfaults": DEAD + "signal SIGSEGV",
    "kills_its_group": DEAD + "signal SIGKILL",
    "prints": None,
    "forks_and_dies": DEAD + "exit code 5",
    "closes_everything": "WorkerError: the process of the reward function ",
    "ignores_signals": "TimeoutError: no score after 1.5 s",
    "counts_in_c": "TimeoutError: no score after 1.5 s",
    "recurses": "RecursionError: ",
    "alarms": "TimeoutError: its own alarm",
    "hangs_in_a_thread": None,
}


@pytest.mark.slow
def test_a_function_that_misbehaves_costs_its_own_row(tmp_path: Path) -> None:
    names = list(OUTCOMES)
    responses = [response for name in names for response in (name, "fine")]
    result = Reward(custom(tmp_path, MISBEHAVING, timeout_s=LIMIT_S))(table(responses))
    reasons = dict(zip(responses, errors(result), strict=True))
    for name, expected in OUTCOMES.items():
        reason = reasons[name]
        assert reason is None if expected is None else (reason or "").startswith(expected), (name, reason)
    assert scores(result)[1::2] == [1.0] * len(names)


def gone(pid: int, patience_s: float = 10.0) -> bool:
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
    """Also when more calls wait for the worker than its connection holds."""
    monkeypatch.setattr(pool, "LAG_S", 0.3)
    source = """
import time
async def compute_score(solution_str, **row):
    if solution_str == "block":
        time.sleep(3600)
    return 1.0
"""
    reward = Reward(custom(tmp_path, source, timeout_s=0.5))
    reasons = errors(reward(table(["block", *["x" * 100_000] * 20])))
    assert reasons[0] == (
        "TimeoutError: no score after 0.5 s; an async function blocked the event loop, which all rows share"
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


FILLS = """
import time
kept = []
def compute_score(solution_str, **row):
    while solution_str == "fill":
        kept.append(b"x" * (16 << 20))
    if solution_str == "hold":
        kept.append(b"x" * (400 << 20))
        time.sleep(60)
    return 1.0
"""


@pytest.mark.parametrize(("prefix", "response"), [("", "fill"), ("async ", "hold")])
def test_memory_is_limited(tmp_path: Path, prefix: str, response: str) -> None:
    config = custom(tmp_path, FILLS.replace("def ", prefix + "def "))
    config.worker_memory_mb = 300
    reward = Reward(config)
    (reason,) = errors(reward(table([response])))
    assert reason is not None and reason.startswith("MemoryError: the reward worker holds ")
    assert reason.endswith("more than reward.worker_memory_mb=300")
    assert errors(reward(table([GOOD]))) == [None]


def test_a_function_that_is_too_large_to_load_names_the_limit(tmp_path: Path) -> None:
    config = custom(tmp_path, "import time\nmodel = b'x' * (400 << 20)\ntime.sleep(60)")
    config.worker_memory_mb = 300
    with pytest.raises(ValueError, match=r"not loaded: MemoryError: .* more than reward\.worker_memory_mb=300"):
        Reward(config)(table([GOOD]))


RULE = """
import time
from pipeline.reward.rules import RULES
from tests.reward.test_worker import costly
RULES["costly"] = costly
def compute_score(**row): return 0.0
"""
PREPARED: list[int] = []


@within(cpu_s=0.5, wrong={"score": -1.0, "acc": 0}, prepare=lambda: PREPARED.append(1))
def costly(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """A rule that some responses keep busy."""
    while solution_str == "loop":
        pass
    if solution_str == "c":
        sum(range(10**12))
    if solution_str == "fill":
        kept = []
        while True:
            kept.append(b"x" * (16 << 20))
    if solution_str == "sleep":
        time.sleep(3600)
    return {"score": 1.0, "acc": 1, "prepared": len(PREPARED)}


def test_a_response_that_exhausts_a_rules_budget_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error; one that merely takes long on the clock is."""
    monkeypatch.setitem(RULES, "costly", costly)
    functions = {"rule": {}, "own": {"path": written(tmp_path, RULE)}}
    responses = ["fine", "loop", "fine", "c", "fill"]
    result = Reward(RewardConfig(functions=functions, worker_memory_mb=300))(table(responses, source="costly"))
    assert scores(result) == [1.0, -1.0, 1.0, -1.0, -1.0]
    assert errors(result) == [None] * 5
    assert {part["rule/prepared"] for part in parts(result) if part["acc"]} == {1}
    late = Reward(RewardConfig(functions=functions, timeout_s=0.5))(table(["sleep"], source="costly"))
    assert errors(late) == ["rule: TimeoutError: no score after 0.5 s"]


@pytest.mark.parametrize("ends", ["exits", "the pool"])
def test_a_worker_takes_its_processes_with_it(tmp_path: Path, ends: str) -> None:
    reward = Reward(custom(tmp_path, MISBEHAVING))
    (error,) = errors(reward(table(["starts_a_process"])))
    assert error is not None
    pid = int(error.removeprefix("ValueError: ").split()[0])
    os.kill(pid, 0)
    if ends == "exits":
        reward(table(["exits"]))
    else:
        pool.close()
    assert gone(pid)


def test_workers_end_with_their_process(tmp_path: Path) -> None:
    program = f"""
import time
from pipeline.reward.stage import Reward
from tests.reward.rewards import custom, parts, table
from pathlib import Path
source = "import os\\ndef compute_score(**row):\\n    return {{'score': 1.0, 'pid': os.getpid()}}\\n"
print(parts(Reward(custom(Path({str(tmp_path)!r}), source))(table(["x"])))[0]["pid"], flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, 0)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=10)
    assert gone(worker)


def test_workers_inherit_no_descriptors(tmp_path: Path) -> None:
    secret = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(secret, True)
    source = """
import os
def compute_score(**row):
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {"score": 1.0, "open": [os.readlink(link) for link in links if os.path.exists(link)]}
"""
    try:
        (part,) = parts(Reward(custom(tmp_path, source))(table([GOOD])))
    finally:
        os.close(secret)
    assert str(tmp_path) not in part["open"]
    assert sum(name.startswith("socket:") for name in part["open"]) <= 1
