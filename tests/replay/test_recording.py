"""Recordings: which groups there are, that their rows are found, and what is refused."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.replay.recording import COLUMNS, Recording, iteration_range, whole_iterations
from tests.recordings import BATCH, CHUNK, CHUNKS, SAMPLES, record
from tests.sentences import Named


def file_of(folder: Path, iteration: int, chunk: int) -> Path:
    return folder / "trajectories" / f"iteration={iteration:06d}" / f"chunk-{chunk:06d}.parquet"


def rewrite(file: Path, table: pa.Table) -> None:
    pq.write_table(table, file)


def test_ranges(named: Named) -> None:
    assert iteration_range("3-10") == (3, 10)
    assert iteration_range(" 3 ") == iteration_range("3 - 3") == (3, 3)
    for text in ("", "3-", "-3", "0-2", "10-3", "3..10", "three", "3,4", "³"):
        with pytest.raises(ValueError) as refused:
            iteration_range(text)
        named(refused.value, "3-10")


def test_every_group_is_found_with_its_rows(tmp_path: Path) -> None:
    made = record(tmp_path, [1, 2, 3])
    recording = Recording(str(tmp_path))
    assert (recording.n, recording.groups) == (SAMPLES, 3 * BATCH)
    for group in range(recording.groups):
        own = made[group * SAMPLES : (group + 1) * SAMPLES]
        for got, row in zip(recording.rows(group, group + 1).to_pylist(), own, strict=True):
            assert got.pop("rollout_log_probs") == pytest.approx(row["rollout_log_probs"])
            assert got == {name: row.get(name) for name in COLUMNS if name != "rollout_log_probs"}
        assert recording.iteration_of(group) == own[0]["iteration"]


@pytest.mark.parametrize(("first", "end"), [(0, 1), (CHUNK - 1, CHUNK + 1), (1, 2 * BATCH), (BATCH, 5 * BATCH + 1)])
def test_groups_across_files_and_passes(tmp_path: Path, first: int, end: int) -> None:
    record(tmp_path, [1, 2])
    found = Recording(str(tmp_path)).rows(first, end)["uid"].to_pylist()
    assert found == [f"0-{group % (2 * BATCH)}" for group in range(first, end) for _ in range(SAMPLES)]


def test_a_range_begins_with_its_first_group(tmp_path: Path) -> None:
    made = record(tmp_path, [1, 2, 3, 4])
    recording = Recording(str(tmp_path), "2-3")
    assert recording.groups == 2 * BATCH
    assert recording.rows(0, 1)["uid"].to_pylist() == [made[BATCH * SAMPLES]["uid"]] * SAMPLES
    assert [recording.iteration_of(group) for group in (0, BATCH - 1, BATCH, 2 * BATCH - 1)] == [2, 2, 3, 3]


def test_images_were_written_once_and_are_read_for_each_row(tmp_path: Path) -> None:
    shown = {group: [b"png"] * (group % 3) for group in range(2 * BATCH)}
    made = record(tmp_path, [1, 2], images=shown)
    written = pq.read_table(file_of(tmp_path, 1, 0))["images"].to_pylist()
    assert written == [shown[row // SAMPLES] if row % SAMPLES == 0 else None for row in range(CHUNK * SAMPLES)]
    rows = Recording(str(tmp_path), images=True).rows(0, 2 * BATCH).to_pylist()
    assert [row["images"] for row in rows] == [shown[row["offset"]] for row in made]
    assert [len(row["image_hash"]) for row in rows] == [len(row["images"]) for row in rows]
    assert "images" not in Recording(str(tmp_path)).rows(0, 1).column_names


def test_baselines_are_read_only_where_they_are_asked_for(tmp_path: Path, named: Named) -> None:
    # Nor need an older recording name agents.
    record(tmp_path, [1], without=["baseline", "agent_name"])
    recording = Recording(str(tmp_path))
    assert recording.check() == {None: {"countdown"}}
    assert recording.rows(0, 1).column_names == list(COLUMNS)
    with pytest.raises(ValueError) as refused:
        Recording(str(tmp_path), baselines=True).check()
    named(refused.value, "'baseline'")
    with pytest.raises(ValueError) as refused:
        Recording(str(tmp_path), episodes=True).check()
    named(refused.value, "'contexts'")


def test_folders_without_rows(tmp_path: Path, named: Named) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileNotFoundError, match="has no training rows"):
            Recording(str(folder))
        with pytest.raises(FileNotFoundError) as refused:
            whole_iterations(str(folder), CHUNKS)
        named(refused.value, "2")


def test_iterations_that_are_not_there(tmp_path: Path, named: Named) -> None:
    record(tmp_path, [1, 2, 4])
    with pytest.raises(FileNotFoundError) as refused:
        Recording(str(tmp_path))
    named(refused.value, "3 1 4")
    with pytest.raises(FileNotFoundError) as refused:
        Recording(str(tmp_path), "4-9")
    named(refused.value, "5 4 9")
    assert Recording(str(tmp_path), "1-2").groups == 2 * BATCH
    file_of(tmp_path, 1, 0).unlink()
    file_of(tmp_path, 1, 1).unlink()
    with pytest.raises(FileNotFoundError) as refused:
        Recording(str(tmp_path), "1-2")
    named(refused.value, "1 2")


def test_an_interrupted_iteration_at_the_end_is_left_out(tmp_path: Path, named: Named) -> None:
    record(tmp_path, [1, 2, 3])
    assert whole_iterations(str(tmp_path), CHUNKS) == "1-3"
    file_of(tmp_path, 3, 5).unlink()
    assert whole_iterations(str(tmp_path), CHUNKS) == "1-2"
    with pytest.raises(ValueError) as refused:
        Recording(str(tmp_path)).check()
    named(refused.value, "3 1 2")
    # One in the middle is for the user to decide on.
    file_of(tmp_path, 1, 1).unlink()
    assert whole_iterations(str(tmp_path), CHUNKS) == "1-2"
    with pytest.raises(ValueError, match="in part"):
        Recording(str(tmp_path), "1-2").check()


def test_damaged_files_are_named(tmp_path: Path, named: Named) -> None:
    record(tmp_path, [1, 2])
    recording, file = Recording(str(tmp_path)), file_of(tmp_path, 2, 3)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError) as refused:
        recording.check()
    named(refused.value, f"{file}")
    with pytest.raises(ValueError) as refused:
        recording.rows(2 * BATCH - 1, 2 * BATCH)
    named(refused.value, f"{file}")
    file.unlink()
    with pytest.raises(ValueError) as refused:
        recording.rows(2 * BATCH - 1, 2 * BATCH)
    named(refused.value, f"{file}")
    first = file_of(tmp_path, 1, 0)
    first.write_text("no parquet")
    with pytest.raises(ValueError) as refused:
        Recording(str(tmp_path))
    named(refused.value, f"{first}")


@pytest.mark.parametrize("column", ["response_ids", "prompt_index", "rollout_log_probs"])
def test_files_that_lack_a_column_are_named(tmp_path: Path, column: str, named: Named) -> None:
    record(tmp_path, [1])
    file = file_of(tmp_path, 1, 1)
    rewrite(file, pq.read_table(file, partitioning=None).drop_columns([column]))
    with pytest.raises(ValueError) as refused:
        Recording(str(tmp_path)).check()
    named(refused.value, f"{file} '{column}'")


def test_files_that_are_no_recording(tmp_path: Path, named: Named) -> None:
    record(tmp_path, [1])
    file = file_of(tmp_path, 1, 1)
    table = pq.read_table(file, partitioning=None)
    place = table.column_names.index("response_ids")
    rewrite(file, table.set_column(place, "response_ids", table["response"]))
    with pytest.raises(ValueError) as refused:
        Recording(str(tmp_path)).check()
    named(refused.value, f"{file} 'response_ids'")
    for foreign in (pa.table({"a": [1]}), table.slice(0, 0)):
        rewrite(file_of(tmp_path, 1, 0), foreign)
        with pytest.raises(ValueError) as refused:
            Recording(str(tmp_path))
        named(refused.value, "chunk-000000.parquet 'uid'")


def test_groups_that_are_not_whole(tmp_path: Path, named: Named) -> None:
    record(tmp_path, [1])
    file = file_of(tmp_path, 1, 1)
    table = pq.read_table(file, partitioning=None)
    split = [*range(0, len(table), 2), *range(1, len(table), 2)]
    repeated = [*range(SAMPLES), *range(SAMPLES)]
    for changed in (table.slice(1), table.take(split), table.take(repeated), table.slice(0, SAMPLES)):
        rewrite(file, changed)
        with pytest.raises(ValueError) as refused:
            Recording(str(tmp_path)).check()
        named(refused.value, f"{file} {CHUNK} {SAMPLES}")
    rewrite(file, table.slice(0, SAMPLES))
    with pytest.raises(ValueError, match="it has changed since the start"):
        Recording(str(tmp_path)).rows(BATCH - 1, BATCH)
