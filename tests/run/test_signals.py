import os
import signal
import subprocess
import sys
import time

import pytest

from pipeline.run.signals import STOPS, TOGETHER_S, exit_code, stops

LOOP = """
import signal, sys, time
from pipeline.run.signals import stops

try:
    with stops() as received:
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
    print("at once", *received, flush=True)
print("left", flush=True)
time.sleep(30)
"""


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("first", STOPS)
def test_the_first_signal_asks_to_stop_and_a_later_one_ends_at_once(first: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert said(process) == "ready"
            # `timeout` sends its signal to its child and to the child's group, which is one request.
            for number in (first, first, signal.SIGTERM):
                process.send_signal(number)
                time.sleep(0.05)
            assert said(process) == "stopping"
            time.sleep(TOGETHER_S)
            process.send_signal(signal.SIGTERM)
            assert said(process) == f"at once {int(first)} 15"
            assert said(process) == "left"
            # Afterwards a signal does what it did before.
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == -signal.SIGTERM
        finally:
            process.kill()


def test_ignored_signals_stay_ignored_and_other_handlers_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    own = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        with stops() as received:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and signal.getsignal(signal.SIGUSR1) is handler
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGUSR2)
                time.sleep(1)
        assert received == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGUSR1, own)


def test_the_exit_code_names_the_signal_that_interrupted() -> None:
    assert exit_code(130, [signal.SIGTERM, signal.SIGINT]) == 143
    assert exit_code(130, [signal.SIGHUP]) == 129
    assert exit_code(130, []) == 130
    # A run that had finished before the signal could end it.
    assert exit_code(0, [signal.SIGTERM]) == 0
