"""The word lint counts turns in docstrings and comments, and not in code, quoted or not."""

from collections import Counter

from tests.words import Text, found, without_code


def counts(text: str) -> dict[str, int]:
    return dict(+Counter(found(Text("a.py", 1, without_code(text)))))


def test_turns_are_counted_in_any_case() -> None:
    assert counts("Where there is no file, those of the run.") == {"where": 1, "is no": 1, "of which": 1}
    assert counts("The file of the run.") == {}


def test_beginnings_are_those_of_docstrings() -> None:
    assert counts("Whether it runs.") == {"begins with what": 1}
    assert counts("# Whether it runs.") == counts("True if it runs, whether or not.") == {}


def test_code_is_no_prose() -> None:
    assert counts("Calls `torch.where` and ``beside``.") == {}
