"""What an evaluation shows."""

import io
import re
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from pipeline.evaluate.report import print_table, rows, tracked
from pipeline.evaluate.summary import Summary
from pipeline.rows import SPANS
from tests.evaluate.test_summary import TABLE, responses, summed


def printed(summary: Summary, width: int = 80) -> list[list[str]]:
    """Words of each line that the table has."""
    console = Console(file=io.StringIO(), width=width)
    print_table(summary, console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().replace("┃", "│").splitlines()
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]


LINES = [
    ["", "s", "t", "all"],
    ["mean", "0.1667", "0.8333", "0.3889"],
    ["pass@2", "0.3333", "1.0000", "0.5556"],
    ["pass@3", "0.5000", "1.0000", "0.6667"],
    ["maj@3", "0.0000", "1.0000", "0.3333"],
    ["prompts", "2", "1", "3"],
    ["responses", "6", "3", "9"],
    ["reward failed", "33.3%", "0.0%", "22.2%"],
    ["tokens", "3.0", "3.7", "3.2"],
    ["cut off", "16.7%", "0.0%", "11.1%"],
]


@pytest.mark.parametrize("width", [80, 20])
def test_every_source_and_all_together(width: int) -> None:
    assert printed(summed((1, 2, 3), TABLE), width) == LINES


def test_a_single_source_is_all_there_is() -> None:
    assert printed(summed((1,), responses(("s", "a", 1.0, "x"))))[:3] == [
        ["", "s"],
        ["mean", "1.0000"],
        ["prompts", "1"],
    ]
    failed = printed(summed((1,), responses(("s", "a", 0.0, "x", None, "no"))))
    assert failed[1] == ["mean", "-"] and ["reward failed", "100.0%"] in failed


def test_answers_without_acc_are_shown_if_there_are_some() -> None:
    rows = ("s", "a", 1.0, "x", '{"acc": 1}'), ("s", "b", 1.0, "x")
    assert ["without acc", "50.0%"] in printed(summed((1,), responses(*rows)))


def test_episodes_have_turns() -> None:
    made = responses(("s", "a", 1.0, "x"), ("s", "b", 1.0, "x"))
    made = made.append_column("spans", pa.array([[{"kind": 1, "tokens": 1}]] * 2, SPANS))
    assert ["turns", "2.5"] in printed(summed((1,), made.append_column("turns", pa.array([2, 3], pa.int32()))))


def test_names_for_trackers() -> None:
    summary = summed((1, 3), TABLE)
    names = tracked(summary)
    assert names["eval/s/pass@3"] == 0.5 and names["eval/t/score/mean"] == summary.by_source()["t"]["score/mean"]
    assert names["eval-all/mean"] == summary.overall()["mean"]
    assert "eval/s/acc/missing_rate" not in names and len(names) == 3 * len(summary.overall()) - 1
    assert [row["source"] for row in rows(summary)] == ["s", "t", "all"] and rows(summary)[1]["judged_by"] == "acc"


def test_names_of_sources_stay_apart() -> None:
    names = ("a", "a/score", "all", "[red]x", "数学")
    summary = summed((1,), responses(*((name, f"u{number}", number, "x") for number, name in enumerate(names))))
    found = tracked(summary)
    assert len(found) == 6 * len(summary.overall())
    assert (found["eval/a/score/mean"], found["eval/a/score//mean"], found["eval-all/score/mean"]) == (0, 1, 2)
    assert printed(summary)[0] == ["", "[red]x", "a", "a/score", "all", "数学", "all together"]


def test_the_page_lists_every_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "after_training.md").read_text()
    page = page.split("### Metrics of an evaluation")[1].split("\n#")[0]
    named = {name for row in re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE) for name in re.findall("`(.+?)`", row)}
    made = summed((3,), TABLE).overall()
    assert named == {name.replace("@3", "@K") for name in made} | {"turns/mean"}
