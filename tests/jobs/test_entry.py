"""Commands that are asked to stop, and whose console goes away."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.__main__ import JOBS
from jobs.command import exit_code
from pipeline.errors import NotStarted

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "arguments",
    [["jobs.train", "--help"], ["slipstream", "sft", "--help"], ["jobs", "--help"], ["jobs.show", "nowhere"]],
)
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
        "import sys, time\nfrom jobs.command import exit_code\nfrom jobs.entry import command\n"
        "def work():\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "@command\ndef main() -> int:\n    return exit_code(work)\nsys.exit(main())"
    )
    for number, expected in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=60) == (b"", b"error: interrupted\n") and process.returncode == expected


def test_a_ray_that_does_not_start_is_a_failure_and_bad_input_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    def late() -> None:
        raise NotStarted("Ray did not start: late")

    def wrong() -> None:
        raise ValueError("RAY_ADDRESS=x: no cluster")

    # KubeRay tries a job again after 1, and not after 2.
    assert (exit_code(late), exit_code(wrong)) == (1, 2)
    assert capsys.readouterr().err == "error: Ray did not start: late\nerror: RAY_ADDRESS=x: no cluster\n"
