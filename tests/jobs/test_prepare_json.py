"""`python -m jobs.prepare json`: rows come out as they went in, from every format that holds them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.prepare import convert, parquet
from jobs.prepare.__main__ import main
from jobs.prepare.types import JSON, joined, type_of
from pipeline.cells import values
from pipeline.prompts.files import resolve

ROWS: list[dict[str, Any]] = [
    {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": f"{number} + 1 = ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "late": number} if number > 5 else {"index": number},
    }
    for number in range(10)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def prepared(folder: Path, *inputs: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of the files that the command makes, by their names."""
    assert main(["json", "--input", *map(str, inputs), "--out", str(folder)]) == 0
    return {file.stem: list(values(pq.read_table(file))) for file in sorted(folder.glob("*.parquet"))}


def saved(folder: Path, rows: list[dict[str, Any]], shards: int = 1) -> Path:
    """A folder as `Dataset.save_to_disk` writes it, with files of `map` next to the data."""
    folder.mkdir(parents=True)
    names = [f"data-{shard:05d}-of-{shards:05d}.arrow" for shard in range(shards)]
    for shard, name in enumerate(names):
        stream_of(folder / name, rows[shard * len(rows) // shards : (shard + 1) * len(rows) // shards])
    stream_of(folder / "cache-1c80317fa3b1799d.arrow", rows)
    stream_of(folder / "tmp1c80317f.arrow", rows)
    state = {"_data_files": [{"filename": name} for name in names], "_format_columns": None, "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def stream_of(file: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(file), table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", LINES.encode()),
        ("rows.ndjson.gz", gzip.compress(LINES.encode())),
        ("rows.json", json.dumps(ROWS, indent=2).encode()),
        ("rows.jsonl", b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode()),
    ],
)
def test_json_becomes_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP", 4)
    (tmp_path / name).write_bytes(content)
    assert prepared(tmp_path / "out", tmp_path / name) == {"rows": ROWS}
    assert sum(resolve(str(tmp_path / "out"), "data.train_files")[0].row_groups) == len(ROWS)


def test_columns_of_one_form_keep_the_types_that_other_programs_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(LINES)
    prepared(tmp_path / "out", tmp_path / "rows.jsonl")
    schema = pq.read_schema(tmp_path / "out" / "rows.parquet")
    assert schema.field("prompt").type.equals(MESSAGES)
    assert schema.field("reward_model").type == pa.struct([("style", pa.string()), ("ground_truth", pa.string())])
    assert schema.field("extra_info").type == JSON


@pytest.mark.parametrize(
    "truths",
    [
        pytest.param([{"name": "f", "arguments": {"city": "Ulm"}}, {"name": "g", "arguments": {"n": 1}}], id="keys"),
        pytest.param([{"a": 1, "b": 2}, {"b": 2, "a": 1}], id="order of keys"),
        pytest.param([{"a": None}, {"a": None}], id="nulls in every row"),
        pytest.param([{"a": 1}, {"a": None}, {}], id="a null and a missing key"),
        pytest.param([[1, None], [2]], id="nulls in lists"),
        pytest.param([7, 7.5, 7.0], id="whole numbers among others"),
        pytest.param([1, True], id="numbers and booleans"),
        pytest.param([2**63, 10**400, -(2**63)], id="large numbers"),
        pytest.param([7, "7 or 8", [7, 8], {"any": 1}], id="values of four types"),
        pytest.param([{}, {}], id="empty objects"),
        pytest.param([[], [[]], [[1]]], id="empty lists"),
        pytest.param([[], []], id="empty lists alone"),
        pytest.param(["[1, 2]", "null", "7"], id="text that looks like JSON"),
        pytest.param([{"": 1, "a.b": {"c": "数"}}] * 2, id="odd keys"),
        pytest.param(["[" * 12 + "]" * 12, json.loads("[" * 12 + "1" + "]" * 12)], id="deep"),
        pytest.param([0.1, -0.0, 1e300, 5e-324], id="floats"),
    ],
)
def test_values_come_out_as_they_went_in(tmp_path: Path, truths: list[Any]) -> None:
    rows = [ROWS[0] | {"reward_model": {"ground_truth": truth}, "bare": truth} for truth in truths]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # `==` of Python takes 1, 1.0 and True for equal, and knows no order of keys.
    assert json.dumps(prepared(tmp_path / "out", tmp_path / "rows.jsonl")["rows"]) == json.dumps(rows)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=3)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON_VALUES, min_size=1, max_size=4))
@settings(max_examples=300)
def test_an_arrow_type_is_chosen_only_if_it_gives_every_value_back(values: list[Any]) -> None:
    kind = pa.null()
    for value in values:
        kind = joined(kind, type_of(value))
    if kind != JSON:
        assert json.dumps(pa.array(values, type=kind).to_pylist()) == json.dumps(values)


def test_a_folder_that_datasets_saved_is_read_by_its_index(tmp_path: Path) -> None:
    folder = saved(tmp_path / "mine", ROWS[6:], shards=2)
    assert prepared(tmp_path / "out", folder) == {"mine": ROWS[6:]}


def test_the_index_sets_the_order(tmp_path: Path) -> None:
    folder = saved(tmp_path / "mine", ROWS[6:], shards=2)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({"_data_files": state["_data_files"][::-1]}))
    assert prepared(tmp_path / "out", folder) == {"mine": ROWS[8:] + ROWS[6:8]}


def test_a_dataset_dict_gives_one_file_for_each_split(tmp_path: Path) -> None:
    saved(tmp_path / "both" / "train", ROWS[6:], shards=2)
    saved(tmp_path / "both" / "test", ROWS[8:])
    saved(tmp_path / "both" / "old", ROWS[9:])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    # A folder above it is searched.
    assert prepared(tmp_path / "out", tmp_path) == {"test": ROWS[8:], "train": ROWS[6:]}


def test_a_folder_of_the_cache_is_read_by_its_splits(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    for name, rows in {
        "json-train-00000-of-00002": ROWS[6:8],
        "json-train-00001-of-00002": ROWS[8:],
        "json-test": ROWS[9:],
        "cache-1c80317fa3b1799d": ROWS[6:],
        "cache-test": ROWS[6:],
    }.items():
        stream_of(folder / f"{name}.arrow", rows)
    (folder / "dataset_info.json").write_text('{"splits": {"train": {"name": "train"}, "test": {"name": "test"}}}')
    assert prepared(tmp_path / "out", folder) == {"train": ROWS[6:], "test": ROWS[9:]}


def test_values_that_datasets_keeps_as_json_stay_json(tmp_path: Path) -> None:
    folder = saved(tmp_path / "mine", ROWS[:1])
    arguments = pa.StructArray.from_arrays([pa.array(['{"city": null}'], JSON)], names=["arguments"])
    table = pa.table({"reward_model": pa.StructArray.from_arrays([arguments], names=["ground_truth"])})
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    prepared(tmp_path / "out", folder)
    assert pq.read_table(tmp_path / "out" / "mine.parquet").equals(table)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no such file"),
        ('{"a": 1}\n{"a"', "rows.jsonl, line 2: not JSON"),
        ("[1]\n", "entry 0 is a int, but an object is needed"),
        ('{"a": 1}\n{"a": 1, "b": {"c": 1, "c": 2}}\n', "line 2: not JSON (the key 'c' stands twice in one object)"),
        ('{"a": "\\ud800"}\n', "line 1: not UTF-8 text"),
        ('{"a": 1e999}\n', "line 1: not JSON (the number 1e999 is too large)"),
        ('{"a": ' + "[" * 200_000 + "\n", "line 1: not JSON"),
    ],
)
def test_what_cannot_be_converted_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    if content:
        (tmp_path / "rows.jsonl").write_text(content)
    assert main(["json", "--input", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*.parquet"))


@pytest.mark.parametrize(
    ("index", "content", "words"),
    [
        ("state.json", '{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow does not exist, but"),
        ("state.json", '{"_data_files": [{"filename": "../data.arrow"}]}', "data in another folder"),
        ("state.json", '{"_data_files": []}', "names no data in '_data_files'"),
        ("state.json", "[1]", "holds a list, but an object is needed"),
        ("state.json", "{", "state.json cannot be read"),
        ("state.json", '{"_indices_data_files": [{"filename": "indices.arrow"}]}', "selects rows by a file of indices"),
        ("dataset_dict.json", '{"splits": ["gone"]}', "gone has no state.json"),
        ("dataset_dict.json", '{"splits": [".."]}', "data in another folder"),
    ],
)
def test_an_index_that_does_not_fit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], index: str, content: str, words: str
) -> None:
    folder = saved(tmp_path / "mine", ROWS[6:])
    (folder / index).write_text(content)
    assert main(["json", "--input", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err


def test_two_inputs_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        saved(tmp_path / folder / "mine", ROWS[6:])
    assert main(["json", "--input", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "two inputs are called mine" in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*.parquet"))


def test_files_of_all_endings_are_found_in_a_folder(tmp_path: Path) -> None:
    for ending in convert.ENDINGS:
        file = tmp_path / "in" / f"rows{ending.replace('.', '_')}{ending}"
        file.parent.mkdir(exist_ok=True)
        if ending == ".arrow":
            stream_of(file, ROWS)
            continue
        content = (json.dumps(ROWS) if ".json" in ending and not ending.startswith(".jsonl") else LINES).encode()
        file.write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    assert len(prepared(tmp_path / "out", tmp_path / "in")) == len(convert.ENDINGS)


def test_files_of_others_are_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own files are; and if one of several may not be replaced, none is."""
    for name, row in (("a", {"x": 1}), ("b", {"x": 2})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    out, inputs = tmp_path / "out", (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert prepared(out, *inputs) == prepared(out, *inputs) == {"a": [{"x": 1}], "b": [{"x": 2}]}
    for content in (None, "no parquet"):
        if content is None:
            pq.write_table(pa.table({"mine": [1]}), out / "b.parquet")
        else:
            (out / "b.parquet").write_text(content)
        (tmp_path / "a.jsonl").write_text('{"x": 3}')
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        assert main(["json", "--input", *map(str, inputs), "--out", str(out)]) == 2
        assert "b.parquet is there and was not written by this command" in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
