"""Cells of parquet files of any Arrow type, as the values that they stand for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cells import parsed, plain, values, without_nulls

EXACT = '{"z": 123456789012345678901234567890, "a": null, "list": [1, null, {"b": null}], "text": "[1]"}'


def as_json(*texts: str | None, storage: pa.DataType | None = None) -> pa.Array:
    storage = storage or pa.string()
    return pa.ExtensionArray.from_storage(pa.json_(storage), pa.array(texts, storage))


def read(tmp_path: Path, schema: bool = True, **columns: Any) -> list[dict[str, Any]]:
    """The rows of a file; without `schema`, as writers other than Arrow write it."""
    pq.write_table(pa.table(columns), tmp_path / "f.parquet", store_schema=schema)
    return list(values(pq.read_table(tmp_path / "f.parquet")))


@pytest.mark.parametrize("storage", [pa.string(), pa.large_string(), pa.string_view()])
@pytest.mark.parametrize("schema", [True, False])
def test_json_is_its_value_with_nulls_numbers_and_order(tmp_path: Path, storage: pa.DataType, schema: bool) -> None:
    texts = EXACT, "[1, 2]", '"[1, 2]"', "null", None, "1.5"
    rows = read(tmp_path, schema, j=as_json(*texts, storage=storage))
    assert [row["j"] for row in rows] == [json.loads(EXACT), [1, 2], "[1, 2]", None, None, 1.5]
    assert list(rows[0]["j"]) == ["z", "a", "list", "text"]


def test_json_within_structs_lists_and_maps(tmp_path: Path) -> None:
    inner = as_json(EXACT, "[null]")
    offsets = pa.array([0, 1, 2], pa.int32())
    [first, second] = read(
        tmp_path,
        struct=pa.StructArray.from_arrays([inner, pa.array([None, 1])], ["j", "n"]),
        list=pa.ListArray.from_arrays(offsets, inner),
        map=pa.MapArray.from_arrays(offsets, pa.array(["k", "l"]), inner),
    )
    exact = json.loads(EXACT)
    assert first == {"struct": {"j": exact, "n": None}, "list": [exact], "map": {"k": exact}}
    assert second == {"struct": {"j": [None], "n": 1}, "list": [[None]], "map": {"l": [None]}}


def test_nulls_that_structs_add_are_gone_at_any_depth_within_a_column(tmp_path: Path) -> None:
    cells = [
        {"calls": [{"arguments": {"city": "Ulm"}}, {"arguments": {"value": 12}}], "name": None},
        {"calls": [{"arguments": {}}, None], "name": "x"},
        None,
    ]
    rows = read(tmp_path, c=cells, plain=[None, 1, 2])
    # A function of the user may index the fields of the column itself.
    assert rows[0] == {"c": cells[0], "plain": None}
    assert [row["c"] for row in rows[1:]] == cells[1:]


def test_maps_are_dicts_whose_nulls_were_written(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.struct([("x", pa.int64()), ("y", pa.int64())]))
    rows = read(tmp_path, m=pa.array([[("b", {"x": 1}), ("a", None)], [], None], kind))
    assert [row["m"] for row in rows] == [{"b": {"x": 1}, "a": None}, {}, None]
    with pytest.raises(ValueError, match="^f, row 3, column 'm' cannot be read: a map has one key twice"):
        list(values(pa.table({"m": pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))}), ["f, row 3"]))


def test_text_stays_text(tmp_path: Path) -> None:
    texts = ["[1, 2]", "42", "null", "true", '{"a": 1}']
    for array in (pa.array(texts), pa.array(texts, pa.large_string()), pa.array(texts).dictionary_encode()):
        assert [row["t"] for row in read(tmp_path, t=array)] == texts


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int64(), 2), pa.large_list(pa.int64()), pa.list_view(pa.int64()), pa.large_list_view(pa.int64())],
)
def test_lists_of_any_type(kind: pa.DataType) -> None:
    assert list(values(pa.table({"l": pa.array([[1, 2], None], kind)}))) == [{"l": [1, 2]}, {"l": None}]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (as_json("{}", "{"), "not JSON"),
        (as_json("1", "[" * 100_000), "not JSON"),
        (as_json('"\\ud83d\\ude00"', '["\\ud83d"]'), "not JSON .*surrogates"),
        (pa.array([[], [(b"k", 1)]], pa.map_(pa.binary(), pa.int64())), "neither text nor a number"),
        (as_json("1", "1" * 5000), "not JSON .*digits"),
        (pa.array([0, 2**62], pa.timestamp("s")), "int too large"),
        (pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([1, 2])], ["a", "a"]), "duplicate field names"),
    ],
)
def test_what_cannot_be_read_names_row_and_column(array: pa.Array, words: str) -> None:
    with pytest.raises(ValueError, match=f"^f, row [01], column 'x' cannot be read: .*({words})"):
        list(values(pa.table({"x": array}), ["f, row 0", "f, row 1"]))


def test_text_in_a_column_of_lists_or_objects_is_their_json() -> None:
    assert parsed('[{"a": null}]', "here") == [{"a": None}]
    assert [parsed(value, "here") for value in (None, "", " \n", "null", [1], {"a": 1})] == [*[None] * 4, [1], {"a": 1}]
    for text in ("What is 1+1?", "42", '"x"', "true"):
        with pytest.raises(ValueError, match="^here: .*a list or an object"):
            parsed(text, "here")


def test_arrays_of_pandas_and_nulls_of_its_rows() -> None:
    cell = {"a": np.array([{"b": np.int64(3), "c": None}, {"b": None, "c": (1, None)}], dtype=object)}
    assert plain(cell) == {"a": [{"b": 3, "c": None}, {"b": None, "c": [1, None]}]}
    assert without_nulls(plain(cell)) == {"a": [{"b": 3}, {"c": [1, None]}]}
