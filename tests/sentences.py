"""The sentences with which checks refuse and warn, all in one file: `sentences.txt` beside this one.

A test asserts the keys that a sentence names; the words are compared with the file. `make docs` writes the file from
the sentences that the tests produce, so a better sentence is a diff of that file.
"""

import re
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".txt")
ROOT = Path(__file__).parents[1]
HEAD = "# Written by `make docs` from the tests: the sentences of checks, by test and case. Read the diff.\n"
EXPECTED = "keys"
"""The parameter of a test that has what a sentence must name; the other parameters tell one case from another."""

Sentences = dict[str, dict[str, list[str]]]
"""By test and case, in the order in which the test produced them."""


def read(text: str) -> Sentences:
    """The sentences of the file's text."""
    found: Sentences = {}
    for line in text.splitlines():
        if line.startswith("tests/"):
            cases = found.setdefault(line, {})
        elif line.startswith("  - "):
            sentences = cases.setdefault(line[4:], [])
        elif line.startswith("    "):
            sentences.append(line[4:])
    return found


def written(sentences: Sentences) -> str:
    """The text of a file with these sentences."""
    lines = [HEAD]
    for test, cases in sorted(sentences.items()):
        lines.append(test)
        for case, found in cases.items():
            lines += [f"  - {case}", *(f"    {sentence}" for sentence in found)]
    return "\n".join(lines) + "\n"


def of_other_files(sentences: Sentences) -> Sentences:
    """Return the file's sentences of the test files that did not run, unless they are gone."""
    ran = {test.partition("::")[0] for test in sentences}
    known = read(FILE.read_text()).items()
    files = ((test, cases, test.partition("::")[0]) for test, cases in known)
    return {test: cases for test, cases, file in files if file not in ran and (ROOT / file).exists()}


def plain(text: object, folder: Path) -> str:
    """`text` on one line, without what differs from run to run: `folder` holds the folders of all tests."""
    shown = re.sub(rf"{re.escape(str(folder))}/[\w.-]+", "/folder", str(text).replace(str(ROOT), "/repository"))
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", shown).replace("\n", "\\n")


def case_of(test: pytest.Item) -> str:
    """What tells a case of a test from its others: the values of its parameters without what it expects."""
    call = getattr(test, "callspec", None)
    values = [] if call is None else [value for name, value in call.params.items() if name != EXPECTED]
    return " ".join(map(str, values)).replace("\n", "\\n") or "-"


class Named:
    """Asserts what sentences name, and that their words are those of the file.

    Args:
        expected: the file's sentences of this test and case; None if they are to be written.
        folder: the folder that holds the folders of all tests.
    """

    def __init__(self, expected: list[str] | None, folder: Path) -> None:
        self.sentences: list[str] = []
        self._expected = expected
        self._folder = folder

    def __call__(self, sentence: object, keys: str) -> None:
        """`keys`: the settings, files, rows or columns that the sentence must name, with spaces between them."""
        missing = [key for key in keys.split() if key not in str(sentence)]
        assert keys and not missing, f"{missing} not named in: {sentence}"
        text, count = plain(sentence, self._folder), len(self.sentences)
        self.sentences.append(text)
        if self._expected is not None:
            expected = self._expected[count] if count < len(self._expected) else "no sentence"
            assert text == expected, "the words differ from tests/sentences.txt: run `make docs` and read the diff"
