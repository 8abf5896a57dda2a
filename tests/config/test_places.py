"""Paths in settings, named from the root."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.config.places import KINDS, file, files, name_from_root
from pipeline.config.preference import DPOConfig
from pipeline.config.schema import keys
from pipeline.config.supervised import PreferenceConfig, SFTConfig, SupervisedTrainerConfig


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder `project`, with a link to another disk, and a home folder."""
    for folder in ("project/runs/a", "project/model", "disk/inside", "disk/model", "home/model"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "project" / "link").symlink_to(tmp_path / "disk" / "inside")
    (tmp_path / "disk" / "blob").write_text("")
    (tmp_path / "project" / "train.parquet").symlink_to(tmp_path / "disk" / "blob")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def kind_of(owner: type, key: str) -> str | None:
    """The kind of path that a setting declares."""
    fields = {item.name: item for item in dataclasses.fields(owner)}
    return fields[key.rpartition(".")[2]].metadata.get("path")


PATHS = {name: kind for name, key in keys(Config).items() if (kind := kind_of(key.owner, name))}
SPELLED = {
    "model": "project/model",
    "./model/": "project/model",
    "../project/model": "project/model",
    "link/../model": "disk/model",
    "~/model": "home/model",
    "file://HERE/project/model": "project/model",
    "file://localhostHERE/project/model": "project/model",
    "file:HERE/project/runs/../model/": "project/model",
}
"""One folder each, as it may be written."""


@pytest.mark.parametrize("text", SPELLED)
@pytest.mark.parametrize("key", [*(key for key, kind in PATHS.items() if kind in ("model", "files", "resume")), "out"])
def test_a_path_may_be_written_in_any_way(here: Path, text: str, key: str) -> None:
    config: Any = SFTConfig() if key == "out" else Config()
    section, _, name = key.rpartition(".")
    owner = config
    for part in filter(None, section.split(".")):
        owner = getattr(owner, part)
    setattr(owner, name, text.replace("HERE", str(here)))
    name_from_root(config)
    assert getattr(owner, name) == f"{here}/{SPELLED[text]}"


def test_names_and_urls_stay(here: Path) -> None:
    config = Config()
    config.model.path, config.critic.path, config.scoring.reference.path = "owner/model", "gpt2", None
    config.data.train_files = ["s3://bucket/a.parquet", "hf://datasets/x", "runs/*.parquet", "train.parquet"]
    config.trainer.storage_path, config.trainer.resume = "s3://bucket/runs", "auto"
    name_from_root(config)
    assert (config.model.path, config.critic.path, config.scoring.reference.path) == ("owner/model", "gpt2", None)
    # The name of a link says what the file is.
    inside = [f"{here}/project/{name}" for name in ("runs/*.parquet", "train.parquet")]
    assert config.data.train_files == ["s3://bucket/a.parquet", "hf://datasets/x", *inside]
    assert (config.trainer.storage_path, config.trainer.resume) == ("s3://bucket/runs", "auto")
    config.trainer.resume = "never"
    name_from_root(config)
    assert config.trainer.resume == "never"
    assert files(None) is None and files("file://host/a") == "file://host/a"
    assert file("/") == "/" and file("..") == str(here) and files("file:///a%20b") == "/a b"


def test_every_setting_that_holds_a_path_is_known() -> None:
    """Its name says so."""
    named = re.compile(r"(^|[._])(path|dir|files|out|run|resume)$")
    for schema in (Config, SFTConfig, PreferenceConfig, DPOConfig):
        for name, key in keys(schema).items():
            # Supervised jobs do not begin from another run, so their `trainer.resume` takes only words.
            if named.search(name) and key.owner is not SupervisedTrainerConfig:
                assert kind_of(key.owner, name), name
    assert set(PATHS.values()) == set(KINDS), "a kind that no setting has"


def test_code_of_rewards_is_named_from_the_root(here: Path) -> None:
    config = Config()
    config.reward.custom_reward_function.path = "~/reward.py"
    config.reward.functions = {
        "a": {"path": "link/../a.py", "weight": 2},
        "b": {"path": "package.module"},
        "c": {"path": f"file://{here}/c.py"},
        "d": {"name": "f"},
    }
    name_from_root(config)
    assert config.reward.custom_reward_function.path == f"{here}/home/reward.py"
    assert config.reward.functions == {
        "a": {"path": f"{here}/disk/a.py", "weight": 2},
        "b": {"path": "package.module"},
        "c": {"path": f"{here}/c.py"},
        "d": {"name": "f"},
    }


def test_code_of_algorithms_is_named_from_the_root(here: Path) -> None:
    config = Config()
    config.algorithm.adv_estimator, config.actor.policy_loss.loss_mode = "mine.py:best", "package.module:loss"
    config.data.sampler, config.data.generator = "link/../sampler.py:Mine", "./made.py:Made"
    name_from_root(config)
    assert config.algorithm.adv_estimator == f"{here}/project/mine.py:best"
    assert config.actor.policy_loss.loss_mode == "package.module:loss"
    assert config.data.sampler == f"{here}/disk/sampler.py:Mine"
    assert config.data.generator == f"{here}/project/made.py:Made"


def test_code_of_episodes_is_named_from_the_root(here: Path) -> None:
    """Workers have another working directory; the link of a virtual environment's interpreter is kept."""
    tmp_path = here / "project"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    config = Config()
    config.agent.environment, config.agent.python = "my_game.py:Game", "bin/python"
    config.agent.program = "my_program.py:run"
    (tmp_path / "my_agent.py").touch()
    config.agent.command = ["python", "my_agent.py", "gone.py", "--fast"]
    config.agent.tools = ["my_tools:calc", "sub/tools.py:calc", "tools.py", "tools.yaml", "/code/tools.py"]
    config.agent.named = {"other": {"environment": "other.py:Game", "max_turns": 3}}
    name_from_root(config)
    assert config.agent.named == {"other": {"environment": f"{tmp_path}/other.py:Game", "max_turns": 3}}
    assert config.agent.environment == f"{tmp_path}/my_game.py:Game"
    assert config.agent.program == f"{tmp_path}/my_program.py:run"
    assert config.agent.command == ["python", f"{tmp_path}/my_agent.py", "gone.py", "--fast"]
    assert config.agent.python == f"{tmp_path}/bin/python"
    inside = [f"{tmp_path}/{name}" for name in ("sub/tools.py:calc", "tools.py", "tools.yaml")]
    assert config.agent.tools == ["my_tools:calc", *inside, "/code/tools.py"]
    config.agent.environment, config.agent.python = "my_game:Game", "python3.12"
    config.agent.tools = [
        "mcp: python my_agent.py 'a b' gone.py",
        "mcp: gone gone.py",
        "mcp: https://x.y/z.py",
        "mcp: '",
    ]
    same = list(config.agent.tools[1:])
    name_from_root(config)
    assert (config.agent.environment, config.agent.python) == ("my_game:Game", "python3.12")
    assert config.agent.tools == [f"mcp: python {tmp_path}/my_agent.py 'a b' gone.py", *same]
    config.agent.environment = "openenv:ws://localhost/my.py"
    name_from_root(config)
    assert config.agent.environment == "openenv:ws://localhost/my.py"
