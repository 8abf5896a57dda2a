"""Text of models cannot command a terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.track.printable import KEPT, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\bc\x7f", "a\\rb\\x08c\\x7f"),
        ("\u202etxt.exe\u2066", "\\u202etxt.exe\\u2066"),
        ("line\u2028line\U000e0041", "line\\u2028line\\U000e0041"),
        ("\ud800", "\\ud800"),
        ("two\nlines\tand 日本 é 👩‍💻", "two\nlines\tand 日本 é 👩‍💻"),
    ],
)
def test_what_is_no_letter_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(alphabet=st.characters(codec=None)))
def test_no_control_character_comes_through(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert not [each for each in shown if each not in KEPT and unicodedata.category(each) in ("Cc", "Cf", "Cs")]
