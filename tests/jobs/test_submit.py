"""`ray job submit` to a head of its own, which asks for a token: submit, read, stop, go on."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import heads
from tests.heads import Head, executable
from tests.runs import tiny_settings

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ("python", "-m", "jobs.train")
Ray = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A running head; what the page exports, and its token, are in this process's environment."""
    with heads.head(cpus=8) as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.env.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture(scope="module")
def ray_job(head: Head) -> Ray:
    """The command line `ray job ...` as a user with the token calls it."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [executable("ray"), "job", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)

    return call


@pytest.fixture
def settings(tmp_path: Path, tiny_model: Path, prompt_files: Any) -> list[str]:
    return [*tiny_settings(tmp_path, tiny_model, prompt_files), "trainer.experiment_name=submitted"]


def submit(ray_job: Ray, name: str, *command: str) -> None:
    # A variable that the run sets, too: Ray would refuse to join the two.
    runtime_env = json.dumps({"env_vars": {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}})
    options = ("--no-wait", "--submission-id", name, "--working-dir", ".", "--runtime-env-json", runtime_env)
    done = ray_job("submit", *options, "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr


def wait(ray_job: Ray, name: str, until: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, ray_job("logs", name).stdout
        time.sleep(1)


def asked(head: Head, job: str, token: str | None = None) -> Any:
    """What the job server says of a job, or of all where `job` is empty; `ray job` formats it for a terminal."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{head.address}/api/jobs/{job}", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def status(head: Head, name: str) -> str:
    return asked(head, name, os.environ["RAY_AUTH_TOKEN"])["status"]


@pytest.mark.long
def test_submit_stop_and_submit_again(ray_job: Ray, head: Head, tmp_path: Path, settings: list[str]) -> None:
    folder = tmp_path / "runs" / "submitted"
    metrics = folder / "metrics.jsonl"

    def ended(name: str) -> bool:
        return status(head, name) not in ("RUNNING", "PENDING")

    def iterated() -> bool:
        assert not ended("first"), ray_job("logs", "first").stdout
        return metrics.is_file() and "\n" in metrics.read_text()

    quiet = ("trainer.test_freq=-1", "trainer.val_before_train=false")
    submit(ray_job, "first", *TRAIN, *settings, *quiet, "trainer.total_training_steps=1000")
    wait(ray_job, "first", iterated)
    ray_job("stop", "first")
    wait(ray_job, "first", lambda: ended("first"))
    assert status(head, "first") == "STOPPED"
    printed = ray_job("logs", "first").stdout
    for part in ("1/1000", "stopping after this iteration", "submitted: interrupted", "to continue"):
        assert part in printed, printed
    assert "Traceback" not in printed, printed
    last = [json.loads(line)["iteration"] for line in metrics.read_text().splitlines()][-1]
    assert [path.name for path in (folder / "checkpoints").glob("iteration_*")] == [f"iteration_{last:06d}"]
    assert (folder / "model" / "config.json").is_file()

    submit(ray_job, "second", *TRAIN, *settings, *quiet, f"trainer.total_training_steps={last + 2}")
    wait(ray_job, "second", lambda: ended("second"))
    assert status(head, "second") == "SUCCEEDED", ray_job("logs", "second").stdout
    iterations = [json.loads(line)["iteration"] for line in metrics.read_text().splitlines()]
    assert iterations == list(range(1, last + 3))


def test_a_relative_run_folder_is_refused_and_a_rayjob_not_retried(
    ray_job: Ray, head: Head, settings: list[str]
) -> None:
    submit(ray_job, "relative", "python", "-m", "jobs.kuberay.train", *settings, "trainer.default_local_dir=runs")
    # KubeRay would retry a job that is FAILED.
    wait(ray_job, "relative", lambda: status(head, "relative") == "STOPPED")
    printed = ray_job("logs", "relative").stdout
    assert "lies in this node's copy of the uploaded working directory" in printed, printed
    assert "Traceback" not in printed, printed


def test_without_the_token_nobody_is_let_in(head: Head) -> None:
    assert isinstance(asked(head, "", os.environ["RAY_AUTH_TOKEN"]), list)
    for token, code in ((None, 401), ("0" * 64, 403)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            asked(head, "", token)
        assert refused.value.code == code
