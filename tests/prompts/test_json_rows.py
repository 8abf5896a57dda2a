import gzip
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.prompts import json_rows
from pipeline.prompts.files import data_sources, resolve
from pipeline.prompts.prompt_file import Slice

KEY = "data.train_files"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def opened(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    (file,) = resolve(path, KEY)
    return pickle.loads(pickle.dumps(file))


def every(file):
    """(place, row) of all rows."""
    slices = [Slice(number, 0, rows) for number, rows in enumerate(file.row_groups)]
    for part, batch in file.read(slices, []):
        for number in range(len(batch)):
            place = file.place(part.row_group, part.start + number)
            yield place, file.row(batch, number, place)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("json")


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(), VALUES, max_size=3), min_size=1, max_size=12),
    blank=st.lists(st.integers(0, 12), max_size=4),
    end=st.sampled_from(["\n", "\r\n"]),
    ending=st.sampled_from(["", "\n", "\n\n"]),
    bom=st.booleans(),
    name=st.sampled_from(["a.jsonl", "a.jsonl.gz"]),
    sizes=st.tuples(st.integers(1, 50), st.integers(1, 5), st.integers(1, 99)),
)
def test_every_line_is_found_whatever_is_read_at_once(scratch, rows, blank, end, ending, bom, name, sizes):
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    for place in blank:
        lines.insert(place, " ")
    content = (json_rows.BOM if bom else b"") + (end.join(lines) + ending).encode()
    with pytest.MonkeyPatch.context() as patch:
        for constant, size in zip(("READ_BYTES", "BLOCK_ROWS", "BLOCK_BYTES"), sizes, strict=True):
            patch.setattr(json_rows, constant, size)
        file = opened(scratch / name, content)
        found = list(every(file))
    assert [row for _, row in found] == rows
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    assert [(place.row, place.line) for place, _ in found] == list(enumerate(numbers))
    assert max(file.row_groups) <= sizes[1]


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(), VALUES, max_size=3), min_size=1, max_size=12),
    indent=st.sampled_from([None, 1, "\t"]),
    ascii=st.booleans(),
    bom=st.booleans(),
    name=st.sampled_from(["b.json", "b.json.gz"]),
    sizes=st.tuples(st.integers(8, 50), st.integers(1, 5), st.integers(1, 99)),
)
def test_every_element_of_a_list_is_found(scratch, rows, indent, ascii, bom, name, sizes):
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii)
    with pytest.MonkeyPatch.context() as patch:
        for constant, size in zip(("READ_BYTES", "BLOCK_ROWS", "BLOCK_BYTES"), sizes, strict=True):
            patch.setattr(json_rows, constant, size)
        file = opened(scratch / name, (json_rows.BOM if bom else b"") + b"\n " + text.encode())
        found = list(every(file))
    assert [row for _, row in found] == rows
    assert [(place.row, place.line) for place, _ in found] == [(i, None) for i in range(len(rows))]


def test_only_the_blocks_that_are_asked_for_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "BLOCK_ROWS", 3)
    file = opened(tmp_path / "a.jsonl", b"".join(b'{"n": %d}\n' % i for i in range(10)))
    assert file.row_groups == (3, 3, 3, 1)
    read = list(file.read([Slice(3, 0, 1), Slice(1, 1, 3)], []))
    assert [part for part, _ in read] == [Slice(1, 1, 3), Slice(3, 0, 1)]
    assert [file.row(b, i, None)["n"] for _, b in read for i in range(len(b))] == [4, 5, 9]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', "it is not valid JSON: JSONDecodeError"),
        (b"[1]", "it is a list where an object is needed"),
        (b'"x"', "it is a str where an object is needed"),
        (b"\xff\xfe", "it is not valid JSON"),
        (b"[" * 100_000, "it is not valid JSON: RecursionError"),
        (b'{"a": "\\ud800"}', "it is not valid JSON: UnicodeEncodeError"),
        (b'{"a": ' + b"9" * 9999 + b"}", "it is not valid JSON"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, message):
    file = opened(tmp_path / "a.jsonl", b'{"a": "\\ud83d\\ude00"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2 \(row 1, row group 0\): {message}"):
        list(every(file))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"a": 1}, {"a": ', r"row 1, which begins at byte 11: "),
        ("a.json", b'[{"a": 1}, {"a": 2}', r"row 1, which begins at byte 11: it breaks off"),
        ("a.json", b'[{"a": 1}, nonsense]', r"row 1, which begins at byte 11: Expecting value"),
        ("a.json", b"[" * 100_000, "Recursion"),
        ("a.jsonl.gz", b"no gzip", "cannot be read as JSON: BadGzipFile"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000)[:40], "cannot be read as JSON: EOFError"),
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"\n \n", "has no rows"),
        ("a.json", b"[]", "has no rows"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"data\.train_files: .*{name}.*{message}"):
        resolve(tmp_path / name, KEY)


@pytest.mark.parametrize("content", [b'{"a": 1' + b" " * 400, b'[{"a": 1' + b" " * 400 + b"}]"])
def test_a_row_without_end_is_refused_before_memory_is_gone(tmp_path, monkeypatch, content):
    monkeypatch.setattr(json_rows, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(json_rows, "READ_BYTES", 10)
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read as JSON: .*(line 1 is longer than 100|row 0, which begins)"):
        resolve(tmp_path / "a.json", KEY)


@pytest.mark.parametrize("after", [b'{"a": 1}\n{"b": 22}\n', b'{"a": 1}' + b" " * 11 + b"\n"])
def test_a_file_that_changes_during_the_run(tmp_path, after):
    file = opened(tmp_path / "a.jsonl", b'{"a": 1}\n{"b": 2}  \n')
    (tmp_path / "a.jsonl").write_bytes(after)
    with pytest.raises(
        OSError, match=r"a\.jsonl, row group 0: could not be read, though it was .* the file (now )?has"
    ):
        list(every(file))


def test_members_of_a_gzip_file_follow_one_another(tmp_path):
    path = Path(tmp_path / "a.jsonl.gz")
    path.write_bytes(gzip.compress(b'{"n": 0}\n') + gzip.compress(b'{"n": 1}\n'))
    assert [row["n"] for _, row in every(resolve(path, KEY)[0])] == [0, 1]


def test_data_sources(tmp_path):
    good = b'{"data_source": "x"}\n{"data_source": "y"}\n'
    assert data_sources([opened(tmp_path / "a.jsonl", good)]) == ["x", "y"]
    for bad, message in (
        (b"{}", "`data_source` is null or no text"),
        (b'{"data_source": 5}', "`data_source` is null or no text"),
        (b"nonsense", "it is not valid JSON"),
    ):
        file = opened(tmp_path / "b.jsonl", good + bad)
        with pytest.raises(ValueError, match=rf"b\.jsonl, line 3 .*{message}"):
            data_sources([file])
        assert data_sources([file], allow_missing=True) == ["x", "y"]
