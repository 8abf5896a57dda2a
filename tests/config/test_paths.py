"""Paths in settings: `~`, and folders told apart from Hub names."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.config import Config, load
from pipeline.config.paths import check_out, expand_settings, local_path, model_folder, named_folder
from tests.sentences import Named


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    model = tmp_path / "home" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    return tmp_path / "home"


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "owner/name.v1_2"])
def test_hub_names(name: str) -> None:
    assert named_folder(name) is None and model_folder(name, "model.path") is None


@pytest.mark.parametrize(
    "path",
    [
        "runs/TYPO",
        "models/typo",
        "folder/typo",
        "./typo",
        "../typo",
        ".typo",
        "/typo",
        "~/typo",
        "a/b/c",
        "a//b",
        "a/",
    ],
)
def test_a_missing_folder_is_no_hub_name(path: str, named: Named) -> None:
    with pytest.raises(ValueError) as refused:
        named_folder(path, "model.path")
    named(refused.value, f"model.path={path}")


def test_folders(home: Path, named: Named) -> None:
    assert named_folder("folder") == Path("folder")
    assert model_folder("~/model") == home / "model"
    assert model_folder("home/model") == Path("home/model")
    with pytest.raises(ValueError) as refused:
        model_folder("folder", "critic.path")
    named(refused.value, "critic.path=folder config.json")
    with pytest.raises(ValueError) as refused:
        model_folder("file")
    named(refused.value, "file")
    Path("file.gguf").touch()
    with pytest.raises(ValueError) as refused:
        model_folder("file.gguf")
    named(refused.value, "file.gguf jobs.from_gguf")


def test_home_in_arguments_and_settings(home: Path) -> None:
    @dataclass
    class Inner:
        out: str | None = "~/out"
        size: int = 3

    @dataclass
    class Outer:
        files: list[str] = field(default_factory=lambda: ["~/a.parquet", "s3://bucket/~/b", "c~/d"])
        options: dict[str, str] = field(default_factory=lambda: {"text": "~/untouched"})
        inner: Inner = field(default_factory=Inner)

    config = Outer()
    expand_settings(config)
    assert config.files == [f"{home}/a.parquet", "s3://bucket/~/b", "c~/d"]
    assert config.options == {"text": "~/untouched"} and config.inner == Inner(f"{home}/out")
    assert local_path("~") == home and local_path("a/~") == Path("a/~")
    loaded = load(Config, ["model.path=~/model", "data.val_files=[~/v.parquet,b.parquet]"], "train")
    assert loaded.model.path == f"{home}/model" and loaded.data.val_files == [f"{home}/v.parquet", "b.parquet"]


def test_a_model_goes_into_a_new_or_empty_folder_alone(home: Path, tmp_path: Path, named: Named) -> None:
    (tmp_path / "link").symlink_to(home / "model")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for out, keys in (
        *((out, f"{out} ~/model") for out in ("home/model", "folder/../home/model", "link", "link/new", "home")),
        *((out, "~/model") for out in (".", "home/..")),
        *((out, out) for out in ("file", "dangling", str(tmp_path / "circle"))),
    ):
        with pytest.raises(ValueError) as refused:
            check_out(Path(out), ["gpt2", None, "~/model"])
        named(refused.value, keys)
    for out in ("folder", "new", "home/other", str(tmp_path / "new")):
        check_out(Path(out), ["gpt2", None, "~/model"])
    (tmp_path / "folder" / "notes.txt").write_text("")
    with pytest.raises(ValueError) as refused:
        check_out(Path("folder"))
    named(refused.value, "folder")
