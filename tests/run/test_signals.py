import signal
import subprocess
import sys
import time

import pytest

LOOP = """
import signal, sys, time
from pipeline.run.signals import sigterm_as_ctrl_c

# As `ray.init` does.
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
try:
    with sigterm_as_ctrl_c():
        interrupted = False
        for iteration in range(300):
            try:
                if iteration == 0:
                    print("ready", flush=True)
                time.sleep(0.1)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                print("stopping", flush=True)
except KeyboardInterrupt:
    print("at once", flush=True)
if sys.argv[1:] == ["after"]:
    print("left", flush=True)
    time.sleep(30)
sys.exit(130)
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", LOOP, *arguments], stdout=subprocess.PIPE, text=True)
    assert line(process) == "ready"
    return process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_the_first_sigterm_asks_to_stop_and_the_second_ends_at_once(first: signal.Signals) -> None:
    process = started()
    try:
        process.send_signal(first)
        assert line(process) == "stopping"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "at once"
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.wait()


def test_afterwards_sigterm_does_what_it_did_before() -> None:
    process = started("after")
    try:
        for expected in ("stopping", "at once"):
            process.send_signal(signal.SIGTERM)
            assert line(process) == expected
        assert line(process) == "left"
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == signal.SIGTERM
        assert time.monotonic() - begun < 5
    finally:
        process.kill()
        process.wait()
