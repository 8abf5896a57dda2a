import itertools
import json
import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config.data import DataConfig
from pipeline.prompts.chat import ChatTokenizer
from pipeline.prompts.encode import COLUMNS, MEDIA, Encoder, stamp
from pipeline.prompts.files import resolve
from pipeline.prompts.prompt_file import PromptFile
from pipeline.prompts.quarantine import Quarantine
from pipeline.prompts.sampler import make_sampler
from pipeline.prompts.source import Position, PromptSource
from pipeline.rows import PROMPT


@pytest.fixture
def source_of(tokenizer):
    def make(paths, seed=1, split="train", **changes):
        data = DataConfig(**{"shuffle_window_rows": 8} | changes)
        files = resolve(paths, f"data.{split}_files", data.prompt_key)
        encoder = Encoder(ChatTokenizer(tokenizer, data), Quarantine(data.max_bad_rows))
        return PromptSource(files, data, encoder, seed, split, make_sampler(data, seed))

    return make


@pytest.fixture(scope="module")
def folder(tmp_path_factory, prompt_row):
    """62 prompts in files of row groups below, near and far above the window; every seventh is long."""
    path = tmp_path_factory.mktemp("prompts")
    number = 0
    for name, rows, row_group_rows in (("a", 11, 3), ("b", 30, 30), ("c", 14, 7), ("d", 7, 100)):
        content = [f"question {i}" + " is long" * 8 * (i % 7 == 0) for i in range(number, number + rows)]
        table = pa.Table.from_pylist([prompt_row(number + i, text) for i, text in enumerate(content)])
        pq.write_table(table, path / f"{name}.parquet", row_group_size=row_group_rows)
        number += rows
    return str(path)


def indices(tables):
    return [json.loads(value)["index"] for table in tables for value in table["extra_info"].to_pylist()]


def test_a_row_holds_what_the_contract_says(write, prompt_row, source_of, tokenizer):
    source = source_of(write([prompt_row(i) for i in range(4)]))
    (table,) = source.chunks(4, epochs=1)
    assert table.schema == COLUMNS
    stamped = stamp(table, "train", 5, 2)
    assert stamped.schema.equals(PROMPT, check_metadata=True)
    for offset, row in enumerate(stamped.to_pylist()):
        number = json.loads(row["extra_info"])["index"]
        assert row == {
            "split": "train",
            "chunk": 5,
            "iteration": 2,
            "uid": f"0-{offset}",
            "epoch": 0,
            "offset": offset,
            "prompt_index": number,
            "data_source": "countdown",
            "prompt": json.dumps([{"role": "user", "content": f"question {number}"}]),
            "prompt_ids": tokenizer(f"<user>question {number}<assistant>")["input_ids"],
            "ground_truth": json.dumps({"target": number, "numbers": [1, 2]}),
            "extra_info": json.dumps({"split": "train", "index": number}),
        }


def test_every_row_once_per_epoch_in_a_new_order(folder, source_of):
    source = source_of(folder)
    assert source.len_estimate == 62
    order = indices(source.chunks(2, epochs=3))
    epochs = [order[i : i + 62] for i in range(0, 186, 62)]
    assert all(sorted(epoch) == list(range(62)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(62)]}) == 4
    assert indices(source_of(folder, seed=2).chunks(2, epochs=1)) != epochs[0]
    assert indices(pickle.loads(pickle.dumps(source_of(folder))).chunks(2, epochs=3)) == order


def test_windows_mix_far_parts_and_stay_within_their_bound(folder, source_of):
    windows = source_of(folder).orders[""].windows(0)
    assert all(window.rows <= 8 for window in windows)
    assert [window.start for window in windows] == [0, *itertools.accumulate(window.rows for window in windows)][:-1]
    assert sum(len({unit.file for unit in window.units}) > 1 for window in windows) > len(windows) / 2
    # A window larger than the data shuffles everything together.
    order = indices(source_of(folder, shuffle_window_rows=1000).chunks(62, epochs=1))
    assert sorted(order) == list(range(62))
    assert np.mean(np.abs(np.diff(order))) > 10


def test_the_order_is_pinned(folder, source_of):
    """Another order with the same seed would make a resumed run repeat some prompts and miss others."""
    (table,) = itertools.islice(source_of(folder).chunks(12), 1)
    assert indices([table]) == [24, 22, 23, 25, 7, 8, 6, 34, 46, 45, 44, 36]


def test_without_shuffling_rows_come_in_file_order(folder, source_of):
    assert indices(source_of(folder, shuffle=False).chunks(31, epochs=2)) == [*range(62)] * 2


def test_chunks_cross_epochs_and_only_the_last_incomplete_one_is_dropped(folder, source_of):
    tables = list(source_of(folder).chunks(10, epochs=2))
    assert [len(table) for table in tables] == [10] * 12
    assert tables[6]["epoch"].to_pylist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    uids = [uid for table in tables for uid in table["uid"].to_pylist()]
    assert len(set(uids)) == 120
    assert len(list(itertools.islice(source_of(folder).chunks(10), 50))) == 50


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunk=st.integers(1, 20),
    seen=st.integers(1, 8),
    window=st.integers(1, 70),
    shuffle=st.booleans(),
    filtered=st.booleans(),
    samples=st.sampled_from([-1, 1, 40]),
)
def test_resuming_behind_any_chunk_gives_the_rest(folder, source_of, chunk, seen, window, shuffle, filtered, samples):
    settings = {
        "shuffle_window_rows": window,
        "shuffle": shuffle,
        "train_max_samples": samples,
        "max_prompt_length": 40 if filtered and samples != 1 else 512,
        "filter_overlong_prompts": filtered,
    }
    source, position = source_of(folder, **settings), Position()
    for _ in range(seen):
        _, position = source.draw(chunk, position)
    whole = list(itertools.islice(source_of(folder, **settings).chunks(chunk), seen + 3))
    again = source_of(folder, **settings).chunks(chunk, start=position)
    assert list(itertools.islice(again, 3)) == whole[seen:]


def test_resuming_at_any_row_gives_the_tail_of_the_epoch(folder, source_of):
    order = indices(source_of(folder).chunks(1, epochs=2))
    for offset in (*range(0, 62, 5), 61, 62):
        assert indices(source_of(folder).chunks(1, Position(0, offset), epochs=2)) == order[offset:]


def test_seeking_reads_no_window_before_the_position(folder, source_of, monkeypatch):
    read = []
    original = PromptFile.read

    def spy(self, slices, columns):
        read.append(sum(part.stop - part.start for part in slices))
        return original(self, slices, columns)

    monkeypatch.setattr(PromptFile, "read", spy)
    next(source_of(folder).chunks(1, Position(3, 45)))
    assert 0 < sum(read) <= 8


def test_filtered_prompts_are_counted_and_keep_their_offset(folder, source_of):
    source = source_of(folder, max_prompt_length=40, filter_overlong_prompts=True, shuffle=False)
    tables = list(source.chunks(1, epochs=1))
    assert indices(tables) == [i for i in range(62) if i % 7]
    assert [table["offset"][0].as_py() for table in tables] == indices(tables)
    assert source.encoder.filtered_overlong == 9
    assert source.encoder.truncated == 0


def test_truncated_prompts_are_counted(folder, source_of):
    source = source_of(folder, max_prompt_length=40, truncation="left", shuffle=False)
    (table,) = source.chunks(62, epochs=1)
    assert max(len(ids) for ids in table["prompt_ids"].to_pylist()) == 40
    assert (source.encoder.truncated, source.encoder.filtered_overlong) == (9, 0)


def test_an_overlong_prompt_is_an_error_that_names_the_row(folder, source_of):
    with pytest.raises(ValueError, match=r"b\.parquet, row 3 \(row group 0\).* tokens long"):
        next(source_of([f"{folder}/b.parquet"], max_prompt_length=40, shuffle=False).chunks(8))


def test_all_prompts_filtered(folder, source_of):
    source = source_of(folder, max_prompt_length=2, filter_overlong_prompts=True)
    with pytest.raises(
        ValueError, match=r"data\.train_files: all 62 prompts are longer than data\.max_prompt_length=2"
    ):
        next(source.chunks(4))


def test_max_samples(folder, source_of):
    source = source_of(folder, train_max_samples=15)
    assert source.len_estimate == 15
    assert sorted(indices(source.chunks(15, epochs=1))) == [*range(15)]
    assert indices(source_of(folder, split="val", val_max_samples=5).validation_rows(2)) == [*range(5)]
    assert source_of(folder, train_max_samples=1000).len_estimate == 62
    with pytest.raises(ValueError, match=r"data\.val_max_samples is 0; give"):
        source_of(folder, split="val", val_max_samples=0)


def test_validation_rows_come_in_file_order_each_time(folder, source_of):
    source = source_of(folder, split="val")
    for _ in range(2):
        tables = list(source.validation_rows(20))
        assert [len(table) for table in tables] == [20, 20, 20, 2]
        assert indices(tables) == [*range(62)]
        assert tables[1]["uid"][0].as_py() == "val-20"


def test_files_may_differ_in_further_columns(write, prompt_row, source_of):
    plain = {key: value for key, value in prompt_row(0).items() if key != "extra_info"}
    paths = [
        write([prompt_row(0, reward_model={"ground_truth": "text"}, extra_info=None)], "a.parquet"),
        write([plain], "b.parquet"),
        write([prompt_row(2, reward_model=None), prompt_row(3)], "c.parquet"),
    ]
    (table,) = source_of(paths, shuffle=False).chunks(4, epochs=1)
    assert table["extra_info"].to_pylist()[:2] == ["{}", "{}"]
    assert table["ground_truth"].to_pylist() == [
        '"text"',
        '{"target": 0, "numbers": [1, 2]}',
        "null",
        '{"target": 3, "numbers": [1, 2]}',
    ]


def test_only_needed_columns_are_read(write, prompt_row, source_of, monkeypatch):
    asked = []
    original = PromptFile.read
    monkeypatch.setattr(
        PromptFile, "read", lambda self, slices, columns: asked.append(columns) or original(self, slices, columns)
    )
    next(source_of(write([{**prompt_row(0), "embedding": [0.0] * 1000}])).chunks(1))
    assert asked == [["prompt", "data_source", "reward_model.ground_truth", "extra_info", *MEDIA]]


@pytest.mark.parametrize("damage", ["gone", "bytes", "other"])
def test_a_file_that_breaks_in_the_middle_of_the_run(write, prompt_row, source_of, damage):
    path = write([prompt_row(i) for i in range(40)])
    chunks = source_of(path, shuffle=False).chunks(8)
    next(chunks)
    if damage == "gone":
        os.remove(path)
    elif damage == "bytes":
        whole = Path(path).read_bytes()
        footer = 8 + int.from_bytes(whole[-8:-4], "little")
        Path(path).write_bytes(b"PAR1" + b"\xff" * (len(whole) - footer - 4) + whole[-footer:])
    else:
        write([prompt_row(i) for i in range(41)])
    with pytest.raises(
        OSError, match=r"data\.train_files: .*train\.parquet, row group \d: could not be read, .* again"
    ):
        list(itertools.islice(chunks, 4))


def test_memory_is_bounded_by_the_window_however_the_files_were_written(write, prompt_row, source_of):
    rows = 60_000
    row = pa.Table.from_pylist([prompt_row(0)])
    table = pa.concat_tables([row] * rows).combine_chunks()
    text = pa.array([f"{i:0500}" for i in range(rows)])
    message = pa.StructArray.from_arrays([text, pa.array(["user"] * rows)], ["content", "role"])
    prompts = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), message)
    table = table.set_column(1, "prompt", prompts)
    for row_group_rows in (rows, 500):
        path = write(table, f"{row_group_rows}.parquet", row_group_rows)
        source = source_of(path, shuffle_window_rows=1000, max_prompt_length=600)
        pa.default_memory_pool().release_unused()
        base, peak = pa.total_allocated_bytes(), 0
        tracemalloc.start()
        for _ in itertools.islice(source.chunks(16), 70):
            peak = max(peak, pa.total_allocated_bytes() - base)
        python_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # The data is 30 MB, a window 0.5 MB, each of its two slices lies in a batch of decoded rows of 2 MB.
        assert peak < 6e6
        assert python_peak < 2e6


def test_rows_know_their_number_in_all_files(folder, source_of):
    rows, _ = source_of(folder).draw(100)
    assert [row["prompt_index"] for row in rows] == [json.loads(row["extra_info"])["index"] for row in rows]


def test_bad_rows_are_set_aside_up_to_the_limit_with_their_place(tmp_path, write, prompt_row, source_of):
    bad = {3: {"data_source": None}, 11: {"prompt": []}, 24: {"prompt": None}}
    rows = [prompt_row(i, **bad.get(i, {})) for i in range(30)]
    path = write(rows, row_group_rows=10)
    for limit in (3, 2, 0):
        source = source_of(path, max_bad_rows=limit)
        source.encoder.quarantine = Quarantine(limit, str(tmp_path / f"run{limit}"))
        if limit == 3:
            found, _ = source.draw(54)
            order = [row["prompt_index"] for row in found]
            assert sorted(order) == sorted([i for i in range(30) if i not in bad] * 2)
            assert source.encoder.quarantine.count == 3
        else:
            with pytest.raises(ValueError, match=r"train\.parquet, row"):
                source.draw(54)
    listed = ds.dataset(tmp_path / "run3" / "quarantine").to_table().sort_by("row").to_pylist()
    assert [(row["row_group"], row["row"]) for row in listed] == [(0, 3), (1, 11), (2, 24)]
    assert all(row["file"] == path and f"row {row['row']}" in row["reason"] for row in listed)
    contents = [json.loads(row["content"]) for row in listed]
    assert [contents[0]["data_source"], contents[1]["prompt"], contents[2]["prompt"]] == [None, [], None]
    assert ds.dataset(tmp_path / "run2" / "quarantine").count_rows() == 3
    assert not (tmp_path / "run0").exists()


def test_bad_arguments(folder, source_of):
    with pytest.raises(ValueError, match="split is 'test'"):
        source_of(folder, split="test")
    with pytest.raises(ValueError, match="a chunk of 0 prompts"):
        next(source_of(folder).chunks(0))
    with pytest.raises(ValueError, match=r"data\.shuffle_window_rows is 0"):
        source_of(folder, shuffle_window_rows=0)
