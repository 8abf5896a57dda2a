"""Consoles that go away while a command writes, in processes of their own."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.__main__ import JOBS

ROOT = Path(__file__).resolve().parents[2]

TALKS = """
import logging, sys, time, warnings
from rich.console import Console
from pipeline.run.output import lasting
with lasting():
    logging.basicConfig()
    print("first", flush=True)
    time.sleep(float(sys.argv[2]))
    for number in range(2000):
        print("line", number)
        print("line", number, file=sys.stderr, flush=True)
        Console().print("[bold]rich[/]", number)
        sys.stdout.writelines(["more\\n"])
        logging.warning("a warning")
    warnings.warn("another")
    print("last", flush=True)
    open(sys.argv[1], "w").write("done")
sys.exit(7)
"""


def talk(folder: Path, wait: float, **streams: Any) -> "tuple[subprocess.Popen[bytes], Path]":
    done = folder / "done"
    command = [sys.executable, "-c", TALKS, str(done), str(wait)]
    return subprocess.Popen(command, **streams), done


def test_a_reader_that_ends(tmp_path: Path) -> None:
    process, done = talk(tmp_path, 0.0, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    process.stdout.close()
    assert process.wait(60) == 7 and done.read_text() == "done"


def test_a_terminal_that_closes(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    process, done = talk(tmp_path, 1.0, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    assert os.read(leader, 5) == b"first"
    os.close(leader)
    assert process.wait(60) == 7 and done.read_text() == "done"


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        process, done = talk(tmp_path, 0.0, stdout=full, stderr=subprocess.PIPE)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 7 and done.read_text() == "done"
    assert said.decode().splitlines()[-1] == "standard output is incomplete: No space left on device"
    with open("/dev/full", "w") as full:
        process, done = talk(tmp_path, 0.0, stdout=full, stderr=full)
        assert process.wait(60) == 7


def test_streams_that_were_closed_at_the_start(tmp_path: Path) -> None:
    done = tmp_path / "done"
    shell = f'exec "{sys.executable}" -c "$CODE" {done} 0 >&- 2>&-'
    assert subprocess.run(["sh", "-c", shell], env={**os.environ, "CODE": TALKS}, timeout=60).returncode == 7
    assert done.read_text() == "done"


@pytest.mark.parametrize("arguments", [["jobs.train", "--help"], ["jobs", "--help"], ["jobs.show", "nowhere"]])
def test_a_command_whose_reader_is_gone_ends_without_a_traceback(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        done = subprocess.run([sys.executable, "-m", *arguments], stdout=gone, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == (2 if "nowhere" in arguments else 0)
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr


def test_every_job_is_a_command() -> None:
    """Each `main` stops at a signal with its exit code, and writes to a console that may go."""
    for job in ["__main__", "supervised", *JOBS]:
        path = ROOT / "jobs" / ("prepare/__main__.py" if job == "prepare" else f"{job}.py")
        text = path.read_text()
        assert re.search(r"^ *@command\n *def main\(", text, re.MULTILINE) or "JOB.main" in text, path


def test_a_command_that_a_signal_interrupts_ends_with_its_code() -> None:
    code = (
        "import sys, time\nfrom jobs.entry import command\n"
        "@command\ndef main() -> int:\n    print('ready', flush=True); time.sleep(60); return 0\nsys.exit(main())"
    )
    for number, expected in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=60) == (b"", b"") and process.returncode == expected
