"""Read the return values of a program's functions, for the calls of a test, as plain data.

The text comes from the program under test, so it may be hostile: very long, deeply nested or invalid JSON. Only its
first `most` bytes are read, so reading it costs no more than a right result of that size.
"""

import json
from typing import Any

from pipeline.reward.sandbox.inside import values
from pipeline.reward.sandbox.outcome import MAX_REASON, ProgramRun


class NoValue(Exception):
    """Error for a call without a return value. The message is the reason in a few words."""


class Answers:
    """Return values by the number of the call, from 0."""

    def __init__(self, outcome: ProgramRun, most: int) -> None:
        """Split the output of a run into the results of calls.

        Args:
            outcome: the run of the program.
            most: maximum number of bytes that are read, for all calls together.
        """
        self._lines = outcome.result[:most].split(b"\n")
        self._cut = len(outcome.result) > most
        self._why = outcome.failure or "the program ended before it had answered"
        self._known: dict[int, Any] = {}

    def __getitem__(self, number: int) -> Any:
        """Return the return value of call `number`. Raises `NoValue` if the call has none."""
        if number not in self._known:
            self._known[number] = self._read(number)
        return self._known[number]

    def _read(self, number: int) -> Any:
        # The text after the last line end is empty, or an incomplete result.
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
