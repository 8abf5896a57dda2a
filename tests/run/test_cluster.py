import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import slipstream
from pipeline.run import cluster
from pipeline.run.cluster import ENV, HOOK, environment
from pipeline.upstream.ray_jobs import RayJobConfig

OWN = Path(__file__).resolve().parents[2]


def test_a_cluster_whose_token_is_not_here(tmp_path: Path) -> None:
    """In a process of its own: Ray reads mode and token once."""
    code = (
        "from pipeline.run import cluster\ntry: cluster.start(None, None, {})\nexcept ValueError as error: print(error)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    # Nothing listens there; the token is missed before anybody is asked.
    env |= {"HOME": str(tmp_path), "RAY_ADDRESS": "127.0.0.1:9", "RAY_AUTH_MODE": "token"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("Ray at 127.0.0.1:9 needs a token: set RAY_AUTH_MODE=token"), done.stderr
    assert not (tmp_path / ".ray").exists()


def test_workers_have_the_folders_of_the_python_path_by_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have another working folder than the command; the source that runs here comes first, the command's
    folder last."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"src:/lib::{OWN}")
    assert environment({"A": 1}) == {**ENV, "A": "1", "PYTHONPATH": f"{OWN}:{tmp_path}/src:/lib:{tmp_path}"}
    assert environment({"PYTHONPATH": "other"})["PYTHONPATH"] == f"{OWN}:{tmp_path}/other:{tmp_path}"
    monkeypatch.delenv("PYTHONPATH")
    assert environment({})["PYTHONPATH"] == f"{OWN}:{tmp_path}"


def test_workers_of_a_submitted_job_look_into_its_folder_after_slipstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "join", lambda address, options: given.append(options))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert cluster.start(None, None, {}) and given[0]["runtime_env"][HOOK] == "slipstream.own_first"
    assert isinstance(given[0]["job_config"], RayJobConfig)
    # A hook that the job came with is not replaced.
    os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = f'{{"runtime_env": {{"{HOOK}": "mine.begin"}}}}'
    assert cluster.start(None, None, {}) and HOOK not in given[1]["runtime_env"]


def test_own_packages_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/project", str(OWN), "/lib"])
    slipstream.own_first()
    assert sys.path == [str(OWN), "/project", "/lib"]
