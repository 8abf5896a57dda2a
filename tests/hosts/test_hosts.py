"""Two hosts made of network namespaces, and a run over them whose cable is pulled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.track.trajectories import Record
from tests.hosts.account import account
from tests.hosts.network import HOSTS, Network, missing
from tests.hosts.scenario import Scenario, Work, play
from tests.runs import BATCH, SAMPLES, tiny_settings

ITERATIONS = 12
SERVER = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("up", flush=True)
    while True:
        server.accept()[0].sendall(socket.gethostname().encode())
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=1) as connection:
    print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), connection.recv(99).decode())
"""


@pytest.fixture(scope="module")
def namespaces() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.mark.slow
def test_a_pulled_cable_is_silence_until_it_is_back(namespaces: None) -> None:
    name = f"slip-test-{os.getpid()}"
    with Network(name) as network:
        command = network.inside("b", [sys.executable, "-c", SERVER])
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None and server.stdout.readline() == b"up\n"

            def ask() -> subprocess.CompletedProcess[str]:
                command = network.inside("a", [sys.executable, "-c", CLIENT, HOSTS["b"]])
                return subprocess.run(command, capture_output=True, text=True, timeout=60)

            assert ask().stdout.split() == ["host-a", HOSTS["a"], "host-b"]
            network.cut()
            assert "TimeoutError" in ask().stderr
            network.mend()
            assert ask().returncode == 0
            assert list(network.processes("b")) == [server.pid] and not network.processes("a")
            network.kill("b")
            assert server.wait(timeout=10) < 0
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert name not in left


def test_a_prompt_that_an_epoch_lacks_is_found(tmp_path: Path) -> None:
    """What else can be missing or twice is tested in `tests/chaos`."""

    def record(iteration: int, prompts: list[str]) -> None:
        common = {"split": "train", "iteration": iteration, "chunk": iteration, "policy_version": iteration - 1}
        own = {"response_ids": [1], "score": 0.0}
        rows = [common | own | {"uid": prompt, "sample": sample} for prompt in prompts for sample in range(2)]
        Record(str(tmp_path))(pa.Table.from_pylist(rows))

    def found() -> list[str]:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"iteration": k}) + "\n" for k in range(3)))
        return account(tmp_path, 2, prompts=4, batch=2, samples=2)

    record(1, ["0-0", "0-3"])
    record(2, ["0-1", "0-2"])
    assert found() == []
    record(2, ["0-1", "1-2"])
    assert found() == ["epoch 0 has 3 prompts, not 4"]
    record(2, ["0-1"])
    assert len(found()) == 2


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_over_two_hosts_outlives_a_short_cut(
    namespaces: None, tmp_path: Path, tiny_model: Path, prompt_files: Any
) -> None:
    work = Work(tiny_settings(tmp_path, tiny_model, prompt_files), prompt_files.train_rows, BATCH, SAMPLES, ITERATIONS)
    outcome = play(Scenario("short", cut_s=5, unanswered=None, node_dies=False), work, tmp_path / "hosts", seed=1)
    assert outcome.problems == [], outcome.told()
    assert outcome.quiet_s > 0 and outcome.endings == []
