import itertools
import json
import math
import re
import statistics
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.rows import SCHEMA
from pipeline.track.metrics import (
    Stat,
    best_at_k,
    iteration_metrics,
    log_prob_gap,
    maj_at_n,
    merge,
    reduce,
    validation_metrics,
)

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def table(*rows: dict) -> pa.Table:
    made = []
    for row in rows:
        n = row.get("n", 2)
        made.append(
            dict.fromkeys(SCHEMA.names)
            | {
                "split": "train",
                "chunk": 0,
                "iteration": 3,
                "prompt_ids": [1, 2],
                "response_ids": [5] * n,
                "response_mask": [1] * n,
                "advantages": [0.5] * n,
                "returns": [0.25] * n,
                "finish_reason": "stop",
                "policy_version": 2,
                "score": 0.0,
                "reward_s": 0.5,
                "generate_s": 2.0,
                "load_s": 0.1,
            }
            | {k: v for k, v in row.items() if k != "n"}
        )
    return pa.Table.from_pylist(made, schema=SCHEMA)


ROWS = (
    {"uid": "a", "score": 1.0, "n": 2},
    {"uid": "a", "score": 1.0, "n": 4, "finish_reason": "length", "prompt_ids": [1] * 5},
    {"uid": "b", "score": 0.1, "n": 3, "response_mask": [1, 0, 1], "advantages": [-2.0, 0.0, 1.0], "chunk": 1},
    {"uid": "b", "score": 1.0, "n": 0, "policy_version": 1, "chunk": 1, "generate_s": 4.0},
    {"uid": "c", "score": 0.0, "n": 1, "chunk": 2, "reward_s": 0.25},
    {
        "uid": "c", "score": 0.0, "n": 1, "chunk": 2, "reward_s": 0.25, "reward_error": "x", "response_mask": [0],
        "finish_reason": "abort",
    },
)  # fmt: skip


def test_iteration_metrics_by_hand():
    got = reduce([iteration_metrics(table(*ROWS))])
    expected = {
        "critic/score/mean": 3.1 / 5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 3.1 / 5,
        "critic/advantages/mean": (0.5 * 2 + 0.5 * 4 - 2 + 1 + 0.5) / 9,
        "critic/advantages/max": 1.0,
        "critic/advantages/min": -2.0,
        "critic/returns/mean": 0.25,
        "response_length/mean": 11 / 6,
        "response_length/max": 4,
        "response_length/min": 0,
        "response_length/clip_ratio": 1 / 6,
        "response/aborted_ratio": 1 / 6,
        "prompt_length/mean": 15 / 6,
        "prompt_length/max": 5,
        "prompt_length/min": 2,
        "reward/error_rate": 1 / 6,
        "reward/solved_all": 1 / 3,
        "reward/solved_none": 1 / 3,
        "reward/equal_groups": 2 / 3,
        "training/policy_version": 11 / 6,
        "training/staleness/mean": 1 / 6,
        "training/staleness/max": 1,
        "training/staleness/min": 0,
        "timing_s/reward": 0.5 + 0.5 + 0.25,
        "rollout/generate_s/mean": 14 / 6,
        "rollout/generate_s/max": 4.0,
        "rollout/load_s/max": 0.1,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_solved_threshold():
    assert reduce([iteration_metrics(table(*ROWS), solved_at=0.1)])["reward/solved_all"] == pytest.approx(2 / 3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_ranks_merge_to_what_one_process_computes(ranks):
    """Groups a, b, c on any ranks; a rank may have none."""
    parts = [[row for row in ROWS if ranks["abc".index(row["uid"])] == rank] for rank in range(3)]
    merged = reduce(iteration_metrics(table(*part)) for part in parts)
    assert merged == pytest.approx(reduce([iteration_metrics(table(*ROWS))]))


def test_nothing_observed_is_left_out():
    assert reduce([]) == {} and reduce([iteration_metrics(table())]) == {}
    failed = reduce([iteration_metrics(table({"uid": "a", "reward_error": "x", "response_mask": [0, 0]}))])
    assert failed["reward/error_rate"] == 1.0 and failed["response_length/mean"] == 2
    assert "critic/score/mean" not in failed and "critic/advantages/mean" not in failed
    assert "reward/solved_all" not in failed
    assert reduce([{"x": Stat("mean", (0.0, 0.0))}]) == {}


def test_kinds_must_agree():
    with pytest.raises(ValueError, match="'x' is a max in one part and a min in another"):
        merge([{"x": Stat("max", (1.0,))}, {"x": Stat("min", (1.0,))}])


log_probs = st.floats(-8, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(log_probs, log_probs, st.booleans(), st.integers(0, 2)), min_size=1, max_size=40))
def test_gap_against_plain_formulas_whatever_the_split(tokens):
    def gap(some):
        return log_prob_gap(*(np.array([t[i] for t in some], dtype=np.float64) for i in range(3)))

    got = reduce(gap([t for t in tokens if t[3] == part]) for part in range(3))
    kept = [(e, t) for e, t, keep, _ in tokens if keep]
    if not kept:
        assert got == {}
        return
    p, q = [math.exp(e) for e, _ in kept], [math.exp(t) for _, t in kept]
    diffs = [abs(a - b) for a, b in zip(p, q, strict=True)]
    logs = [abs(e - t) for e, t in kept]
    assert got["training/rollout_probs_diff_mean"] == pytest.approx(statistics.fmean(diffs))
    assert got["training/rollout_probs_diff_max"] == pytest.approx(max(diffs), abs=1e-15)
    assert got["training/rollout_probs_diff_std"] == pytest.approx(statistics.pstdev(diffs), abs=1e-12)
    assert got["training/rollout_log_probs_diff_mean"] == pytest.approx(statistics.fmean(logs))
    assert got["training/rollout_log_probs_diff_max"] == max(logs)
    if len(kept) > 1 and statistics.pstdev(p) > 1e-4 and statistics.pstdev(q) > 1e-4:
        expected = statistics.correlation(p, q)
        assert got["training/rollout_actor_probs_pearson_corr"] == pytest.approx(expected, abs=1e-6)


def test_gap_of_equal_tensors_and_of_constants():
    same = torch.tensor([-1.0, -2.0, -0.5])
    got = reduce([log_prob_gap(same, same.clone(), torch.ones(3))])
    assert got["training/rollout_log_probs_diff_max"] == 0.0
    assert got["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    for n in (2, 3, 7, 10, 100):  # the rounded mean of some of these differs from the constant
        constant, other = torch.full((n,), math.log(0.1)), -torch.arange(1.0, n + 1)
        parts = [log_prob_gap(constant, other, torch.ones(n)), log_prob_gap(constant[:1], other[:1], torch.ones(1))]
        assert "training/rollout_actor_probs_pearson_corr" not in reduce(parts)


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_gap_that_is_no_number_is_infinite(bad):
    got = reduce([log_prob_gap([-1.0, bad, bad], [-1.0, -2.0, bad], [1, 1, 0])])
    assert got["training/rollout_log_probs_diff_max"] == math.inf
    assert not any(math.isnan(value) for value in got.values())
    both = reduce([log_prob_gap([bad], [bad], [1])])
    assert both["training/rollout_log_probs_diff_max"] == math.inf


def test_gap_ignores_what_the_mask_hides():
    got = reduce([log_prob_gap([-1.0, float("nan")], [-1.5, 0.0], [1, 0])])
    assert got["training/rollout_log_probs_diff_max"] == 0.5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=7), st.integers(1, 7))
def test_best_at_k_is_the_mean_over_all_subsets(scores, k):
    subsets = list(itertools.combinations(scores, min(k, len(scores))))
    assert best_at_k(scores, k) == pytest.approx(statistics.fmean(max(s) for s in subsets), abs=1e-12)


def test_best_at_k_of_solved_or_not_is_pass_at_k():
    scores = [1.0] * 3 + [0.0] * 7
    assert best_at_k(scores, 4) == pytest.approx(1 - math.comb(7, 4) / math.comb(10, 4))


def test_maj_by_hand():
    assert maj_at_n([1, 0, 1, 0], ["x", "y", "x", "z"]) == 1.0
    assert maj_at_n([1, 0, 0, 0], ["x", "y", "y", "z"]) == 0.0
    assert maj_at_n([1, 0, 1, 0, 0.5], ["x", "y", "x", "y", "z"]) == 0.5  # a tie of right and wrong
    assert maj_at_n([1.0, 0.5, 0.0], ["x", "x", "y"]) == 0.75  # one answer, scored unequally


def validation(*rows: tuple) -> pa.Table:
    """Rows of source, uid, score, response, reward_parts, reward_error."""
    names = ("data_source", "uid", "score", "response", "reward_parts", "reward_error")
    made = [dict(zip(names, (*row, None, None)[:6], strict=True)) for row in rows]
    return pa.Table.from_pylist(made, schema=pa.schema([SCHEMA.field(name) for name in names]))


def pred(answer) -> str:
    return json.dumps({"pred": answer})


VALIDATION = validation(
    ("s", "a", 1.0, "long way to 7", pred("7")),
    ("s", "a", 1.0, "short way to 7", pred("7")),
    ("s", "a", 0.0, "8", pred("8")),
    ("s", "a", 0.0, "no answer", pred(None)),
    ("s", "b", 0.0, " same ", None),
    ("s", "b", 0.0, "same", json.dumps({"format": 1})),
    ("s", "b", 1.0, "other"),
    ("s", "b", 0.0, "third"),
    ("dir/t", "a", 0.5, "x"),
)


def test_validation_by_hand():
    got = reduce([validation_metrics(VALIDATION)])
    assert got == pytest.approx(
        {
            "val-core/s/reward/mean@4": 3 / 8,
            "val-core/s/reward/best@4/mean": 1.0,
            "val-core/s/reward/maj@4/mean": 0.5,
            "val-aux/s/reward/worst@4/mean": 0.0,
            "val-aux/s/reward/std@4": (0.5 + math.sqrt(3 / 16)) / 2,
            "val-aux/s/reward/best@2/mean": (5 / 6 + 3 / 6) / 2,
            "val-aux/s/reward/worst@2/mean": (1 / 6 + 0) / 2,
            "val-aux/s/reward/error_rate": 0.0,
            "val-core/dir/t/reward/mean@1": 0.5,
            "val-core/dir/t/reward/best@1/mean": 0.5,
            "val-core/dir/t/reward/maj@1/mean": 0.5,
            "val-aux/dir/t/reward/error_rate": 0.0,
        }
    )


def test_validation_merges_over_ranks():
    uid = np.array(VALIDATION["uid"].to_pylist())
    parts = [VALIDATION.filter(pa.array(uid == u)) for u in ("b", "a", "none")]
    assert reduce(validation_metrics(part) for part in parts) == pytest.approx(reduce([validation_metrics(VALIDATION)]))


def test_failed_validation_rows_are_counted_and_left_out():
    got = reduce(
        [
            validation_metrics(
                validation(
                    ("s", "a", 1.0, "x"),
                    ("s", "a", 0.0, "y", None, "TimeoutError"),
                    ("s", "b", 0.0, "x", None, "TimeoutError"),
                    ("s", "b", 0.0, "x", None, "TimeoutError"),
                )
            )
        ]
    )
    assert got["val-aux/s/reward/error_rate"] == 0.75
    assert got["val-core/s/reward/mean@2"] == 1.0
    only = reduce([validation_metrics(validation(("s", "a", 0.0, "x", None, "TimeoutError")))])
    assert only == {"val-aux/s/reward/error_rate": 1.0}


def test_a_source_is_judged_by_acc_where_the_reward_gives_one():
    def right(acc):
        return json.dumps({"acc": acc})

    got = reduce([validation_metrics(validation(("s", "a", 1.0, "x", right(1)), ("s", "b", 0.1, "y", right(0))))])
    assert got["val-core/s/acc/mean@1"] == 0.5
    assert got["val-aux/s/reward/mean@1"] == pytest.approx(0.55)
    assert not [name for name in got if name.startswith("val-core/s/reward")]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8))
def test_with_one_response_all_equal_the_mean(scores):
    rows = [("s", f"u{i}", score, "x") for i, score in enumerate(scores)]
    got = reduce([validation_metrics(validation(*rows))])
    core = {name: value for name, value in got.items() if name.startswith("val-core")}
    assert len(core) == 3
    assert all(value == pytest.approx(statistics.fmean(scores)) for value in core.values())


def documented(section: str) -> set[str]:
    """Names in the first column of the tables of a section, braces written out."""
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    assert text, f"docs/metrics.md has no section {section!r}"
    names: set[str] = set()
    for name in re.findall(r"^\| `([^`]+)`", text.group(1), re.MULTILINE):
        choices = re.search(r"\{([\w,]+,[\w,]+)\}", name)
        options = choices.group(1).split(",") if choices else [""]
        names |= {name.replace(choices.group(0), option) if choices else name for option in options}
    return names


def test_documented_names_are_the_names_produced():
    rows = reduce([iteration_metrics(table(*ROWS))])
    assert documented("Rows") == set(rows)
    gap = reduce([log_prob_gap([-1.0, -2.0], [-1.1, -2.2], [1, 1])])
    assert documented("Engine and trainer") == set(gap)
    made = {
        name.replace("/s/", "/{source}/").replace("@4", "@N").replace("@2", "@K")
        for name in reduce([validation_metrics(VALIDATION)])
        if "/s/" in name
    }
    assert documented("Validation") == made
