"""Ground truths of code rows: the forms they have, and which outcomes are right."""

import json
from typing import Any

import pytest

from pipeline.reward.sandbox.forms import Refused
from pipeline.reward.sandbox.inside import values
from pipeline.reward.sandbox.outcome import ProgramRun
from pipeline.reward.sandbox.truth import MAX_CALCULATED, read, same_text
from tests.bounds import bounded

STDIN = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"]}


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_inputs_and_outputs(form: Any) -> None:
    tests = read(form(STDIN))
    assert [test.job for test in tests] == [{"kind": "script", "stdin": "1\n"}, {"kind": "script", "stdin": "2\n"}]
    assert [test.expected for test in tests] == ["1\n", "2\n"]
    (test,) = read(form({"inputs": [["1", "2"]], "outputs": [3]}))
    assert (test.job["stdin"], test.expected) == ("1\n2", "3")


def test_functions() -> None:
    tests = read({"fn_name": "add", "inputs": ["1\n[2]", [3, 4]], "outputs": ["[3]", 7]})
    given = [json.loads(call) for test in tests for call in test.job["calls"]]
    assert given == [["add", ["l", 1, ["l", 2]], ["d"]], ["add", ["l", 3, 4], ["d"]]]
    assert [test.expected for test in tests] == [[3], 7]
    assert read({"fn_name": None, **STDIN})[0].job["kind"] == "script"


def test_asserts_take_the_place_of_inputs() -> None:
    one, two = read({**STDIN, "assert_case": ["assert f(1) == 2", " ", "assert f(3)"]})
    job = {"kind": "calls", "stdin": "", "calls": ['["f", ["l", 1], ["d"]]']}
    assert one.job == job and two.job == job | {"calls": ['["f", ["l", 3], ["d"]]']}
    assert read({**STDIN, "assert_case": ["", ""]})[0].job["kind"] == "script"
    assert read({"assert_case": "assert f(1) == 5"})[0].job == job
    assert len(read(["assert f(1)", "assert f(2)"])) == len(read('["assert f(1)", "assert f(2)"]')) == 2
    assert read("def check(g):\n  assert g(1)\ncheck(f)")[0].job == job


def test_what_is_expected_is_in_no_job() -> None:
    """Jobs are all that enters the sandbox."""
    for truth in (
        ["assert f(1) == 'canary' and f(2) < 3.125", "assert 'canary' in f(4), 'canary'"],
        {"fn_name": "f", "inputs": [[1]], "outputs": ["canary"]},
        {"inputs": ["1"], "outputs": ["canary"]},
    ):
        assert not any(word in json.dumps([test.job for test in read(truth)]) for word in ("canary", "3.125"))


def test_all_asserts_of_a_row_share_what_is_read() -> None:
    for count in (1, 3, 100):
        assert sum(test.most for test in read(["assert f(1)"] * count)) <= MAX_CALCULATED + count * 1000


def test_one_assert_that_cannot_be_judged_refuses_the_row() -> None:
    with pytest.raises(ValueError, match=r"\[1\] cannot be judged: `isinstance`.*slipstream docs rewards") as error:
        read(["assert f(1) == 2", "assert isinstance(f(1), int)"])
    assert isinstance(error.value.__cause__, Refused) and error.value.__cause__.form == "`isinstance`"


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        (None, "NoneType"),
        ("3", "a int"),
        ([], "at least one test"),
        ({}, "inputs"),
        ({"inputs": [], "outputs": []}, "inputs"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs but 1 outputs"),
        ({"inputs": [{"a": 1}], "outputs": ["1"]}, r"inputs\[0\] must be text"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, r"inputs\[0\] must have an argument in JSON"),
        ({"inputs": [1], "outputs": ["1"], "fn_name": "f"}, r"inputs\[0\] must be a list"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f()"}, "fn_name"),
        (["assert f("], r"\[0\] cannot be judged: text that is not Python"),
        (["f(1) == 2"], "a statement that asserts nothing"),
        ([3], "with an assert"),
        ({"assert_case": {"a": 1}}, "assert_case must be a list"),
        ("nothing", "a statement that asserts nothing"),
    ],
)
def test_a_ground_truth_that_is_none_is_named(truth: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"reward_model.ground_truth of a code row.*{words}"):
        read(truth)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1_0.0", "10.0", False),
        ("1_0.0", "10", False),
        ("\uff11.0", "1.0", False),
        ("1.0", "1_0.0e-1", False),
        ("+1.0", "1.0", True),
        ("1.", "1.0", True),
        ("Infinity", "1e999", False),
        ("1\n2\n", "1\n2", True),
        ("1  2", "1 2", True),
        ("1\n\n2", "1\n2", False),
        ("Yes", "YES", False),
        ("0.3333333", "0.33333333", True),
        ("1.0", "1", True),
        ("1000000.1", "1000000", False),
        ("5.00000e8", "500000123", False),
        ("1000002", "1000000", False),
        ("1e3", "1000", True),
        ("nan", "1.5", False),
        ("inf", "inf", True),
        ("Case #1: 2.50", "Case #1: 2.5", True),
        ("", "1", False),
        ("1." + "0" * 10**6, "1", False),
    ],
)
def test_outputs_are_compared_by_lines_and_words(printed: str, expected: str, same: bool) -> None:
    assert same_text(printed, expected) is same


@pytest.mark.parametrize(
    ("result", "expected", "same"),
    [
        (3, 3, True),
        (3, [3], True),
        ((1, 2), [1, 2], True),
        ([1, [2, (3,)]], [1, [2, [3]]], True),
        ({1, 2}, [1, 2], False),
        ({1: "a"}, {"1": "a"}, True),
        ({"1": "b"}, {"1": "a"}, False),
        (0.1 + 0.2, 0.3, True),
        ("3", 3, False),
        (float("nan"), 1.0, False),
        (10**400, 1.0, False),
    ],
)
def test_results_are_compared_as_data(result: Any, expected: Any, same: bool) -> None:
    (test,) = read({"fn_name": "f", "inputs": [[]], "outputs": [expected]})
    text = json.dumps({"value": values.pack(result)}).encode() + b"\n"
    assert (test.failure(ProgramRun("exit", result=text)) == "") is same


@pytest.mark.parametrize(
    "text",
    [
        '{"value": ["h", 0, "x"]}',
        '{"value": ["d", 1]}',
        '{"value": {"a": 1}}',
        '{"value": ["s", ["l"]]}',
        '{"value": ' + "9" * 5000 + "}",
        '{"value": ' + "[" * 2000 + "]" * 2000 + "}",
        '{"value": ["l"], "value": ["l"' + ", 1" * 10_000_000 + "]}",
        '{"value": ["l"]} {"value": ["l"]}',
        "{}",
        "\0",
    ],
)
def test_a_result_that_is_no_data_is_wrong(text: str) -> None:
    (test,) = read({"fn_name": "f", "inputs": [[]], "outputs": [[]]})
    with bounded():
        assert test.failure(ProgramRun("exit", result=text.encode() + b"\n")).startswith("an answer that is ")


def test_reasons_of_failures_are_short() -> None:
    (test,) = read({"inputs": [""], "outputs": ["1"]})
    assert test.failure(ProgramRun("exit", 0, "1\n")) == ""
    assert test.failure(ProgramRun("exit", 0, "2\n")) == "wrong answer"
    assert (
        test.failure(ProgramRun("exit", 1, "1\n", "Traceback\n\nValueError: no\n")) == "exit status 1: ValueError: no"
    )
    assert test.failure(ProgramRun("exit", -9, "1\n")) == "ended by SIGKILL"
    assert test.failure(ProgramRun("time", None, "1\n")) == "time limit exceeded"
    assert len(test.failure(ProgramRun("exit", 1, "", "x" * 10**6))) <= 200
    (test,) = read(["assert f(1)"])
    assert test.failure(ProgramRun("exit", 0)) == "the program ended before it had answered"
    # What was answered in time counts.
    assert test.failure(ProgramRun("time", result=b'{"value": 1}\n')) == ""
    assert test.failure(ProgramRun("time", result=b'{"value": 1}')) == "time limit exceeded"
    assert test.failure(ProgramRun("output", result=b'{"value": 1}\n')) == "output limit exceeded"
