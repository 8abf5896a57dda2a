"""The file of sentences is read as it was written, names tests that exist, and another word fails a test."""

import re
from pathlib import Path

import pytest

from tests.sentences import FILE, Named, of_other_files, plain, read, written

ROOT = Path(__file__).parents[1]
SOME = {
    "tests/x/test_y.py::test_z": {"a=1": ["a=1 must be 2", "a: \\n- b"], "- b": []},
    "tests/y.py::test": {"-": ["c"]},
}


def test_what_is_written_is_read() -> None:
    assert read(written(SOME)) == SOME


def test_the_file_is_in_its_own_form_and_its_tests_exist() -> None:
    found = read(FILE.read_text())
    assert found and written(found) == FILE.read_text()
    for test in found:
        file, name = test.split("::")
        text = (ROOT / file).read_text()
        assert re.search(rf"^def {name}\([^)]*\bnamed\b", text, re.MULTILINE), test


def test_other_words_a_missing_key_and_one_sentence_too_many_fail() -> None:
    expected = ["a.b=1 must be 2"]
    Named(expected, ROOT)("a.b=1 must be 2", "a.b")
    with pytest.raises(AssertionError, match="make docs"):
        Named(expected, ROOT)("a.b=1 should be 2", "a.b")
    for keys in ("a.c", "a.b c.d", ""):
        with pytest.raises(AssertionError):
            Named(expected, ROOT)("a.b=1 must be 2", keys)
    twice = Named(expected, ROOT)
    twice("a.b=1 must be 2", "a.b")
    with pytest.raises(AssertionError, match="make docs"):
        twice("a.b=1 must be 2", "a.b")


def test_what_differs_from_run_to_run_is_left_out(tmp_path: Path) -> None:
    text = f"{tmp_path}/a: x\n{ROOT}/b at 0x7f3a12345678"
    assert plain(text, tmp_path.parent) == "/folder/a: x\\n/repository/b at 0x..."


def test_sentences_of_files_that_did_not_run_are_kept() -> None:
    known = read(FILE.read_text())
    own = {test for test in known if test.startswith("tests/plan/test_checks.py::")}
    kept = of_other_files({test: known[test] for test in list(own)[:1]})
    assert own and kept == {test: cases for test, cases in known.items() if test not in own}
