"""SGLang's real server on a CPU, with the stand-in for its kernels (`requirements/sgl_kernel`), against the trainer.

Its environment is made by `make sglang-env`. What no kernel of a GPU computes is tested here: its scheduler, prefix
cache, HTTP interface, labels of versions and loaders of weights.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import Config
from tests.conftest import ROOT
from tests.rollout.engines import place
from tests.rollout.engines.place import Engine, greedy, in_flight, overlapping, refused, updates

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]


def open_sglang(folder: str) -> int:
    def change(config: Config) -> None:
        config.rollout.name, config.rollout.seed_per_request = "sglang", False
        config.rollout.engine_python = str(ROOT / ".venv-sglang/bin/python")
        config.trainer.default_local_dir = folder

    Path(folder, "run").mkdir()
    place.place = place.Place(True, folder, change)
    return os.getpid()


def server_pid() -> int:
    return place.place.rollout.engine.call(lambda engine: engine.server.pid).result(10)


def without_salt() -> dict[str, object]:
    """Two versions, with one salt for both."""
    from pipeline.rollout.engines.sglang import engine

    body = engine.body
    engine.body = lambda *args: body(*args) | {"cache_salt": "one"}
    try:
        return updates(1.0)
    finally:
        engine.body = body


def answer_after_the_servers_death() -> str:
    """Kill the server while it generates; returns what the loop says."""
    loop = place.place.rollout.engine
    asked = place.place.rollout._requests(place.place.chunk(0, count=16))
    future = loop.submit(asked)
    os.kill(server_pid(), signal.SIGKILL)
    error = future.exception(60)
    return f"{type(error).__name__}: {error}"


def group(pid: int) -> list[str]:
    """Processes of the server's process group."""
    found = subprocess.run(["ps", "-eo", "pgid=,pid=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if line.split()[0] == str(pid)]


def gone(pid: int) -> bool:
    end = time.monotonic() + 30
    while group(pid) and time.monotonic() < end:
        time.sleep(0.2)
    return not [line for line in group(pid) if "<defunct>" not in line]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    running = Engine(open_sglang, str(tmp_path_factory.mktemp("sglang")))
    yield running
    running.close()


def test_log_probs_are_the_trainers_after_every_update(engine: Engine) -> None:
    for temperature in (1.0, 0.7):
        found = engine(updates, temperature)
        assert all(seen == {version} for version, seen in found["versions"])
        assert max(found["gaps"]) < 1e-5 and min(found["stale"]) > 0.1, found


def test_greedy_validation_and_overlapping_versions(engine: Engine) -> None:
    found = engine(greedy)
    assert found["rows"] == 4 and found["gap"] < 1e-5 and found["regret"] < 1e-5 and found["same"]
    found = engine(overlapping)
    assert found["versions"] == found["wanted"] and max(found["gaps"]) < 1e-4


@pytest.mark.parametrize(("damaged", "words"), [(True, "arrived damaged"), (False, "model.norm.weight: not published")])
def test_wrong_weights_are_refused(engine: Engine, damaged: bool, words: str) -> None:
    said = engine(refused, damaged)
    assert words in said and said.endswith("afterwards True")


@pytest.mark.parametrize("update_kv", ["recompute", "keep"])
def test_updates_in_flight(engine: Engine, update_kv: str) -> None:
    found = engine(in_flight, update_kv)
    assert [[run["version"] for run in row] for row in found["old"]] == [[found["first"], found["second"]]] * 16
    gaps = found["gaps"]
    assert max(gaps["old 0"], gaps["new 1"]) < 1e-4
    assert (gaps["old 1"] < 1e-4) == (update_kv == "recompute"), "the kept KV is that of the old weights"


def test_without_the_salt_old_prompts_are_found(engine: Engine) -> None:
    """Else the cases above would say nothing about the prefix cache."""
    assert max(engine(without_salt)["gaps"]) > 1e-2


def test_the_end_of_the_server_is_the_end_of_the_engine(engine: Engine) -> None:
    """The last case with this engine."""
    pid = engine(server_pid)
    said = engine(answer_after_the_servers_death)
    assert said.startswith("EngineDead: the rollout engine died: EngineDead: the SGLang server (process ") and gone(pid)


def test_kill_9_of_the_actor_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    code = (
        "import sys, time; from tests.rollout.engines.sglang import test_server as t; "
        f"t.open_sglang({str(tmp_path / 'model')!r}); print(t.server_pid(), flush=True); time.sleep(600)"
    )
    actor = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert actor.stdout is not None
    pid = int(next(line for line in actor.stdout if line.strip().isdigit()))
    assert group(pid)
    actor.kill()
    actor.wait()
    assert gone(pid)
