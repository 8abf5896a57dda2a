"""Which change of a file shows, and what is said of it."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from pipeline.storage.filesystem import filesystem_of
from pipeline.storage.fingerprints import BLOCK, END, FILE, Fingerprints, load, mark, marks

LOCAL = pafs.LocalFileSystem()


def of(**settings: dict[str, str]) -> Fingerprints:
    return Fingerprints(prompts=settings)


@pytest.mark.parametrize("size", [0, 1, 1000, END, 2 * END - 1])
def test_a_small_file_is_read_as_a_whole(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    before = mark(LOCAL, str(path))
    assert before.startswith(f"{size} bytes ") and before == mark(LOCAL, str(path))
    content = bytearray(path.read_bytes())
    for place in {0, size // 2, size - 1} if size else ():
        content[place] ^= 1
        path.write_bytes(content)
        assert mark(LOCAL, str(path)) != before
        content[place] ^= 1
    path.write_bytes(bytes(content) + b"x")
    assert mark(LOCAL, str(path)) != before


@pytest.mark.parametrize("changed", [0, END - 1, -END, -1], ids=["first", "end of head", "begin of tail", "last"])
def test_both_ends_of_a_large_file_are_read(tmp_path: Path, changed: int) -> None:
    path = tmp_path / "file"
    content = bytearray(5 * END)
    path.write_bytes(content)
    before = mark(LOCAL, str(path))
    content[changed] ^= 1
    path.write_bytes(content)
    assert mark(LOCAL, str(path)) != before


def test_of_the_middle_blocks_are_read_and_not_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(64 * END)
    before, changed = mark(LOCAL, str(path)), 0
    for place in range(2 * END, 62 * END, 4 * END):
        with path.open("r+b") as file:
            # Longer than the distance of two blocks.
            file.seek(place)
            file.write(b"x" * 4 * END)
        changed += mark(LOCAL, str(path)) != before
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes(4 * END))
    assert changed == 15
    with path.open("r+b") as file:
        file.seek(END + BLOCK + 1)
        file.write(b"x")
    assert mark(LOCAL, str(path)) == before, "a mark is no hash of the whole"


def test_the_whole_header_of_safetensors_is_read(tmp_path: Path) -> None:
    """It names all tensors, and may be longer than the end of a file that is read."""

    def write(name: str) -> str:
        header = json.dumps({"a": "x" * 2 * END, name: 1}).encode()
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8 * END))
        return mark(LOCAL, str(path))

    assert write("layer.0") == write("layer.0") != write("layer.1")


def test_a_header_that_lies_about_its_length(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + bytes(3 * END))
    assert mark(LOCAL, str(path)).startswith(f"{3 * END + 8} bytes ")


def test_files_of_a_store_have_the_same_marks(tmp_path: Path) -> None:
    content = os.urandom(1000)
    filesystem, path = filesystem_of("memory://marks/file")
    filesystem.create_dir("/marks")
    with filesystem.open_output_stream(path) as file:
        file.write(content)
    (tmp_path / "file").write_bytes(content)
    assert mark(filesystem, path) == mark(LOCAL, str(tmp_path / "file"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"{tmp_path}/gone cannot be read"):
        marks([("gone", LOCAL, f"{tmp_path}/gone")])


def test_files_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    found = marks([("rows.parquet", LOCAL, f"{tmp_path}/a"), ("rows.parquet", LOCAL, f"{tmp_path}/b")])
    assert list(found) == ["rows.parquet", "rows.parquet (2)"] and len(set(found.values())) == 2


A, B, LONGER = "5 bytes aa", "5 bytes bb", "7 bytes cc"


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ({"x": A}, {"x": B}, "x has other content"),
        ({"x": A}, {"x": LONGER}, "x has 7 bytes and had 5"),
        ({"x": A}, {"x": A, "y": B}, "y is new"),
        ({"x": A, "y": B}, {"x": A}, "y is gone"),
        ({"x": A, "y": B}, {"y": B, "x": A}, "the same files in another order"),
        ({"x": A}, {}, "x is gone"),
        ({"x": A, "y": B}, {"x": B, "y": LONGER}, "x has other content, y has 7 bytes and had 5"),
        # Rows come by the files' order and content.
        ({"x": A, "y": B}, {"p": A, "q": B}, None),
        ({"x": A}, {"x": A}, None),
    ],
)
def test_how_prompt_files_differ(was: dict[str, str], now: dict[str, str], said: str | None) -> None:
    assert of(f=was).changes(of(f=now), "prompts") == ({"f": said} if said else {})


def test_names_count_in_a_model_and_their_order_does_not() -> None:
    was = Fingerprints({"model.path": {"x": A, "y": B}})
    assert not was.changes(Fingerprints({"model.path": {"y": B, "x": A}}), "model")
    changed = was.changes(Fingerprints({"model.path": {"x": A, "z": B}}), "model")
    assert changed == {"model.path": "y is gone, z is new"}


def test_many_files_are_counted() -> None:
    was = {f"{number}.parquet": A for number in range(9)}
    text = of(f=was).changes(of(f=dict.fromkeys(was, B)), "prompts")["f"]
    assert text.endswith("5.parquet has other content, and 3 more")


def test_a_setting_without_marks_is_not_compared() -> None:
    """It is newer than the run, or its file was written by the run."""
    assert not of().changes(of(f={"x": A}), "prompts")


def test_commits_of_the_hub() -> None:
    was = Fingerprints({"model.path": {"commit": "abc"}})
    assert not was.changes(Fingerprints(), "model"), "no cache says which it is now"
    assert was.changes(Fingerprints({"model.path": {"commit": "def"}}), "model") == {
        "model.path": "the commit on the Hub is def and was abc"
    }


def test_what_was_accepted_stays_on_record(tmp_path: Path) -> None:
    first = Fingerprints({"m": {"x": A}}, {"f": {"x": A}}, began="then")
    second = first.continued(of(f={"x": B}), 4, {"f": "x has other content"})
    second.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]
    third = load(str(tmp_path))
    assert third == second and third.began == "then" and third.model == {"m": {"x": A}}
    assert third.prompts == {"f": {"x": B}}
    assert third.history == "since iteration 5: f (x has other content)"
    assert third.continued(of(f={"x": B}), 6, {}) == third
    last = third.continued(of(f={"x": A}), 8, {"f": "x is back"})
    assert last.history == "since iteration 5: f (x has other content); since iteration 9: f (x is back)"


def test_a_file_that_the_code_writes_is_none_that_it_reads() -> None:
    """A log or a cache that an option names is there from the second start on, and grows."""
    first = Fingerprints(code={"reward": {"x": A}})
    second = first.continued(Fingerprints(code={"reward": {"x": B}, "reward_kwargs.log": {"log": A}}), 4, {})
    assert second.code == {"reward": {"x": B}}
    assert not second.changes(Fingerprints(code={"reward": {"x": B}, "reward_kwargs.log": {"log": B}}), "code")


def test_which_settings_have_marks() -> None:
    known = Fingerprints({"model.path": {}}, code={"reward.functions.a.path": {}})
    found = {key: known.covers(key) for key in ("model.path", "reward.functions", "reward.functions.b", "model.pa")}
    assert found == {"model.path": True, "reward.functions": True, "reward.functions.b": False, "model.pa": False}


@pytest.mark.parametrize("content", ["", "[", "[]", '{"other": 1}'])
def test_a_damaged_file_is_refused(tmp_path: Path, content: Any) -> None:
    assert load(str(tmp_path)) is None
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/{FILE} is damaged .*delete it to go on without comparing"):
        load(str(tmp_path))
