"""Read the tests of a programming problem from its ground truth, and judge the results of test runs."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from pipeline.reward.sandbox import grammar
from pipeline.reward.sandbox.answers import Answers, NoValue
from pipeline.reward.sandbox.forms import Refused
from pipeline.reward.sandbox.grammar import Assertions
from pipeline.reward.sandbox.inside import values
from pipeline.reward.sandbox.outcome import LIMITS, ProgramRun

TOLERANCE = 1e-6  # of numbers with a decimal point, relative above 1
# Answers are read only up to the size of right ones: a packed result is at most so many times as long as in JSON or
# Python. Results that asserts calculate with may be longer; the asserts of a row share the bytes that are read of them.
MAX_GROWTH = 32
MIN_RESULT = 4096  # bytes
MAX_CALCULATED = 2 << 20  # bytes
WHERE = "reward_model.ground_truth of a code row"


@dataclass(frozen=True)
class Test:
    """One test: its job in the sandbox (see `runner.run_tests`), and the expected result."""

    job: dict[str, Any]
    expected: Any
    """Expected output of a script, expected return value of a call, or `Assertions`."""
    most: int = 0
    """Maximum number of bytes that are read of the results of calls."""

    def failure(self, outcome: ProgramRun) -> str:
        """Return the reason why the run fails the test, in a few words; "" if it passes."""
        if self.job["kind"] == "script":
            return outcome.failure or ("" if same_text(outcome.stdout, self.expected) else "wrong answer")
        # Results from before the time limit still count.
        if outcome.ended in LIMITS and outcome.ended != "time":
            return outcome.failure
        if isinstance(self.expected, Assertions):
            return self.expected.failure(Answers(outcome, self.most))
        try:
            value, wanted = Answers(outcome, self.most)[0], self.expected
            # Some data sets wrap a single result in a list.
            wrapped = isinstance(wanted, list) and len(wanted) == 1 and _same_value(value, wanted[0])
            return "" if wrapped or _same_value(value, wanted) else "wrong answer"
        except NoValue as error:
            return str(error)
        except (OverflowError, ValueError):  # of a number as a float, or as a key
            return "wrong answer"


def read(ground_truth: Any) -> list[Test]:
    """Read the tests of a ground truth.

    Args:
        ground_truth: data or JSON text in one of these forms. `{"inputs": [...], "outputs": [...]}`: standard input and
            output of each test. The same with `"fn_name"`: arguments and return values of this function.
            `{"assert_case": [...]}` or a list: Python code with `assert` (`grammar.py`). If `assert_case` is there,
            inputs and outputs are not used.

    Raises:
        ValueError: the ground truth has another form, or its assertions cannot be judged (the cause is `Refused`).
    """
    data = ground_truth
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except ValueError:
            data = [data]
    if isinstance(data, list):
        return _asserts(_several(data, "it"), "")
    if not isinstance(data, dict):
        raise ValueError(f"{WHERE} must hold inputs and outputs, or asserts, not be a {type(data).__name__}")
    asserts = data.get("assert_case") or []
    asserts = [asserts] if isinstance(asserts, str) else asserts
    if not isinstance(asserts, list):
        raise ValueError(f"{WHERE}: assert_case must be a list of pieces of Python, not a {type(asserts).__name__}")
    asserts = [source for source in asserts if not (isinstance(source, str) and not source.strip())]
    if asserts:
        return _asserts(asserts, "assert_case")
    inputs, outputs = _several(data.get("inputs"), "inputs"), _several(data.get("outputs"), "outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"{WHERE} has {len(inputs)} inputs but {len(outputs)} outputs; each input needs its output")
    name = data.get("fn_name")
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"{WHERE}: fn_name must be the name of a function, not {str(name)[:100]!r}")
    tests = []
    for i, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)):
        if name is None:
            script = {"kind": "script", "stdin": _text(given, f"inputs[{i}]")}
            tests.append(Test(script, _text(wanted, f"outputs[{i}]")))
        else:
            call = json.dumps([name, _arguments(given, f"inputs[{i}]"), ["d"]])
            result = _result(wanted)
            most = MIN_RESULT + MAX_GROWTH * len(json.dumps(result))
            tests.append(Test({"kind": "calls", "stdin": "", "calls": [call]}, result, most))
    return tests


def same_text(printed: str, expected: str) -> bool:
    """Return True if two outputs have the same words on the same lines; empty lines at the end do not count.

    Numbers with a decimal point or exponent may differ by `TOLERANCE`, which is absolute if a whole number is expected.
    """
    got, wanted = printed.rstrip().splitlines(), expected.rstrip().splitlines()
    if len(got) != len(wanted):
        return False
    for line, right in zip(got, wanted, strict=True):
        words, right_words = line.split(), right.split()
        if len(words) != len(right_words):
            return False
        if not all(a == b or _close_words(a, b) for a, b in zip(words, right_words, strict=True)):
            return False
    return True


_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def _close_words(got: str, wanted: str) -> bool:
    if len(got) > 40 or len(wanted) > 40 or not any(sign in wanted + got for sign in ".eE"):
        return False
    # `float` also reads `1_0.0`, digits of other scripts, and words.
    if not _DECIMAL.fullmatch(got) or not _DECIMAL.fullmatch(wanted):
        return False
    try:
        if any(sign in wanted for sign in ".eE"):
            return _close(float(got), float(wanted))
        return abs(float(got) - int(wanted)) <= TOLERANCE
    except (ValueError, OverflowError):
        return False


def _close(got: float, wanted: float) -> bool:
    return got == wanted or (math.isfinite(wanted) and abs(got - wanted) <= TOLERANCE * max(1.0, abs(wanted)))


def _same_value(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        if not isinstance(got, list | tuple) or len(got) != len(wanted):
            return False
        return all(_same_value(a, b) for a, b in zip(got, wanted, strict=True))
    if isinstance(wanted, dict):
        if not isinstance(got, dict):
            return False
        # JSON's keys are text.
        items = {str(key): item for key, item in got.items()}
        return items.keys() == wanted.keys() and all(_same_value(items[key], item) for key, item in wanted.items())
    if isinstance(wanted, float) and isinstance(got, int | float):
        return _close(float(got), wanted)
    return isinstance(got, str | int | float | bool | None) and bool(got == wanted)


def _several(data: Any, key: str) -> list[Any]:
    if not isinstance(data, list) or not data:
        shown = "missing" if data is None else f"{str(data)[:100]!r}"
        raise ValueError(f"{WHERE}: {key} must be a list with at least one test, but is {shown}")
    return data


def _asserts(sources: list[Any], key: str) -> list[Test]:
    tests = []
    for i, source in enumerate(sources):
        if not isinstance(source, str):
            raise ValueError(f"{WHERE}: {key}[{i}] must be Python with an assert, not {str(source)[:100]!r}")
        try:
            assertions = grammar.read(source)
        except Refused as error:
            raise ValueError(
                f"{WHERE}: {key}[{i}] cannot be judged: {error}. Write calls of the program's functions with literals, "
                "compared with values (`slipstream docs rewards`), or leave the row out"
            ) from error
        most = MAX_CALCULATED // len(sources) + MAX_GROWTH * len(source)
        tests.append(Test({"kind": "calls", "stdin": "", "calls": list(assertions.calls)}, assertions, most))
    return tests


def _text(data: Any, key: str) -> str:
    if isinstance(data, list) and all(isinstance(line, str | int | float) for line in data):
        return "\n".join(str(line) for line in data)
    if isinstance(data, int | float) and not isinstance(data, bool):
        return str(data)
    if not isinstance(data, str):
        raise ValueError(f"{WHERE}: {key} must be text or a list of lines, not a {type(data).__name__}")
    return data


def _arguments(given: Any, key: str) -> Any:
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(
                f"{WHERE}: {key} must have an argument in JSON on each line, but is {given[:100]!r}: {error}"
            ) from error
    if not isinstance(given, list):
        raise ValueError(f"{WHERE}: {key} must be a list of arguments, not a {type(given).__name__}")
    try:
        return values.pack(given)
    except ValueError as error:
        raise ValueError(f"{WHERE}: {key} has a value that JSON cannot hold: {error}") from error


def _result(wanted: Any) -> Any:
    if not isinstance(wanted, str):
        return wanted
    try:
        return json.loads(wanted)
    except ValueError:
        return wanted
