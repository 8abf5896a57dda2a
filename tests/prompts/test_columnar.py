"""Arrow streams as Hugging Face `datasets` saves them; parquet files are in test_files.py."""

import json

import fsspec
import pyarrow as pa
import pytest

from pipeline.prompts.files import data_sources, resolve
from pipeline.prompts.prompt_file import Slice

KEY = "data.train_files"


@pytest.fixture
def save(prompt_row):
    """Writes rows as `datasets.Dataset.save_to_disk` does: streams of record batches, and the list of their files."""

    def write(folder, rows=25, batch_rows=4, files=2, **state):
        folder.mkdir(parents=True)
        table = pa.Table.from_pylist([prompt_row(i, data_source=f"s{i // 10}") for i in range(rows)])
        names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
        per_file = -(-rows // files)
        for i, name in enumerate(names):
            with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
                stream.write_table(table.slice(i * per_file, per_file), max_chunksize=batch_rows)
        (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]} | state))
        return folder

    return write


def test_a_saved_folder_is_its_streams_in_order(save, tmp_path):
    files = resolve(str(save(tmp_path / "saved")), KEY)
    assert [file.name.rsplit("/")[-1] for file in files] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert [file.row_groups for file in files] == [(4, 4, 4, 1), (4, 4, 4)]
    assert data_sources(files) == ["s0", "s1", "s2"]
    read = list(files[1].read([Slice(2, 1, 3), Slice(0, 3, 4)], ["extra_info", "reward_model.ground_truth", "none"]))
    assert [part for part, _ in read] == [Slice(0, 3, 4), Slice(2, 1, 3)]
    assert [batch.schema.names for _, batch in read] == [["extra_info", "reward_model"]] * 2
    rows = [files[1].row(batch, i, None) for _, batch in read for i in range(len(batch))]
    assert [row["extra_info"]["index"] for row in rows] == [16, 22, 23]


def test_behind_a_url(save, tmp_path):
    memory = fsspec.filesystem("memory")
    memory.put(str(save(tmp_path / "saved")), "/bucket/saved", recursive=True)
    try:
        files = resolve("memory://bucket/saved", KEY)
        assert [file.row_groups for file in files] == [(4, 4, 4, 1), (4, 4, 4)]
        assert data_sources(files) == ["s0", "s1", "s2"]
    finally:
        memory.rm("/bucket", recursive=True)


def test_a_dict_of_splits_asks_for_one(save, tmp_path):
    for split in ("train", "test"):
        save(tmp_path / "saved" / split)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(FileNotFoundError, match=r"DatasetDict with the splits train, test; name .* as .*saved/train$"):
        resolve(str(tmp_path / "saved"), KEY)
    assert len(resolve(str(tmp_path / "saved" / "test"), KEY)) == 2


def test_what_is_wrong_is_named(save, tmp_path):
    first = save(tmp_path / "saved") / "data-00000-of-00002.arrow"
    whole = first.read_bytes()
    for content in (whole[: len(whole) // 2], b"no arrow at all"):
        first.write_bytes(content)
        with pytest.raises(ValueError, match=r"data-00000-of-00002\.arrow cannot be read as an Arrow stream"):
            resolve(str(tmp_path / "saved"), KEY)
    with pa.ipc.new_stream(str(first), pa.schema([("prompt", pa.string())])) as stream:
        stream.write_table(pa.table({"prompt": ["x"]}))
    with pytest.raises(ValueError, match=r"data-00000-of-00002\.arrow has no column 'data_source'"):
        resolve(str(tmp_path / "saved"), KEY)
    first.unlink()
    with pytest.raises(ValueError, match=r"data-00000-of-00002\.arrow cannot be read as an Arrow stream"):
        resolve(str(tmp_path / "saved"), KEY)


def test_a_stream_that_changes_during_the_run(save, tmp_path):
    (file, _) = resolve(str(save(tmp_path / "a")), KEY)
    (tmp_path / "a" / "data-00000-of-00002.arrow").write_bytes(
        (save(tmp_path / "b", batch_rows=3) / "data-00000-of-00002.arrow").read_bytes()
    )
    with pytest.raises(OSError, match=r"row group 0: could not be read, .* record batch 0 now has 3 rows"):
        list(file.read([Slice(0, 0, 4)], ["prompt"]))
