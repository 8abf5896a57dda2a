"""A real MLflow server that is killed in the middle of a run and comes back."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.track.history import read_history
from pipeline.track.loggers import TrackedRun
from pipeline.track.tracker import Tracker
from tests.track.conversations import episode, write

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(240)]


class Server:
    """`mlflow server` on a port of this machine."""

    def __init__(self, folder: Path):
        self._folder = folder
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self._port = one.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        command += ["--artifacts-destination", f"{self._folder}/artifacts"]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return
            except OSError:
                assert self._process.poll() is None, (self._folder / "server.log").read_text()
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.2)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    made.start()
    yield made
    made.kill()


def test_what_was_logged_while_the_server_was_down_arrives_later(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    tracker = Tracker(TrackedRun(tmp_path / "run", {"a": 1}, "p", "n"), 6, ["mlflow"], flush_timeout_s=90.0)
    tracker.start()
    client = MlflowClient(server.url)

    def points() -> list[tuple[int, float]]:
        run_id = (tmp_path / "run" / "mlflow_run_id").read_text().strip()
        return [(point.step, point.value) for point in client.get_metric_history(run_id, "critic/score/mean")]

    for iteration in (1, 2):
        write(tmp_path / "run", episode(iteration=iteration))
        tracker.log(iteration, {"critic/score/mean": iteration / 10})
        tracker.traces("train", iteration, 1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "mlflow_run_id").is_file() or len(points()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    server.kill()
    begun = time.monotonic()
    for iteration in (3, 4, 5):
        write(tmp_path / "run", episode(iteration=iteration))
        tracker.log(iteration, {"critic/score/mean": iteration / 10})
        tracker.traces("train", iteration, 1)
    assert time.monotonic() - begun < 30, "a run does not wait for its tracker"
    time.sleep(1.5)
    server.start()
    tracker.log(6, {"critic/score/mean": 0.6})
    assert tracker.finish("finished") == []
    traces = client.search_traces(locations=[client.get_experiment_by_name("p").experiment_id])
    assert sorted(trace.info.tags["iteration"] for trace in traces) == ["1", "2", "3", "4", "5"]
    assert {len(trace.data.spans) for trace in traces} == {7}
    assert points() == [(iteration, pytest.approx(iteration / 10)) for iteration in range(1, 7)]
    assert [record["iteration"] for record in read_history(tracker.metrics_path)] == [1, 2, 3, 4, 5, 6]
