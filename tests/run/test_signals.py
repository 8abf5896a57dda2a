import signal
import subprocess
import sys

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
print("left", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_the_first_sigterm_asks_to_stop_and_the_second_ends_at_once(first: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for number, expected in ((None, "ready"), (first, "stopping"), (signal.SIGTERM, "at once")):
                if number is not None:
                    process.send_signal(number)
                assert process.stdout.readline().strip() == expected
            assert process.stdout.readline().strip() == "left"
            # Afterwards SIGTERM does what it did before.
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == signal.SIGTERM
        finally:
            process.kill()
