"""The plan of a run with images."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.tiny_vision import FAMILIES
from jobs.train import main
from tests.pictures import picture, save_tiny

STRUCTS = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def write(path: Path, cells: list) -> Path:
    """A file like those of geometry3k in verl's format, one row for each cell of images."""
    table = pa.table(
        {
            "data_source": ["hiyouga/geometry3k"] * len(cells),
            "prompt": [[{"role": "user", "content": "<image>Find x." if cell else "Find x."}] for cell in cells],
            "images": pa.array(cells, STRUCTS),
            "ability": ["math"] * len(cells),
            "reward_model": [{"style": "rule", "ground_truth": "48"}] * len(cells),
        }
    )
    pq.write_table(table, path)
    return path


def arguments(tmp_path: Path, family: str, cells: list) -> list[str]:
    save_tiny(tmp_path / "model", family)
    return [
        f"data.train_files={write(tmp_path / 'train.parquet', cells)}",
        *("data.val_files=null", "trainer.test_freq=-1", "data.train_batch_size=8", "rollout.chunk_prompts=4"),
        *("data.max_prompt_length=64", "data.max_response_length=12", "rollout.n=2", "trainer.num_workers=1"),
        *(f"model.path={tmp_path / 'model'}", "model.vision=frozen", "trainer.ray_num_cpus=8"),
        *("trainer.experiment_name=mine", f"trainer.default_local_dir={tmp_path / 'runs'}"),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dry_run_shows_a_prompt_with_its_images(tmp_path, family, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    cells = [[{"bytes": picture(number, 60, 90), "path": "a.png"}] for number in range(8)]
    given = arguments(tmp_path, family, cells)
    assert main([*given, "--dry-run"]) == 0, capsys.readouterr()
    shown = capsys.readouterr().out
    assert "its images" in shown and "60 x 90 pixels, " in shown and "Find x." in shown
    assert "columns that are not read" not in shown


def test_a_bad_image_ends_the_dry_run(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    cells = [[{"bytes": picture(1), "path": None}]] * 7 + [[{"bytes": b"no picture", "path": None}]]
    assert main([*arguments(tmp_path, "qwen3_vl", cells), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "train.parquet, row 7 (row group 0): an image of 10 bytes cannot be decoded: it begins as no" in error, error
