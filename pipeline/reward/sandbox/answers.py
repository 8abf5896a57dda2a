"""A program's answers to the calls of a test, as plain data.

The program makes the text, which may be longer, deeper or stranger than JSON has to be. Reading it costs at most as
much as a right answer of `most` bytes.
"""

import json
from typing import Any

from pipeline.reward.sandbox.inside import values
from pipeline.reward.sandbox.outcome import MAX_REASON, ProgramRun


class NoValue(Exception):
    """Error of a call without a value. The message is the reason in a few words."""


class Answers:
    """Values by the number of their call."""

    def __init__(self, outcome: ProgramRun, most: int) -> None:
        """Split the program's result; `most` bounds the bytes of all answers together."""
        self._lines = outcome.result[:most].split(b"\n")
        self._cut = len(outcome.result) > most
        self._why = outcome.failure or "the program ended before it had answered"
        self._known: dict[int, Any] = {}

    def __getitem__(self, number: int) -> Any:
        """Return the value of a call. Raises `NoValue` if it has none."""
        if number not in self._known:
            self._known[number] = self._read(number)
        return self._known[number]

    def _read(self, number: int) -> Any:
        # The text after the last line end is empty, or an unfinished answer.
        if number >= len(self._lines) - 1:
            raise NoValue("an answer that is longer than any right one" if self._cut else self._why)
        try:
            answer = json.loads(self._lines[number])
            if "value" in answer:
                return values.unpack(answer["value"])
            reason = answer.get("other") or answer["error"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
            raise NoValue("an answer that is not plain data") from None
        raise NoValue(str(reason)[:MAX_REASON])
