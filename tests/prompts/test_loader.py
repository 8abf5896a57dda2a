import functools
import itertools
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.prompts.encode import COLUMNS, stamp, to_table
from pipeline.prompts.files import resolve
from pipeline.prompts.parquet import MEDIA, PromptFile, Slice, check_prompts
from pipeline.prompts.quarantine import Quarantine
from pipeline.rows import PROMPT
from pipeline.store.cursor import PromptCursor


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


def indices(rows):
    return [json.loads(row["extra_info"])["index"] for row in rows]


def rows_of(tables):
    return [row for table in tables for row in table.to_pylist()]


def test_a_row_holds_what_the_contract_says(write, prompt_row, loader_of, tokenizer):
    table = to_table(loader_of(write([prompt_row(i) for i in range(4)])).iteration(1, 4))
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
            "agent_name": None,
        }


def test_every_row_once_per_epoch_in_a_new_order(folder, loader_of):
    rows = loader_of(folder).iteration(1, 186)
    order = indices(rows)
    epochs = [order[i : i + 62] for i in range(0, 186, 62)]
    assert all(sorted(epoch) == list(range(62)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(62)]}) == 4
    assert indices(loader_of(folder, seed=2).iteration(1, 62)) != epochs[0]
    # Rows know their number in all files, whatever the order.
    assert [row["prompt_index"] for row in rows] == order


def test_windows_mix_far_parts_and_stay_within_their_bound(folder, loader_of):
    windows = loader_of(folder).orders[""].windows(0)
    assert all(window.rows <= 8 for window in windows)
    assert [window.start for window in windows] == [0, *itertools.accumulate(window.rows for window in windows)][:-1]
    assert sum(len({unit.file for unit in window.units}) > 1 for window in windows) > len(windows) / 2
    # A window larger than the data shuffles everything together.
    order = indices(loader_of(folder, shuffle_window_rows=1000).iteration(1, 62))
    assert sorted(order) == list(range(62))
    assert np.mean(np.abs(np.diff(order))) > 10


def test_the_order_is_pinned(folder, loader_of):
    """Another order with the same seed would make a resumed run repeat some prompts and miss others."""
    assert indices(loader_of(folder).iteration(1, 12)) == [24, 22, 23, 25, 7, 8, 6, 34, 46, 45, 44, 36]


def test_iterations_cross_epochs_until_the_last_one_ends(folder, loader_of):
    loader = loader_of(folder, epochs=2)
    iterations = [loader.iteration(number, 10) for number in range(1, 15)]
    assert [len(rows) for rows in iterations] == [10] * 12 + [4, 0]
    assert [row["epoch"] for row in iterations[6]] == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert len({row["uid"] for rows in iterations for row in rows}) == 124


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 20),
    seen=st.integers(1, 8),
    window=st.integers(1, 70),
    shuffle=st.booleans(),
    filtered=st.booleans(),
    samples=st.sampled_from([-1, 1, 40]),
)
def test_resuming_behind_any_iteration_gives_the_rest(
    folder, loader_of, batch, seen, window, shuffle, filtered, samples
):
    settings = {
        "shuffle_window_rows": window,
        "shuffle": shuffle,
        "train_max_samples": samples,
        "max_prompt_length": 40 if filtered and samples != 1 else 512,
        "filter_overlong_prompts": filtered,
    }
    loader = loader_of(folder, **settings)
    for number in range(seen):
        loader.iteration(number, batch)
    cursor = loader.cursor
    rest = [loader.iteration(number, batch) for number in range(3)]
    again = loader_of(folder, **settings)
    for one in (again, loader):
        one.load(cursor)
        assert [one.iteration(number, batch) for number in range(3)] == rest


def test_seeking_reads_no_window_before_the_position(folder, loader_of, monkeypatch):
    read = []
    original = PromptFile.read

    def spy(self, slices, columns):
        read.append(sum(part.stop - part.start for part in slices))
        return original(self, slices, columns)

    monkeypatch.setattr(PromptFile, "read", spy)
    loader = loader_of(folder)
    loader.load(PromptCursor(3, 45))
    loader.iteration(1, 1)
    assert 0 < sum(read) <= 8


def test_overlong_prompts_are_counted_and_keep_their_offset(folder, loader_of):
    loader = loader_of(folder, epochs=1, max_prompt_length=40, filter_overlong_prompts=True, shuffle=False)
    rows = loader.iteration(1, 100)
    assert indices(rows) == [i for i in range(62) if i % 7]
    assert [row["offset"] for row in rows] == indices(rows)
    assert (loader.encoder.filtered_overlong, loader.encoder.truncated) == (9, 0)
    loader = loader_of(folder, epochs=1, max_prompt_length=40, truncation="left", shuffle=False)
    rows = loader.iteration(1, 100)
    assert indices(rows) == [*range(62)] and max(len(row["prompt_ids"]) for row in rows) == 40
    assert (loader.encoder.filtered_overlong, loader.encoder.truncated) == (0, 9)


def test_all_prompts_filtered(folder, loader_of):
    with pytest.raises(ValueError, match=r"62 prompts gave none: \d+ are longer than data\.max_prompt_length=2"):
        loader_of(folder, max_prompt_length=2, filter_overlong_prompts=True).iteration(1, 4)


def test_max_samples(folder, loader_of):
    loader = loader_of(folder, train_max_samples=15)
    assert loader.epoch_rows == 15
    assert sorted(indices(loader.iteration(1, 15))) == [*range(15)]
    assert indices(rows_of(loader_of(folder, split="val", val_max_samples=5).epoch(2))) == [*range(5)]
    assert loader_of(folder, train_max_samples=1000).epoch_rows == 62


def test_validation_rows_come_in_file_order_each_time(folder, loader_of):
    loader = loader_of(folder, split="val")
    for _ in range(2):
        tables = list(loader.epoch(20))
        assert [len(table) for table in tables] == [20, 20, 20, 2]
        assert indices(rows_of(tables)) == [*range(62)]
        assert tables[1]["uid"][0].as_py() == "val-20"


def test_files_may_differ_in_further_columns(write, prompt_row, loader_of):
    plain = {key: value for key, value in prompt_row(0).items() if key != "extra_info"}
    paths = [
        write([prompt_row(0, reward_model={"ground_truth": "text"}, extra_info=None)], "a.parquet"),
        write([plain], "b.parquet"),
        write([prompt_row(2, reward_model=None), prompt_row(3)], "c.parquet"),
    ]
    rows = loader_of(paths, shuffle=False).iteration(1, 4)
    assert [row["extra_info"] for row in rows[:2]] == ["{}", "{}"]
    assert [json.loads(row["ground_truth"]) for row in rows] == [
        "text",
        {"target": 0, "numbers": [1, 2]},
        None,
        {"target": 3, "numbers": [1, 2]},
    ]


def test_only_needed_columns_are_read(write, prompt_row, loader_of, monkeypatch):
    asked = []
    original = PromptFile.read
    monkeypatch.setattr(
        PromptFile, "read", lambda self, slices, columns: asked.append(columns) or original(self, slices, columns)
    )
    loader_of(write([{**prompt_row(0), "embedding": [0.0] * 1000}])).iteration(1, 1)
    assert asked == [["prompt", "data_source", "reward_model.ground_truth", "extra_info", "agent_name", *sorted(MEDIA)]]


@pytest.mark.parametrize("damage", ["missing", "bytes", "other"])
def test_a_file_that_breaks_in_the_middle_of_the_run(write, prompt_row, loader_of, damage):
    path = write([prompt_row(i) for i in range(40)])
    loader = loader_of(path, shuffle=False)
    loader.iteration(1, 8)
    if damage == "missing":
        os.remove(path)
    elif damage == "bytes":
        whole = Path(path).read_bytes()
        footer = 8 + int.from_bytes(whole[-8:-4], "little")
        Path(path).write_bytes(b"PAR1" + b"\xff" * (len(whole) - footer - 4) + whole[-footer:])
    else:
        write([prompt_row(i) for i in range(41)])
    with pytest.raises(OSError, match=r"train\.parquet, row group \d: could not be read"):
        loader.iteration(2, 32)


def test_memory_is_bounded_by_the_window_however_the_files_were_written(write, prompt_row, loader_of):
    rows = 60_000
    row = pa.Table.from_pylist([prompt_row(0)])
    table = pa.concat_tables([row] * rows).combine_chunks()
    text = pa.array([f"{i:0500}" for i in range(rows)])
    message = pa.StructArray.from_arrays([text, pa.array(["user"] * rows)], ["content", "role"])
    prompts = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), message)
    table = table.set_column(1, "prompt", prompts)
    for row_group_rows in (rows, 500):
        path = write(table, f"{row_group_rows}.parquet", row_group_rows)
        loader = loader_of(path, shuffle_window_rows=1000, max_prompt_length=600)
        pa.default_memory_pool().release_unused()
        base, peak = pa.total_allocated_bytes(), 0
        tracemalloc.start()
        for number in range(70):
            loader.iteration(number, 16)
            peak = max(peak, pa.total_allocated_bytes() - base)
        python_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # The data is 30 MB, a window 0.5 MB, each of its two slices lies in a batch of decoded rows of 2 MB.
        assert peak < 6e6
        assert python_peak < 2e6


def test_bad_rows_are_set_aside_with_their_place(tmp_path, write, prompt_row, loader_of):
    bad = {3: {"data_source": None}, 11: {"prompt": []}, 24: {"prompt": None}}
    path = write([prompt_row(i, **bad.get(i, {})) for i in range(30)], row_group_rows=10)
    loader = loader_of(path)
    loader.encoder.quarantine = Quarantine(3, str(tmp_path))
    order = [row["prompt_index"] for row in loader.iteration(1, 54)]
    assert sorted(order) == sorted([i for i in range(30) if i not in bad] * 2)
    assert loader.encoder.quarantine.count == 3
    listed = ds.dataset(tmp_path / "quarantine").to_table().sort_by("row").to_pylist()
    assert [(row["row_group"], row["row"]) for row in listed] == [(0, 3), (1, 11), (2, 24)]
    assert all(row["file"] == path and f"row {row['row']}" in row["reason"] for row in listed)
    contents = [json.loads(row["content"]) for row in listed]
    assert [contents[0]["data_source"], contents[1]["prompt"], contents[2]["prompt"]] == [None, [], None]


def as_json(*found):
    """A column of Arrow's type for JSON."""
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(value) for value in found]))


CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def history(name, arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    ask = {"role": "user", "content": "weather?"}
    return [ask, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "12"}, ask]


def test_a_prompt_within_a_tool_dialogue_has_its_own_arguments_alone(write, prompt_row, loader_of, tokenizer):
    made = [("weather", {"city": "Ulm"}), ("convert", {"value": 12, "unit": "F"}), ("weather", {})]
    settings = {"shuffle": False, "apply_chat_template_kwargs": {"chat_template": CALLS}}
    for spelled in (lambda value: value, json.dumps):
        calls = [(name, spelled(arguments)) for name, arguments in made]
        loader = loader_of(write([prompt_row(i, prompt=history(*call)) for i, call in enumerate(calls)]), **settings)
        rows = loader.iteration(1, 3)
        texts = [tokenizer.decode(row["prompt_ids"]) for row in rows]
        assert texts[1] == '<user>weather?<assistant>convert{"value": 12, "unit": "F"}<tool>12<user>weather?'
        assert texts[0] == '<user>weather?<assistant>weather{"city": "Ulm"}<tool>12<user>weather?'
        # Reward models, environments and programs read the same.
        read = [json.loads(row["prompt"])[1]["tool_calls"][0]["function"] for row in rows]
        assert read == [{"name": name, "arguments": arguments} for name, arguments in made]
    with pytest.raises(
        ValueError, match=r"train\.parquet, row 0 .* leaves out `tool_calls` of message 1.*tokenizer_path"
    ):
        loader_of(write([prompt_row(0, prompt=history(*made[0]))])).iteration(1, 1)


def test_columns_of_json_become_values(write, prompt_row, loader_of):
    prompts = [prompt_row(i)["prompt"] for i in range(2)]
    truths = [[2**70, {"b": None, "a": "1"}], "[1, 2]"]
    extra = {"index": 1, "none": None, "sampling_params": {"max_tokens": 4}}
    text = pa.array([json.dumps(extra)] * 2)
    struct = pa.StructArray.from_arrays([as_json(*truths)], ["ground_truth"])
    whole = as_json(*({"style": "rule", "ground_truth": truth} for truth in truths))
    kind = pa.map_(pa.string(), pa.string())
    for columns in (
        {"prompt": prompts, "reward_model": struct, "extra_info": as_json(extra, extra)},
        {"prompt": as_json(*prompts), "reward_model": whole, "extra_info": text.cast(pa.large_string())},
        {"prompt": [json.dumps(prompt) for prompt in prompts], "reward_model": whole.storage, "extra_info": text},
    ):
        rows = loader_of(write(pa.table({"data_source": ["s"] * 2, **columns})), shuffle=False).iteration(1, 2)
        assert [json.loads(row["ground_truth"]) for row in rows] == truths
        assert [json.loads(row["extra_info"]) for row in rows] == [extra] * 2
        assert list(json.loads(rows[0]["ground_truth"])[1]) == ["b", "a"]
        assert [json.loads(row["prompt"]) for row in rows] == prompts
    mapped = pa.array([[("ground_truth", "42")], [("ground_truth", "null")]], kind)
    table = pa.table({"data_source": ["s"] * 2, "prompt": prompts, "reward_model": mapped})
    rows = loader_of(write(table), shuffle=False).iteration(1, 2)
    assert [json.loads(row["ground_truth"]) for row in rows] == ["42", "null"]


def test_a_ground_truth_that_is_text_stays_text(write, prompt_row, loader_of):
    truths = ["[1, 2]", "42", "null", "true", None]
    path = write([prompt_row(i, reward_model={"style": "rule", "ground_truth": t}) for i, t in enumerate(truths)])
    rows = loader_of(path, shuffle=False).iteration(1, len(truths))
    assert [json.loads(row["ground_truth"]) for row in rows] == truths


def test_text_that_holds_no_list_or_object_is_refused_with_its_column(write, prompt_row, loader_of):
    for column, text in (("prompt", "What is 1+1?"), ("extra_info", "42"), ("reward_model", "{")):
        path = write([prompt_row(0, **{column: text})])
        with pytest.raises(ValueError, match=rf"train\.parquet, row 0 .*column '{column}'.* a list or an object"):
            loader_of(path).iteration(1, 1)


def test_nulls_of_other_rows_reach_no_agent(write, prompt_row, loader_of):
    tools = [{"calc": {"create_kwargs": {"limit": 3}}}, {"search": {"create_kwargs": {"index": "wiki"}}}]
    path = write([prompt_row(i, extra_info={"tools_kwargs": given}) for i, given in enumerate(tools)])
    rows = loader_of(path, shuffle=False).iteration(1, 2)
    assert [json.loads(row["extra_info"])["tools_kwargs"] for row in rows] == tools


def test_text_about_media_is_text(write, prompt_row, loader_of):
    texts = ["Which attribute makes a <video> start?", "Does <audio> need controls?", "An <image> in SVG"]
    rows = loader_of(write([prompt_row(i, text) for i, text in enumerate(texts)]), shuffle=False).iteration(1, 3)
    assert [json.loads(row["prompt"])[0]["content"] for row in rows] == texts


def test_columns_of_media_are_refused_whatever_they_are_called(write, prompt_row, loader_of):
    image = {"bytes": b"x", "path": None}
    for name, value in (("images", ["a.png"]), ("picture", image), ("clips", [image])):
        path = write([prompt_row(0, **{name: None}), prompt_row(1, **{name: value})])
        with pytest.raises(ValueError, match=rf"row 1 .* column `{name}` has content, and only text can be trained"):
            loader_of(path, shuffle=False).iteration(1, 2)


def test_columns_that_nothing_reads_are_noted(write, prompt_row, loader_of):
    loader = loader_of(write([prompt_row(0, "x", system="Short.", tools="[]")]))
    loader.iteration(1, 1)
    [note] = loader.notes()
    assert note.startswith("data.train_files: ") and note.endswith("has columns that are not read: system, tools")
    assert not list(loader_of(write([prompt_row(0)])).notes())


def test_a_key_with_a_dot_is_a_column(write, prompt_row):
    row = prompt_row(0, "x")
    path = write([{**row, "chat.messages": row["prompt"]}])
    files = resolve(path, "data.train_files", functools.partial(check_prompts, prompt_key="chat.messages"))
    assert [batch.schema.names for _, batch in files[0].read([Slice(0, 0, 1)], ["chat.messages"])] == [
        ["chat.messages"]
    ]
