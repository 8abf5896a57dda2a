"""`python -m jobs.prepare countdown`: solvable, distinct, deterministic, and refused where it cannot be."""

import json
from collections import Counter
from fractions import Fraction
from itertools import combinations_with_replacement, islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.prepare import parquet
from jobs.prepare import puzzles as puzzles_module
from jobs.prepare.__main__ import main
from jobs.prepare.puzzles import Ranges, permute, puzzles_of
from pipeline.reward.rules.countdown import compute_score, evaluate, tokenize


def prepare(out: Path, *options: str) -> None:
    assert main(["countdown", "--out", str(out), *options]) == 0


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    truth = row["reward_model"]["ground_truth"]
    return (*sorted(truth["numbers"]), truth["target"])


def reachable(numbers: tuple[int, ...]) -> set[int]:
    """Values of all expressions whose steps are positive whole numbers, by brute force on pairs."""
    if len(numbers) == 1:
        return {numbers[0]}
    found = set()
    for i in range(len(numbers)):
        for j in range(len(numbers)):
            if i != j:
                a, b = numbers[i], numbers[j]
                rest = tuple(n for place, n in enumerate(numbers) if place not in (i, j))
                steps = [a + b, a * b, *([a - b] if a > b else []), *([a // b] if a % b == 0 else [])]
                for step in steps:
                    found |= reachable((step, *rest))
    return found


def test_files_in_verls_format(tmp_path: Path) -> None:
    prepare(tmp_path, "--train", "300", "--test", "40", "--template", "short", "--seed", "3")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["test.parquet", "train.parquet"]
    for split, count in (("train", 300), ("test", 40)):
        rows = read(tmp_path / f"{split}.parquet")
        assert len(rows) == count
        for index, row in enumerate(rows):
            truth = row["reward_model"]["ground_truth"]
            assert (row["data_source"], row["ability"], row["reward_model"]["style"]) == ("countdown", "math", "rule")
            assert (row["extra_info"]["split"], row["extra_info"]["index"]) == (split, index)
            spaced = " ".join(map(str, truth["numbers"]))
            assert row["prompt"] == [{"role": "user", "content": f"Numbers: {spaced}. Target: {truth['target']}."}]
            assert 10 <= truth["target"] <= 99 and all(1 <= n <= 99 for n in truth["numbers"])
    types = pq.read_schema(tmp_path / "train.parquet").field("reward_model").type.field("ground_truth").type
    assert str(types) == "struct<target: int64, numbers: list<element: int64>>"


@settings(max_examples=25)
@given(
    count=st.sampled_from([2, 3, 4, 5]),
    low=st.integers(1, 40),
    width=st.integers(0, 60),
    target=st.integers(1, 500),
    seed=st.integers(0, 10**6),
)
def test_every_solution_scores_and_its_mutations_do_not(
    count: int, low: int, width: int, target: int, seed: int
) -> None:
    ranges = Ranges(low, low + width, target, target + 300)
    for puzzle in islice(puzzles_of(count, ranges, seed), 20):
        truth = {"target": puzzle.target, "numbers": list(puzzle.numbers)}
        assert len(puzzle.numbers) == count and target <= puzzle.target <= target + 300

        def score(expression: str, truth: dict[str, Any] = truth) -> float:
            return compute_score(f"<answer> {expression} </answer>", truth)["score"]

        assert score(puzzle.solution) == 1.0
        assert score(puzzle.solution, {**truth, "target": puzzle.target + 1}) == 0.1
        assert score(puzzle.solution, {**truth, "numbers": [n + 1 for n in puzzle.numbers]}) == 0.1
        assert score(f"{puzzle.solution} + {puzzle.numbers[0]}") == 0.1
        assert score(puzzle.solution.replace(str(puzzle.numbers[0]), str(puzzle.target + 10**6), 1)) == 0.1
        steps = [step.split(" = ") for step in puzzle.steps.split(", ")]
        assert len(steps) == count - 1 and steps[-1][1] == str(puzzle.target)
        for left, right in steps:
            assert evaluate(tokenize(left)) == Fraction(int(right)) > 0


@pytest.mark.parametrize(("count", "high", "targets"), [(2, 6, (1, 36)), (3, 5, (4, 30)), (4, 3, (2, 20))])
def test_stream_holds_every_solvable_puzzle_once(count: int, high: int, targets: tuple[int, int]) -> None:
    found = Counter((*sorted(p.numbers), p.target) for p in puzzles_of(count, Ranges(1, high, *targets), seed=1))
    expected = {
        (*numbers, target)
        for numbers in combinations_with_replacement(range(1, high + 1), count)
        for target in reachable(numbers)
        if targets[0] <= target <= targets[1]
    }
    assert set(found) == expected and set(found.values()) == {1}


def test_no_puzzle_twice_nor_in_two_files(tmp_path: Path) -> None:
    # These ranges hold 974 puzzles, so drawing by chance would repeat many.
    options = ["--numbers", "3", "--max-number", "8", "--min-target", "1", "--max-target", "20", "--template", "short"]
    prepare(tmp_path, "--train", "700", "--test", "100", "--sft", "100", "--sft-test", "50", *options)
    keys = [key(row) for split in ("train", "test") for row in read(tmp_path / f"{split}.parquet")]
    for split in ("sft_train", "sft_test"):
        for row in read(tmp_path / f"{split}.parquet"):
            words = row["messages"][0]["content"].replace(".", "").split()
            keys.append((*sorted(int(n) for n in words[1:4]), int(words[5])))
    assert len(keys) == 950 == len(set(keys))


def test_deterministic_and_independent_of_the_other_files(tmp_path: Path) -> None:
    first, again, more, other = (tmp_path / name for name in ("first", "again", "more", "other"))
    prepare(first, "--train", "500", "--test", "50", "--seed", "5")
    prepare(again, "--train", "500", "--test", "50", "--seed", "5")
    prepare(more, "--train", "700", "--test", "50", "--seed", "5", "--sft", "60")
    prepare(other, "--train", "500", "--test", "50", "--seed", "6")
    for name in ("train.parquet", "test.parquet"):
        assert (first / name).read_bytes() == (again / name).read_bytes()
        assert read(first / name) == read(more / name)[:500]
        assert not {key(row) for row in read(first / name)} <= {key(row) for row in read(other / name)}


def test_mix_of_sizes(tmp_path: Path) -> None:
    prepare(tmp_path, "--train", "2000", "--test", "1", "--numbers", "3,4", "--mix", "3,1")
    sizes = Counter(len(row["reward_model"]["ground_truth"]["numbers"]) for row in read(tmp_path / "train.parquet"))
    assert set(sizes) == {3, 4} and 0.70 < sizes[3] / 2000 < 0.80


@pytest.mark.parametrize(
    ("options", "opening"),
    [
        (["--template", "short"], "<think> "),
        (["--template", "base"], " "),
        (["--template", "chat", "--sft-solution", "answer"], "<answer> "),
    ],
)
def test_sft_files_hold_correct_solutions(tmp_path: Path, options: list[str], opening: str) -> None:
    prepare(tmp_path, "--train", "5", "--test", "5", "--sft", "40", *options)
    prompts = read(tmp_path / "train.parquet")
    assert len(read(tmp_path / "sft_train.parquet")) == 40 and len(read(tmp_path / "sft_test.parquet")) == 2
    for row in read(tmp_path / "sft_train.parquet"):
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert user["content"][:9] == prompts[0]["prompt"][0]["content"][:9]
        assert assistant["content"].startswith(opening)
        answer = assistant["content"].split("<answer>")[1].removesuffix("</answer>")
        tokens = tokenize(answer)
        numbers = [token for token in tokens if isinstance(token, int)]
        truth = {"target": int(evaluate(tokens)), "numbers": numbers}
        assert compute_score(assistant["content"], truth)["score"] == 1.0
        assert str(truth["target"]) in user["content"] and all(str(n) in user["content"] for n in numbers)
        if "<answer>" not in opening:
            assert f"= {truth['target']} </think>\n<answer>" in assistant["content"]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--train", "0"], "--train is 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--sft", "5", "--sft-test", "0"], "--sft-test is 0"),
        (["--numbers", "3,x"], "--numbers"),
        (["--numbers", "3,3"], "--numbers is 3,3"),
        (["--mix", "1"], "--mix is 1"),
        (["--mix", "nan,1"], "--mix is nan,1"),
        (["--min-number", "0"], "--min-number 0"),
        (["--min-target", "9", "--max-target", "8"], "--max-target 8"),
        (["--max-number", "100000"], "--max-number 100000 is too large: a product of 4"),
        (["--template", "none"], "--template"),
        (["--template", "base", "--sft", "5", "--sft-solution", "answer"], "--sft-solution answer"),
        (["--numbers", "2", "--max-number", "4"], "only 2 distinct puzzles of 2 numbers"),
    ],
)
def test_bad_options_give_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], part: str
) -> None:
    out = tmp_path / "out"
    argv = ["countdown", "--out", str(out), "--train", "20", "--test", "5", *options]
    try:
        code = main(argv)
    except SystemExit as exit:
        code = int(exit.code or 0)
    assert code == 2
    (sentence,) = capfd.readouterr().err.strip().splitlines()
    assert sentence.startswith("python -m jobs.prepare countdown: ") and part in sentence
    assert not out.exists() or not list(out.iterdir())


def test_stream_gives_up_where_puzzles_are_too_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    visited = 0

    def counted(index: int, size: int, keys: list[int]) -> int:
        nonlocal visited
        visited += 1
        assert visited < 10_000, "the stream goes on"
        return permute(index, size, keys)

    monkeypatch.setattr(puzzles_module, "permute", counted)
    monkeypatch.setattr(puzzles_module, "MAX_DRY_SETS", 2000)
    assert list(puzzles_of(3, Ranges(10**5, 10**6, 7, 7), seed=0)) == []
    assert visited >= 2000


def test_rows_are_written_in_groups_and_not_held(tmp_path: Path) -> None:
    made = 0

    def rows() -> Any:
        nonlocal made
        for _ in range(3 * parquet.ROW_GROUP + 1):
            made += 1
            yield {"messages": [{"role": "user", "content": json.dumps(made)}]}
            yield None

    path = tmp_path / "x.parquet"
    assert parquet.write(path, parquet.SFT, rows()) == (3 * parquet.ROW_GROUP + 1, 3 * parquet.ROW_GROUP + 1)
    metadata = pq.ParquetFile(tmp_path / "x.parquet").metadata
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sizes == [parquet.ROW_GROUP] * 3 + [1]
