"""Rows that people look at are found among those that a run has recorded."""

from pathlib import Path

import pytest

from pipeline.track.conversation import COLUMNS
from pipeline.track.samples import Choice, Rows, watched
from tests.track.conversations import episode, single, write


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Iteration 1 of two chunks and iteration 2; scores are the number of the sample."""
    for iteration in (1, 2):
        for first in (0, 2):
            group = range(first, first + 2)
            write(
                tmp_path, *(single(each, sample, iteration, uid=f"0-{each}") for each in group for sample in range(3))
            )
    return str(tmp_path)


def test_the_latest_iteration_and_its_first_row(run: str) -> None:
    rows = Rows(run)
    assert rows.iteration == 2 and len(rows.keys) == 12
    row = rows.read(rows.choose(Choice()), COLUMNS)
    assert (row["uid"], row["sample"]) == ("0-0", 0) and "messages" not in row
    assert set(row) < set(COLUMNS)


def test_each_row_has_the_images_of_its_group(tmp_path: Path) -> None:
    shown = {0: [b"a"], 1: [], 2: [b"b", b"c"]}
    keys = [(group, sample) for group in shown for sample in range(2)]
    write(tmp_path, *(single(*key, uid=f"0-{key[0]}", images=shown[key[0]], image_hash=shown[key[0]]) for key in keys))
    rows = Rows(str(tmp_path))
    for number, key in enumerate(rows.keys):
        assert rows.read(number, COLUMNS)["images"] == shown[int(key["uid"][2:])]
    assert "images" not in rows.read(1, ["uid"])


def test_every_way_to_choose(run: str) -> None:
    rows = Rows(run, 1)

    def chosen(**choice: object) -> tuple[str, int]:
        key = rows.keys[rows.choose(Choice(**choice))]  # type: ignore[arg-type]
        return key["uid"], key["sample"]

    assert chosen(uid="0-3") == ("0-3", 0) and chosen(uid="0-2", sample=2) == ("0-2", 2)
    assert chosen(sample=1) == ("0-0", 1)
    assert chosen(order="best") == ("0-0", 2) and chosen(order="worst", uid="0-1") == ("0-1", 0)
    drawn = [chosen(seed=seed) for seed in range(20)]
    assert len(set(drawn)) > 5 and drawn == [chosen(seed=seed) for seed in range(20)]


def test_failed_rows_are_neither_best_nor_worst(tmp_path: Path) -> None:
    write(tmp_path, single(0, 0, reward_error="boom", score=0.0), single(0, 1, score=-1.0), single(0, 2, score=-2.0))
    rows = Rows(str(tmp_path))
    assert [rows.choose(Choice(order=order)) for order in ("best", "worst", "failed")] == [1, 2, 0]
    assert rows.read(0, COLUMNS)["reward_error"] == "boom"
    with pytest.raises(ValueError, match="none of the 1 rows of iteration 1 failed"):
        rows.choose(Choice(sample=1, order="failed"))
    with pytest.raises(ValueError, match="all 1 rows of iteration 1 failed"):
        rows.choose(Choice(sample=0, order="best"))


def test_what_is_not_there_is_named(run: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no row of uid '0-33'; did you mean 0-3\? There are 0-0, 0-1, 0-2, 0-3"):
        Rows(run).choose(Choice(uid="0-33"))
    with pytest.raises(ValueError, match="no sample 7 of it; there are 0, 1, 2"):
        Rows(run).choose(Choice(sample=7))
    with pytest.raises(FileNotFoundError, match="no rows of iteration 9; there are iterations 1 to 2"):
        Rows(run, 9)
    with pytest.raises(FileNotFoundError, match="no rows in validation/"):
        Rows(run, None, "val")
    (tmp_path / "trajectories/iteration=000002/chunk-000000.parquet").write_bytes(b"half")
    with pytest.raises(ValueError, match="chunk-000000.parquet is damaged"):
        Rows(run)


def test_watched_training_rows_are_a_sample_that_stays_the_same(run: str) -> None:
    picks = [watched(Rows(run, iteration), "train", 4) for iteration in (1, 2)]
    assert picks == [watched(Rows(run, iteration), "train", 4) for iteration in (1, 2)]
    assert picks[0] != picks[1] and all(len(set(pick)) == 4 for pick in picks)
    assert watched(Rows(run), "train", 99) == list(range(12))


def test_watched_validation_rows_are_the_same_prompts_at_every_version(tmp_path: Path) -> None:
    for version in (0, 5):
        for group in (2, 0):
            rows = (
                episode(each, sample, version, split="val", chunk=-1)
                for each in (group, group + 1)
                for sample in (0, 1)
            )
            write(tmp_path, *(row | {"uid": f"val-{row['offset']}"} for row in rows))
    for version in (0, 5):
        rows = Rows(str(tmp_path), version, "val")
        assert [rows.keys[number]["uid"] for number in watched(rows, "val", 3)] == ["val-0", "val-1", "val-2"]
        assert {rows.keys[number]["sample"] for number in watched(rows, "val", 3)} == {0}
