"""Which files count as those that a run reads, by setting."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import Config, load_config
from pipeline.run.inputs import code_files, fingerprints, model_marks, prompt_marks

TOOLS = "tools:\n  - class_name: yours.Tool\n    config: {type: native}\n    tool_schema: {}\n"


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def rows(path: Path, *values: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": values}), path)


def code(*settings: str) -> dict[str, list[str]]:
    return {key: [name for name, _, _ in files] for key, files in code_files(load_config(list(settings))) if files}


def test_a_models_folder(tmp_path: Path) -> None:
    read = ["config.json", "chat_template.jinja", "model-00001-of-00002.safetensors", "modeling_mine.py", "vocab.txt"]
    touch(tmp_path, *read, "additional_chat_templates/tool.jinja", "README.md", ".gitattributes", "original/x.pth")
    found = model_marks(str(tmp_path))
    assert sorted(found) == sorted([*read, "additional_chat_templates/tool.jinja"])


def test_all_models_of_the_settings_count(tmp_path: Path) -> None:
    keys = ("model.path", "model.tokenizer_path", "model.lora.path", "critic.path", "scoring.reference.path")
    keys = (*keys, "reward.model.path")
    for key in keys:
        touch(tmp_path / key, "config.json")
    config = load_config([f"{key}={tmp_path}/{key}" for key in keys])
    assert set(fingerprints(config).model) == set(keys)
    # One that is not set is none that has changed.
    assert fingerprints(load_config([])).model == {}


def test_a_model_on_the_hub_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached: dict[str, Any] = {"tokenizer_config.json": f"{tmp_path}/models--o--m/snapshots/abc/tokenizer_config.json"}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: cached.get(file))
    assert model_marks("o/m") == {"commit": "abc"}
    cached.clear()
    assert model_marks("o/m") == {}
    # That a file is known not to exist says nothing.
    cached["config.json"] = object()
    assert model_marks("o/m") == {}


def test_names_that_the_hub_does_not_allow(tmp_path: Path) -> None:
    assert model_marks("/no/such/folder") == {}


@pytest.mark.parametrize("form", ["{}", "{}/*.parquet", "[{}/a.parquet,{}/sub/b.parquet]"])
def test_prompt_files_by_folder_glob_and_list(tmp_path: Path, form: str) -> None:
    rows(tmp_path / "a.parquet", 1)
    rows(tmp_path / "sub" / "b.parquet", 2)
    config = load_config([f"data.val_files={form.replace('{}', str(tmp_path))}"])
    found = prompt_marks(config)["data.val_files"]
    assert list(found) == (["a.parquet"] if "*" in form else ["a.parquet", "sub/b.parquet"])
    rows(tmp_path / "c.parquet", 3)
    assert ("c.parquet" in prompt_marks(config)["data.val_files"]) == ("[" not in form)


def test_prompt_files_in_a_store(tmp_path: Path) -> None:
    rows(tmp_path / "a.parquet", 1)
    there = prompt_marks(load_config([f"data.train_files=file://{tmp_path}/a.parquet"]))
    assert there == prompt_marks(load_config([f"data.train_files={tmp_path}/a.parquet"]))
    assert list(there["data.train_files"]) == ["a.parquet"]


def test_the_recorded_rows_of_a_replay(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        rows(tmp_path / "trajectories" / f"iteration={number:06d}" / "chunk-000000.parquet", number)
    run = f"data.recorded_run={tmp_path}"
    assert len(prompt_marks(load_config([run]))["data.recorded_run"]) == 3
    found = prompt_marks(load_config([run, "data.recorded_iterations=2-3"]))["data.recorded_run"]
    assert list(found) == [f"trajectories/iteration=00000{number}/chunk-000000.parquet" for number in (2, 3)]


def test_code_that_settings_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "reward.py",
        "game.py",
        "tool.py",
        "program.py",
        "agent.py",
        "server.py",
        "sampler.py",
        "loss.py",
        "yours.py",
    )
    for name in names:
        (tmp_path / name).write_text("import helpers\n")
    (tmp_path / "tools.yaml").write_text(TOOLS)
    touch(tmp_path, "helpers.py", "prompt.txt", "start.sh")
    monkeypatch.chdir(tmp_path)
    helpers = "helpers.py"
    assert code(f"reward.custom_reward_function.path={tmp_path}/reward.py") == {
        "reward.custom_reward_function.path": ["reward.py", helpers]
    }
    assert code(f"reward.functions.a.path={tmp_path}/reward.py", "reward.functions.b.path=yours") == {
        "reward.functions.a.path": ["reward.py", helpers],
        "reward.functions.b.path": ["yours.py", helpers],
    }
    assert code(f"agent.environment={tmp_path}/game.py:Game", f"agent.tools=[{tmp_path}/tool.py,yours:f]") == {
        "agent.environment": ["game.py", helpers],
        "agent.tools": ["tool.py", helpers, "yours.py"],
    }
    assert code(f"agent.tools=[{tmp_path}/tools.yaml,'mcp: python {tmp_path}/server.py --all','mcp: http://x/y']") == {
        "agent.tools": ["tools.yaml", "yours.py", helpers, "server.py"]
    }
    assert code(f"agent.program={tmp_path}/program.py:run") == {"agent.program": ["program.py", helpers]}
    assert code(f"agent.command=[python,{tmp_path}/agent.py,--fast]") == {"agent.command": ["agent.py", helpers]}
    assert code(f"agent.command=[{tmp_path}/start.sh]") == {"agent.command": ["start.sh"]}
    assert code("agent.environment=openenv:ws://localhost:1") == {}
    plugins = ("data.sampler=sampler:S", "data.generator=yours:G", "algorithm.adv_estimator=yours:f")
    assert code(*plugins, "actor.policy_loss.loss_mode=loss:f") == {
        "data.sampler": ["sampler.py", helpers],
        "data.generator": ["yours.py", helpers],
        "algorithm.adv_estimator": ["yours.py", helpers],
        "actor.policy_loss.loss_mode": ["loss.py", helpers],
    }
    assert code() == {}


def test_agents_with_names(tmp_path: Path) -> None:
    touch(tmp_path, "game.py", "other.py")
    section = f"agent.environment={tmp_path}/game.py:Game"
    found = code(section, "agent.named.a.max_turns=3", f"agent.named.b.environment={tmp_path}/other.py:Game")
    assert found == {"agent.environment": ["game.py"], "agent.named.b.environment": ["other.py"]}


def test_files_that_options_name(tmp_path: Path) -> None:
    touch(tmp_path, "truth.json", "words.txt", "prompt.txt", "folder/x")
    found = code(
        f"data.sampler_kwargs={{table: {tmp_path}/truth.json, n: 3, folder: {tmp_path}/folder}}",
        "reward.functions.a.path=package.module",
        f"reward.functions.a.kwargs.lists=[{tmp_path}/words.txt,{tmp_path}/gone.txt]",
        f"reward.rule_kwargs.math.prompt={tmp_path}/prompt.txt",
    )
    assert found == {
        "data.sampler_kwargs.table": ["truth.json"],
        "reward.functions.a.kwargs.lists[0]": ["words.txt"],
        "reward.rule_kwargs.math.prompt": ["prompt.txt"],
    }


def test_a_moved_project_has_the_same_fingerprints(tmp_path: Path) -> None:
    def at(place: Path) -> Config:
        return load_config(
            [f"model.path={place}/model", f"data.train_files=[{place}/a.parquet,{place}/sub/b.parquet]"]
            + [f"reward.custom_reward_function.path={place}/code/reward.py"]
        )

    old, new = tmp_path / "old", tmp_path / "deeper" / "new"
    touch(old, "model/config.json", "code/reward.py")
    rows(old / "a.parquet", 1)
    rows(old / "sub" / "b.parquet", 2)
    before = fingerprints(at(old))
    new.parent.mkdir()
    old.rename(new)
    (tmp_path / "link").symlink_to(new)
    for after in (fingerprints(at(new)), fingerprints(at(tmp_path / "link"))):
        assert (after.model, after.prompts, after.code) == (before.model, before.prompts, before.code)
