"""Clusters that are gone, folders that Ray cannot use, and a first start that fails."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from pipeline.errors import NotStarted
from pipeline.run import begin
from pipeline.upstream import apart


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """A port that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen(64)
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:9", "Connection refused"),
        ("no-such-host.invalid:6379", "(Name|Temporary|No address)"),
        ("head", "an address is HOST:PORT or auto"),
        (":6379", "an address is HOST:PORT or auto"),
        ("head:port", "an address is HOST:PORT or auto"),
        ("127.0.0.1:99999", "an address is HOST:PORT or auto"),
    ],
)
def test_an_address_where_nothing_answers(address: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(begin, "REACH_S", 0.1)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("nothing is asked to join"))
    with pytest.raises(ValueError, match=rf"^RAY_ADDRESS={address}: .*{reason}.*unset RAY_ADDRESS to start a Ray on"):
        begin.join(address, {})


def test_auto_without_a_cluster_or_with_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(begin, "REACH_S", 0.1)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("nothing is asked to join"))

    def none(address: str) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(apart.services, "canonicalize_bootstrap_address", none)
    with pytest.raises(ValueError, match=r"^RAY_ADDRESS=auto: .*Could not find any running Ray"):
        begin.join("auto", {})
    # As the file of a head that was killed says.
    monkeypatch.setattr(apart.services, "canonicalize_bootstrap_address", lambda address: "127.0.0.1:9")
    with pytest.raises(ValueError, match=r"^RAY_ADDRESS=auto: .*Connection refused"):
        begin.join("auto", {})


def test_a_cluster_that_refuses_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch(**options: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1.0\n    Python: 3.9.0")

    monkeypatch.setattr(ray, "init", mismatch)
    with (
        silent() as address,
        pytest.raises(NotStarted, match="the cluster refuses this driver: Version .* Python: 3.9.0"),
    ):
        begin.join(address, {})


def test_a_cluster_that_never_answers() -> None:
    """In a process of its own, which the deadline ends."""
    code = "import sys\nfrom pipeline.run import begin\nbegin.JOIN_S = 2.0\nbegin.join(sys.argv[1], {})"
    with silent() as address:
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and time.monotonic() - began < 100
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"error: RAY_ADDRESS={address}: no answer to this driver for 2 s")
    assert said.endswith("or unset RAY_ADDRESS to start a Ray on this machine")


def test_folders_that_ray_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for folder, why in (
        ("/tmp/" + "x" * 115, "has 120 bytes; Ray's sockets lie in it"),
        ("/tmp/" + "数" * 20, "has 65 bytes"),
        ("relative", "is not an absolute path"),
        ("/etc/passwd", "Ray cannot write there"),
        ("/proc/none", "Ray cannot write there"),
    ):
        for name in ("TMPDIR", "RAY_TMPDIR"):
            with monkeypatch.context() as patch:
                # Python's own temporary folder stays.
                patch.setenv(name, folder)
                with pytest.raises(ValueError, match=f"^{name}={folder}") as raised:
                    begin.check_folder()
            assert why in str(raised.value) and str(raised.value).endswith(f"export {name}=/tmp")
    monkeypatch.setenv("TMPDIR", "/tmp")
    begin.check_folder()
    monkeypatch.setattr(begin, "NEEDED", 2**80)
    with pytest.raises(ValueError, match=r"TMPDIR=/tmp has \d+ MiB free"):
        begin.check_folder()


def test_the_longest_folder_is_the_longest_that_ray_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import datetime

    from ray._private.utils import validate_socket_filepath

    monkeypatch.setattr(Path, "mkdir", lambda *args, **kwargs: pytest.fail("the length is looked at first"))
    name = f"session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{os.getpid()}"
    for length in range(20, 80):
        folder = "/" + "x" * (length - 1)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        try:
            validate_socket_filepath(f"{folder}/ray/{name}/sockets/plasma_store")
        except OSError:
            with pytest.raises(ValueError, match="Ray's sockets"):
                begin.check_folder()
        else:
            with pytest.raises(pytest.fail.Exception):
                begin.check_folder()


def test_a_start_that_fails_once_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = Exception("The current node timed out during startup.\nIt says more.")
    tries: list[Any] = [late, None]

    def init(**options: Any) -> None:
        # What a start that fails leaves behind.
        left.append(apart.services.ConsolePopen(["sleep", "600"]))
        if (error := tries.pop(0)) is not None:
            raise error

    left: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    begin.start_here({})
    said = "Ray did not start (The current node timed out during startup. It says more.); trying once more\n"
    assert capsys.readouterr().err == said
    assert [process.poll() for process in left] == [-9, None]
    tries[:] = [late, late]
    with pytest.raises(NotStarted, match=r"timed out during startup.*load is \d+ on \d+ CPUs.*same command again"):
        begin.start_here({})
    assert [process.poll() for process in left[2:]] == [-9, -9]
    left[1].kill()
    left[1].wait()
    # A setting that Ray refuses is refused again.
    tries[:] = [ValueError("The configured object store size exceeds /dev/shm size")]
    with pytest.raises(ValueError, match="object store"):
        begin.start_here({})
    assert not apart.processes


def test_a_start_that_hangs_is_ended() -> None:
    code = (
        "import time, ray\nfrom pipeline.run import begin\nbegin.START_S = 0.5\n"
        "ray.init = lambda **options: time.sleep(60)\nbegin.start_here({})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: Ray has not started for 0 s;")


WATCHED = """
import sys, time, ray
from pipeline.run import begin; from pipeline.upstream import apart
begin.LOOK_S, begin.GONE_S = 0.05, 0.2
ends, shut = float("inf"), time.monotonic() + 0.1
ray.is_initialized = lambda: True
if sys.argv[1] == "gone":
    apart.dead = lambda: "gcs_server" if time.monotonic() > ends else None
if sys.argv[1] == "shut down":
    # As `ray.shutdown` ends its processes.
    apart.dead = lambda: "raylet"
    ray.is_initialized = lambda: time.monotonic() < shut
ray.init = lambda **options: None
begin.start_here({})
print("working", flush=True)
ends = 0.0
time.sleep(60 if sys.argv[1] == "gone" else 2)
"""


@pytest.mark.parametrize(("way", "code"), [("gone", 1), ("shut down", 0), ("alive", 0)])
def test_a_ray_that_is_gone_ends_a_command_that_waits_for_it(way: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED, way], capture_output=True, text=True, timeout=100)
    assert done.returncode == code and done.stdout == "working\n"
    assert ("error: Ray is gone: its gcs_server has ended" in done.stderr) == (way == "gone"), done.stderr
