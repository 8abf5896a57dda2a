"""What a supervised run begins with: nothing, its own checkpoint, or a refusal that names the difference."""

from pathlib import Path

import pytest

from pipeline.config import ConfigError, load, save_yaml
from pipeline.config.supervised import PreferenceConfig, SFTConfig
from pipeline.run.inputs import supervised_fingerprints
from pipeline.supervised.folder import beginning
from tests.storage.test_checkpoints import written
from tests.supervised.test_sft import write


def settings(tmp_path: Path, *more: str) -> SFTConfig:
    files, model = tmp_path / "train.parquet", tmp_path / "model"
    if not files.exists():
        write(files, 8)
        model.mkdir()
        (model / "config.json").write_text("{}")
    return load(SFTConfig, [f"out={tmp_path}/out", f"model.path={model}", f"data.train_files={files}", *more], "sft")


def begun(tmp_path: Path, saved: int | None = None) -> Path:
    """The folder of a run that was begun with `settings`, and saved a checkpoint after `saved` steps."""
    out = tmp_path / "out"
    out.mkdir()
    config = settings(tmp_path)
    save_yaml(config, out / "config.yaml")
    supervised_fingerprints(config).save(out)
    if saved is not None:
        written(out, saved)
    return out


def test_a_new_run(tmp_path: Path) -> None:
    found = beginning(tmp_path / "out", settings(tmp_path))
    assert (found.exists, found.done, found.notes) == (False, 0, [])
    assert set(found.kept.model) == {"model.path"} and set(found.kept.prompts) == {"data.train_files"}
    assert not (tmp_path / "out").exists()


def test_an_unfinished_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    out = begun(tmp_path, 6)
    more = ("trainer.logger=[console]", "trainer.save_freq=3", "trainer.max_token_len_per_gpu=4096", "out=elsewhere")
    found = beginning(out, settings(tmp_path, *more, "trainer.num_workers=2", "trainer.total_epochs=2"))
    assert found.exists and found.done == 6
    assert found.notes == [f"continuing after step 6, from {out}/checkpoints/iteration_000006"]


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    out = begun(tmp_path)
    write(tmp_path / "train.parquet", 9)
    found = beginning(out, settings(tmp_path))
    assert found.exists and found.done == 0 and found.notes == [f"the run in {out} has no checkpoint and begins again"]
    assert found.kept.prompts == supervised_fingerprints(settings(tmp_path)).prompts


def test_other_settings_are_named(tmp_path: Path) -> None:
    out = begun(tmp_path, 6)
    with pytest.raises(ConfigError) as refused:
        beginning(out, settings(tmp_path, "optim.lr=3e-3", "data.train_batch_size=4"))
    sentence = str(refused.value)
    assert "optim.lr (1e-05 there, 0.003 now)" in sentence and "data.train_batch_size (64 there, 4 now)" in sentence
    assert sentence.endswith(f"choose another out or delete {out}")
    # The settings of another command.
    config = load(PreferenceConfig, [f"model.path={tmp_path}/model"], "reward_model")
    with pytest.raises(ConfigError, match="cannot be continued by this version or command"):
        beginning(out, config)


def test_other_files_are_named(tmp_path: Path) -> None:
    out = begun(tmp_path, 6)
    config = settings(tmp_path)
    (tmp_path / "model" / "config.json").write_text('{"a": 1}')
    write(tmp_path / "train.parquet", 9)
    with pytest.raises(ConfigError) as refused:
        beginning(out, config)
    assert "with other files: model.path: config.json has 8 bytes and had 2" in str(refused.value)
    assert "data.train_files: train.parquet has" in str(refused.value)


def test_the_code_of_an_own_loss_counts(tmp_path: Path) -> None:
    from pipeline.config.preference import DPOConfig

    code = tmp_path / "own.py"
    code.write_text("def loss(data, config): ...\n")
    base = settings(tmp_path)
    config = DPOConfig(model=base.model)
    config.data.train_files, config.loss.type = base.data.train_files, f"{code}:loss"
    before = supervised_fingerprints(config)
    code.write_text("def loss(data, config): return None\n")
    changes = before.changes(supervised_fingerprints(config), "code")
    assert set(changes) == {"loss.type"} and "own.py has" in changes["loss.type"]


def test_a_finished_run_is_refused(tmp_path: Path) -> None:
    out = begun(tmp_path)
    (out / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"{out} holds a finished run and its model; choose another out or delete"):
        beginning(out, settings(tmp_path))


def test_folders_that_are_not_runs_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert not beginning(out, settings(tmp_path)).exists
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no config.yaml"):
        beginning(out, settings(tmp_path))


def test_never_refuses_an_unfinished_run(tmp_path: Path) -> None:
    out = begun(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run and trainer.resume=never"):
        beginning(out, settings(tmp_path, "trainer.resume=never"))
