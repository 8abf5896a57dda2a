"""Reward functions that fork: a row has the function's own value, and no other process answers for the worker."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from pipeline.config.reward import RewardConfig
from pipeline.reward import pool
from pipeline.reward.result import sent_answer
from pipeline.reward.stage import Reward
from tests.reward.rewards import custom, errors, scores, table

FORKING = """
import atexit, concurrent.futures, ctypes, multiprocessing, os, subprocess, sys, tempfile, threading, time
folder = tempfile.mkdtemp()
atexit.register(lambda: open(os.path.join(folder, str(os.getpid())), "w").close())
def compute_score(solution_str, **row):
    return globals()[solution_str]()
def _ended(pid): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def _half(number): return number / 2
def fine(): return 0.5
def exits():
    pid = os.fork()
    if pid == 0: sys.exit(0)
    return 0.5 + _ended(pid)
def exits_with_a_code():
    pid = os.fork()
    if pid == 0: sys.exit(5)
    return _ended(pid) / 10
def exits_with_words():
    pid = os.fork()
    if pid == 0: sys.exit("no more")
    return _ended(pid) / 2
def raises():
    pid = os.fork()
    if pid == 0: raise ValueError("in the child")
    return _ended(pid) / 2
def returns():
    os.fork()
    return 0.5
def returns_something_else():
    return 0.5 if os.fork() else 99.0
def ends_at_once():
    pid = os.fork()
    if pid == 0: os._exit(5)
    return _ended(pid) / 10
def lasts():
    if os.fork() == 0: time.sleep(2)
    return 0.5
def forks_twice():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(2)
    return 0.5
def forks_often():
    for _ in range(4): os.fork()
    return 0.5
def forks_in_c():
    pid = ctypes.CDLL(None).fork()
    return 0.5 + _ended(pid) if pid else 99.0
def prints():
    sys.stdout = open(1, "w", closefd=False)  # with a buffer
    print("0.2", end="")
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writes, 1)
        print("0.5")
        sys.exit(0)
    os.close(writes)
    return float(os.read(reads, 100)) + _ended(pid)
def forks_in_a_thread():
    ended = []
    def run():
        pid = os.fork()
        if pid == 0: sys.exit(0)
        ended.append(_ended(pid))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return 0.5 + ended[0]
def pools():
    with multiprocessing.get_context("fork").Pool(2) as workers: return sum(workers.map(_half, [0.5, 0.5]))
def executes():
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(2, context) as workers: return sum(workers.map(_half, [0.5, 0.5]))
def spawns():
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as workers: return workers.submit(abs, -0.5).result()
def a_process_that_exits():
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
    process.start()
    process.join()
    return process.exitcode / 10
def runs_a_program():
    return float(subprocess.run(["echo", "0.5"], capture_output=True, text=True).stdout)
def leaves_a_daemon():
    os.system("sleep 30 &")
    return 0.5
def x_no_fork_runs_what_the_worker_does_at_its_end():
    time.sleep(0.3)
    return 0.5 + len(os.listdir(folder))
"""
WAYS = [name for name in re.findall(r"^def (\w+)\(\)", FORKING, re.MULTILINE) if name != "fine"]


def test_every_way_to_fork_costs_no_row(tmp_path: Path) -> None:
    result = Reward(custom(tmp_path, FORKING, timeout_s=30.0))(table([row for way in WAYS for row in (way, "fine")]))
    wrong = zip(WAYS, scores(result)[::2], errors(result)[::2], strict=True)
    assert [found for found in wrong if found[1:] != (0.5, None)] == []
    assert scores(result)[1::2] == [0.5] * len(WAYS) and errors(result)[1::2] == [None] * len(WAYS)


ASYNC = """
import asyncio, os, sys
log = LOG
async def compute_score(solution_str, **row):
    with open(log, "a") as file: file.write(solution_str + "\\n")
    if solution_str == "exits":
        pid = os.fork()
        if pid == 0: sys.exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) / 6
    if solution_str == "raises" and os.fork() == 0: raise ValueError("in the child")
    if solution_str == "returns" and os.fork() == 0: return 99.0
    if solution_str == "waits" and os.fork() == 0:
        await asyncio.sleep(0)
        with open(log, "a") as file: file.write("served\\n")
    for _ in range(20): await asyncio.sleep(0.01)
    with open(log, "a") as file: file.write(solution_str + "\\n")
    return 0.5
"""


def test_forks_of_async_functions_serve_no_row(tmp_path: Path) -> None:
    """Also if they go back to the event loop, which they share with all rows."""
    log = tmp_path / "log"
    kinds = ["fine", "exits", "raises", "returns", "waits"]
    reward = Reward(custom(tmp_path, ASYNC.replace("LOG", repr(str(log))), timeout_s=20.0))
    for responses in (kinds * 4, ["fine"]):
        result = reward(table(responses))
        assert (scores(result), errors(result)) == ([0.5] * len(responses), [None] * len(responses))
    pool.close()
    written = log.read_text().split()
    assert [written.count(kind) for kind in [*kinds, "served"]] == [10, 4, 8, 8, 8, 0]


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "raise ValueError('in the child')"])
def test_a_file_that_forks_as_it_is_imported(tmp_path: Path, end: str) -> None:
    source = f"import os, sys\nif os.fork() == 0:\n    {end}\ndef compute_score(**row):\n    return 0.5\n"
    result = Reward(custom(tmp_path, source))(table(["x"] * 3))
    assert (scores(result), errors(result)) == ([0.5] * 3, [None] * 3)


FORGING = """
import json, os, struct, sys
def send(*messages):
    for message in messages:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        os.write(int(sys.argv[2]), struct.pack("!i", len(body)) + body)
def compute_score(solution_str, **row):
    if solution_str == "again":
        send({"id": IDS[0] + 2, "answers": [[0.5, "{}", None]]}, {"id": IDS[0] + 2, "answers": [[99.0, "{}", None]]})
    elif solution_str == "others":
        send({"id": 10 ** 9, "answers": [[99.0, "{}", None]]}, {"id": -1, "answers": [[99.0, "{}", None]]})
    elif solution_str != "fine":
        send(eval(solution_str))
    return 0.5
IDS = [0]
"""


@pytest.fixture
def forging(tmp_path: Path) -> RewardConfig:
    """A function that writes to the connection of its worker."""
    return custom(tmp_path, FORGING, timeout_s=20.0)


def test_an_answer_to_another_call_or_a_second_one_changes_nothing(forging: RewardConfig) -> None:
    responses = ["fine", "others", "again", "fine", "fine"]
    result = Reward(forging)(table(responses))
    assert (scores(result), errors(result)) == ([0.5] * 5, [None] * 5)


@pytest.mark.parametrize(
    "message",
    [
        '{"refused": "all of it"}', '{"asynchronous": ["x"]}', "7", "[]", "{}", "None", '{"id": 1}', 'b"\\xff{"',
        '{"id": [], "answers": []}', '{"id": 1, "answers": []}', '{"id": 1, "answers": [[0.5, "{}"]]}',
        '{"id": 1, "answers": [["a", "{}", None]]}', '{"id": 1, "answers": [[0.5, "x", None]]}',
        '{"id": 1, "answers": [[0.5, "{}", 7]]}', '{"id": 1, "answers": [[1e999, "{}", None]]}',
        '{"id": 1, "answers": [[10 ** 400, "{}", None]]}', 'b"[" * 100000',
    ],
)  # fmt: skip
def test_what_is_no_answer_is_an_error_of_its_row(forging: RewardConfig, message: str) -> None:
    result = Reward(forging)(table(["fine", message, "fine"]))
    what = "WorkerError: the process of the reward function sent something that is not an answer"
    assert errors(result) == [None, what, None] and scores(result) == [0.5, 0.0, 0.5]


def test_a_sent_answer_is_a_score_with_parts_and_an_error() -> None:
    assert sent_answer([1, '{"a": 1}', None]) == (1.0, '{"a": 1}', None)
    for sent in ([1, "{}"], [True, {}, None], ["1", "{}", None], [1, "[]", None], [1, "{}", 0], 7):
        with pytest.raises((ValueError, TypeError)):
            sent_answer(sent)


@pytest.mark.parametrize(
    "start",
    [
        'daemon = subprocess.Popen(["sleep", "60"], start_new_session=True, close_fds=False).pid',
        "daemon = os.fork()\n        if daemon == 0: (os.setsid(), time.sleep(60))",
    ],
)
def test_a_daemon_holds_up_neither_its_row_nor_the_pool(tmp_path: Path, start: str) -> None:
    """It has left the worker's group, so nothing ends it with the worker."""
    file = tmp_path / "daemon"
    source = f"""
import os, subprocess, time
def compute_score(solution_str, **row):
    if solution_str != "fine":
        {start}
        open({str(file)!r}, "w").write(str(daemon))
        time.sleep(0.2)
        os._exit(3)
    return 0.5
"""
    reward = Reward(custom(tmp_path, source, timeout_s=60.0))
    reward(table(["fine"]))
    begun = time.monotonic()
    result = reward(table(["daemon", "fine"]))
    assert time.monotonic() - begun < 20
    assert errors(result) == ["WorkerError: the process of the reward function ended with exit code 3", None]
    daemon = int(file.read_text())
    held = [str(link.readlink()) for link in Path(f"/proc/{daemon}/fd").iterdir()]
    os.kill(daemon, signal.SIGKILL)
    assert held and not any(name.startswith("socket:") for name in held)
