"""Ray's processes, started apart from the group of the driver."""

import os
import signal
import subprocess
import sys
import time

import pytest
from ray._private import services, utils

from pipeline.upstream import apart


def test_processes_of_ray_have_sessions_of_their_own() -> None:
    before = services.ConsolePopen, utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    with apart.apart():
        info = services.start_ray_process(["sleep", "600"], "raylet", fate_share=True)
        utils.set_sigterm_handler(lambda number, frame: sys.exit(number))
    assert (services.ConsolePopen, utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)) == before
    number = info.process.pid
    assert os.getsid(number) == os.getpgid(number) == number != os.getsid(0)
    apart.end()
    assert info.process.poll() == -signal.SIGKILL and not apart.processes


def test_processes_of_ray_die_with_the_driver() -> None:
    code = (
        "import time\nfrom ray._private import services\nfrom pipeline.upstream import apart\n"
        "with apart.apart():\n    info = services.start_ray_process(['sleep', '600'], 'raylet', fate_share=True)\n"
        "print(info.process.pid, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        number = int(driver.stdout.readline())
        driver.kill()
    for _ in range(100):
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the process outlived its driver")


def test_which_of_rays_processes_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with apart.apart():
        monitor = services.ConsolePopen(["true"])
        raylet = services.ConsolePopen(["raylet", "600"], executable="/bin/sleep")
    monitor.wait()
    # Nothing depends on others than GCS and raylet.
    assert apart.dead() is None
    raylet.kill()
    raylet.wait()
    assert apart.dead() == "raylet"
    apart.end()
    assert apart.dead() is None


def test_another_ray_starts_as_it_does_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(services, apart.CLASS)
    handler = utils.set_sigterm_handler
    with apart.apart():
        assert utils.set_sigterm_handler is handler and not hasattr(services, apart.CLASS)
    assert "ends with the first signal to the run's process group" in capsys.readouterr().err


def test_sigterm_keeps_its_handler_though_ray_replaces_it_in_c() -> None:
    code = (
        "import ctypes, os, signal, time\nfrom pipeline.upstream import apart\nfrom pipeline.run.signals import stops\n"
        "with stops() as received:\n    with apart.apart():\n"
        "        ctypes.CDLL(None).signal(signal.SIGTERM, None)\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGTERM)\n        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n        print(*received)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "15\n"), done.stderr
