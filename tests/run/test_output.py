"""Consoles that go away while a command writes, in processes of their own."""

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

TALKS = """
import logging, sys, time, warnings
from rich.console import Console
from pipeline.run.output import lasting
with lasting():
    logging.basicConfig()
    print("first", flush=True)
    time.sleep(float(sys.argv[2]))
    for number in range(500):
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
