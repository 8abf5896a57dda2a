"""The end of the demo: figures and answers, before and after the training."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from pipeline.track.before_after import ANSWERS, MEMORY, answers, figures
from tests.recordings import record
from tests.track.run_folders import write_run

VALIDATION = "val-core/sums/acc/mean@1"
GAP = "training/rollout_log_probs_diff"


def text(table: Table, width: int = 120) -> str:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(table)
    return shown.get()


def cells(table: Table, column: int) -> list[str]:
    return [str(cell) for cell in table.columns[column].cells]


def test_figures_are_the_first_and_the_last(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"iteration": 0, VALIDATION: 0.125, "elapsed_s": 60.0}]
    for iteration in range(1, 4):
        record = {"iteration": iteration, "elapsed_s": 60.0 + 10 * iteration, "critic/score/mean": 0.2 * iteration}
        record |= {f"{GAP}_mean": 0.01 * iteration, f"{GAP}_max": 0.5 * iteration, "timing_s/step": 5.0 + iteration}
        records.append(record | {MEMORY: {1: 4.0, 2: 6.8, 3: 5.0}[iteration]})
    records[-1][VALIDATION] = 0.73
    table, facts = figures(write_run(tmp_path / "run", *records))
    assert list(zip(*(cells(table, column) for column in range(3)), strict=True)) == [
        ("validation sums", "0.125", "0.73"),
        ("training reward", "0.2", "0.6"),
        ("log-prob gap, largest", "0.5", "1.5"),
        ("log-prob gap, mean", "0.01", "0.03"),
    ]
    assert facts == "3 iterations in 1:30, 7.0 s each (median), a train worker took 6.8 GiB"
    assert all(len(line) <= 80 for line in text(table, 80).splitlines())


def test_a_run_without_an_iteration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no iteration"):
        figures(tmp_path)


def validated(folder: Path) -> Path:
    """A run with validation rows of versions 0 and 7; the later one lacks a prompt."""
    for version, response, score in ((0, "17 + 25 = 32\n", 0.0), (7, "42", 1.0)):
        truth, prompt = json.dumps("42"), json.dumps([{"role": "user", "content": "What is 17 + 25?"}])
        changes = {"split": "val", "chunk": -1, "iteration": version, "response": response, "score": score}
        record(folder, [version], **changes, prompt=prompt, ground_truth=truth)
    return folder


def test_the_same_prompts_are_answered_by_both_versions(tmp_path: Path) -> None:
    table = answers(validated(tmp_path), 0, 7)
    assert [column.header for column in table.columns] == [
        "prompt",
        "truth",
        "version 0",
        "score",
        "version 7",
        "score",
    ]
    rows = list(zip(*(cells(table, column) for column in range(6)), strict=True))
    assert set(rows) == {("What is 17 + 25?", "42", "17 + 25 = 32", "0", "42", "1")}
    assert len(rows) == 4 < ANSWERS
    assert "What is 17 + 25?" in text(table)


def test_long_texts_and_hidden_characters_are_shortened_and_shown(tmp_path: Path) -> None:
    record(tmp_path, [0], split="val", chunk=-1, iteration=0, response="a\x1b[2J\n" + "b" * 300, score=None)
    table = answers(tmp_path, 0, 0)
    [shown, *_] = cells(table, 2)
    assert len(shown) == 60 and shown[0] == "…" and cells(table, 3)[0] == "failed"
    record(tmp_path, [1], split="val", chunk=-1, iteration=1, response="a\x1b[2J\nb")
    assert cells(answers(tmp_path, 1, 1), 2)[0] == "a\\x1b[2J⏎b"
