"""GSM8K's own solutions under its rule: each right for its problem, and wrong for a problem with another answer.

A sample of the data set is part of the tests; `SLIPSTREAM_GSM8K=FOLDER`, with the whole `train.jsonl` and `test.jsonl`
in it, runs all 8,792 problems.
"""

import json
import os
from pathlib import Path

import pytest

from pipeline.reward.rules import rule_of
from pipeline.reward.rules.gsm8k import compute_score

SAMPLE = Path(__file__).parents[2] / "data" / "gsm8k"
FOLDER = Path(os.environ.get("SLIPSTREAM_GSM8K") or SAMPLE)


@pytest.fixture(scope="module")
def problems() -> list[tuple[str, str]]:
    """Solution and answer of each problem; the answer is read without the rule."""
    found = []
    for name in ("train.jsonl", "test.jsonl"):
        for line in (FOLDER / name).read_text().splitlines():
            solution = json.loads(line)["answer"]
            found.append((solution, solution.rpartition("#### ")[2].replace(",", "")))
    return found


def test_each_solution_is_right_for_its_problem_and_wrong_for_others(problems: list[tuple[str, str]]) -> None:
    rule = rule_of("openai/gsm8k")
    assert len(problems) == (200 if FOLDER == SAMPLE else 8792)
    for place, (solution, answer) in enumerate(problems):
        assert rule(solution, answer) == {"score": 1.0, "acc": 1, "format": 1, "pred": answer}, (solution, answer)
        assert compute_score(solution, answer, "strict")["score"] == 1.0
        said = f"{solution.rpartition('####')[0]}The answer is {answer}."
        assert compute_score(said, answer)["score"] == 1.0 and compute_score(said, answer, "strict")["score"] == 0.0
        for step in (1, 7, 100):
            other = problems[(place + step) % len(problems)][1]
            assert compute_score(solution, other)["score"] == float(float(other) == float(answer)), (solution, other)
