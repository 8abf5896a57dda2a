"""Metrics of rows and of log-probs, against hand-worked numbers and plain formulas, however the work is split."""

import json
import math
import statistics

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.rows import SCHEMA
from pipeline.stats import Stat, merge, reduce
from pipeline.track.metrics import MOST_PARTS, iteration_metrics, log_prob_gap, missing_rates, without_metric


def table(*rows: dict) -> pa.Table:
    """Finished rows of iteration 3 with all columns; `n` is the number of response tokens."""
    made = []
    for row in rows:
        n = row.get("n", 2)
        made.append(
            dict.fromkeys(SCHEMA.names)
            | {
                "split": "train",
                "chunk": 0,
                "iteration": 3,
                "epoch": 0,
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
        "uid": "c", "score": 0.0, "n": 1, "chunk": 2, "reward_s": 0.25, "reward_error": "x",
        "drop_reason": "reward_error", "finish_reason": "abort",
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
        "response_length/mean": 10 / 6,
        "response_length/max": 4,
        "response_length/min": 0,
        "response_length/clip_ratio": 1 / 6,
        "response/aborted_ratio": 1 / 6,
        "response_length_non_aborted/mean": 9 / 5,
        "response_length_non_aborted/max": 4,
        "response_length_non_aborted/min": 0,
        "response_length_non_aborted/clip_ratio": 1 / 5,
        "prompt_length/mean": 15 / 6,
        "prompt_length/max": 5,
        "prompt_length/min": 2,
        "reward/error_rate": 1 / 6,
        "reward/solved_all": 1 / 3,
        "reward/solved_none": 1 / 3,
        "reward/equal_groups": 2 / 3,
        "training/global_step": 3,
        "training/epoch": 0,
        "training/policy_version": 11 / 6,
        "training/staleness/mean": 1 / 6,
        "training/staleness/max": 1,
        "training/staleness/min": 0,
        "training/staleness/over": 1 / 6,
        "timing_s/reward": 0.5 + 0.5 + 0.25,
        "rollout/generate_s/mean": 14 / 6,
        "rollout/generate_s/max": 4.0,
        "rollout/load_s/max": 0.1,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_ages_of_rows_are_shares_that_merge_over_ranks():
    rows = [{"uid": "a", "iteration": 9, "policy_version": version} for version in (8, 8, 7, 5)]
    # The other rank has none of some ages.
    ranks = [table(*rows), table(*[{"uid": "b", "iteration": 9, "policy_version": 7}] * 4)]
    got = reduce([iteration_metrics(rank, max_staleness=2) for rank in ranks])
    ages = {name: value for name, value in got.items() if name.startswith("training/staleness/")}
    assert ages == {
        "training/staleness/mean": (0 + 0 + 1 + 3 + 4 * 1) / 8,
        "training/staleness/max": 3,
        "training/staleness/min": 0,
        "training/staleness/over": 1 / 8,
        "training/staleness/share/0": 2 / 8,
        "training/staleness/share/1": 5 / 8,
        "training/staleness/share/2": 0,
    }


# The optional columns, as PPO with a KL in the reward and ReMax would leave them.
SCORED = (
    {
        "uid": "a", "score": 1.0, "reward": 0.75, "kl": 0.5, "kl_coef": 0.1, "baseline": 0.5, "epoch": 1,
        "values": [0.5, -1.5], "value_version": 2, "pi_version": 2,
    },
    {
        "uid": "a", "score": 0.0, "reward": -0.25, "kl": 1.0, "kl_coef": 0.2, "baseline": 0.5, "policy_version": 1,
        "n": 3, "response_mask": [1, 0, 1], "values": [0.25, 9.0, 1.25], "value_version": 1, "pi_version": 2,
    },
    {
        "uid": "b", "score": 0.0, "reward": 0.0, "reward_error": "x", "drop_reason": "reward_error", "kl_coef": 0.1,
        "values": [7.0, 7.0], "value_version": 2, "pi_version": 0,
    },
)  # fmt: skip


def test_optional_columns_by_hand():
    got = reduce([iteration_metrics(table(*SCORED))])
    expected = {
        "critic/score/mean": 0.5,
        "critic/rewards/mean": 0.25,
        "critic/rewards/max": 0.75,
        "critic/rewards/min": -0.25,
        "critic/values/mean": (0.5 - 1.5 + 0.25 + 1.25) / 4,
        "critic/values/max": 1.25,
        "critic/values/min": -1.5,
        "critic/baseline/mean": 0.5,
        "critic/baseline/max": 0.5,
        "critic/baseline/min": 0.5,
        "actor/reward_kl_penalty": 0.75,
        "actor/reward_kl_penalty_coeff": 0.2,
        "training/epoch": 1,
        "training/value_staleness/mean": 1 / 3,
        "training/value_staleness/max": 1,
        "training/value_staleness/min": 0,
        "training/pi_staleness/max": 2,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("missing", [True, False])
def test_without_optional_columns_there_are_no_metrics_of_them(missing):
    """Whether a column is not there or null throughout is the same."""
    rows = table(*ROWS)
    optional = ("reward", "kl", "baseline", "values", "value_version", "pi_version")
    got = reduce([iteration_metrics(rows.drop_columns(optional) if missing else rows)])
    assert got["critic/rewards/mean"] == got["critic/score/mean"]
    absent = ("critic/values", "critic/baseline", "actor/", "training/value", "training/pi")
    assert not [name for name in got if name.startswith(absent)]


def test_solved_threshold():
    assert reduce([iteration_metrics(table(*ROWS), solved_at=0.1)])["reward/solved_all"] == pytest.approx(2 / 3)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_ranks_merge_to_what_one_process_computes(ranks):
    """Groups a, b, c on any ranks; a rank may have none."""
    parts = [[row for row in ROWS if ranks["abc".index(row["uid"])] == rank] for rank in range(3)]
    merged = reduce(iteration_metrics(table(*part)) for part in parts)
    assert merged == pytest.approx(reduce([iteration_metrics(table(*ROWS))]))


def test_nothing_observed_is_left_out():
    assert reduce([]) == {} and reduce([iteration_metrics(table())]) == {}
    failed = reduce([iteration_metrics(table({"uid": "a", "reward_error": "x", "drop_reason": "reward_error"}))])
    assert failed["reward/error_rate"] == 1.0 and failed["response_length/mean"] == 2
    assert "critic/score/mean" not in failed and "critic/advantages/mean" not in failed
    assert "reward/solved_all" not in failed
    aborted = reduce([iteration_metrics(table({"uid": "a", "n": 0, "finish_reason": "abort"}))])
    assert aborted["response/aborted_ratio"] == 1 and aborted["response_length/mean"] == 0
    assert not [name for name in aborted if name.startswith("response_length_non_aborted")]
    assert reduce([{"x": Stat("mean", (0.0, 0.0))}]) == {}


def test_kinds_must_agree():
    with pytest.raises(ValueError, match="'x' is a max in one part and a min in another"):
        merge([{"x": Stat("max", (1.0,))}, {"x": Stat("min", (1.0,))}])


GAP = "training/rollout_log_probs_diff"

log_probs = st.floats(-8, 0)
places = st.integers(0, 300)


@settings(max_examples=60)
@given(st.lists(st.tuples(log_probs, log_probs, st.booleans(), st.integers(0, 2), places), min_size=1, max_size=40))
def test_gap_against_plain_formulas_whatever_the_split(tokens):
    def gap(some):
        return log_prob_gap(*(np.array([t[i] for t in some], dtype=np.float64) for i in (0, 1, 2, 4)))

    got = reduce(gap([t for t in tokens if t[3] == part]) for part in range(3))
    kept = [(e, t) for e, t, keep, _, _ in tokens if keep]
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
    for first, last in ((0, 15), (16, 63), (64, 255), (256, 1023)):
        inside = [abs(e - t) for e, t, keep, _, place in tokens if keep and first <= place <= last]
        found = got.get(f"training/rollout_log_probs_diff/from_{first}")
        assert found == (pytest.approx(statistics.fmean(inside)) if inside else None)
    if len(kept) > 1 and statistics.pstdev(p) > 1e-4 and statistics.pstdev(q) > 1e-4:
        expected = statistics.correlation(p, q)
        assert got["training/rollout_actor_probs_pearson_corr"] == pytest.approx(expected, abs=1e-6)


def test_gap_of_equal_tensors_and_of_constants():
    same = torch.tensor([-1.0, -2.0, -0.5])
    got = reduce([log_prob_gap(same, same.clone(), torch.ones(3), range(3))])
    assert got["training/rollout_log_probs_diff_max"] == 0.0
    assert got["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    for n in (2, 3, 7, 10, 100):  # the rounded mean of some of these differs from the constant
        constant, other = torch.full((n,), math.log(0.1)), -torch.arange(1.0, n + 1)
        parts = [
            log_prob_gap(constant, other, torch.ones(n), range(n)),
            log_prob_gap(constant[:1], other[:1], torch.ones(1), [0]),
        ]
        assert "training/rollout_actor_probs_pearson_corr" not in reduce(parts)


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_gap_that_is_no_number_is_infinite_where_the_mask_counts_it(bad):
    got = reduce([log_prob_gap([-1.0, bad, bad], [-1.0, -2.0, bad], [1, 1, 0], range(3))])
    assert got["training/rollout_log_probs_diff_max"] == math.inf
    assert not any(math.isnan(value) for value in got.values())
    both = reduce([log_prob_gap([bad, -1.0], [bad, -1.5], [1, 0], range(2))])
    assert both["training/rollout_log_probs_diff_max"] == math.inf
    good = reduce([log_prob_gap([-1.0, bad], [-1.5, 0.0], [1, 0], range(2))])
    assert good["training/rollout_log_probs_diff_max"] == 0.5


def test_the_gap_by_position_in_the_response():
    """Ranges begin at tokens 0, 16, 64, 256, 1,024, 4,096 and 16,384; the last one has no end."""
    tokens = {0: 0.1, 15: 0.3, 16: 0.5, 63: 0.7, 64: 1.0, 300: 9.0, 16383: 2.0, 16384: 3.0, 99999: 5.0}
    gaps, mask = np.array(list(tokens.values())), np.array([place != 300 for place in tokens])
    got = reduce([log_prob_gap(-gaps, np.zeros(len(gaps)), mask, list(tokens))])
    by_place = {name.rpartition("_")[2]: got[name] for name in got if name.startswith(f"{GAP}/")}
    expected = {"0": 0.2, "16": 0.6, "64": 1.0, "4096": 2.0, "16384": 4.0}
    assert by_place == pytest.approx(expected)


def test_parts_of_rewards_and_what_counts_as_solved_before_shaping():
    """Numbers and truth values of the rows that have them; failed rows and text are left out."""
    rows = [
        {"uid": "a", "score": 0.5, "reward_parts": '{"raw_score": 1.0, "acc": 1, "pred": "54", "format/ok": true}'},
        {"uid": "a", "score": 0.75, "reward_parts": '{"raw_score": 1.0, "acc": 0, "格式 ok!": 3, "list": [1]}'},
        {"uid": "b", "score": 2.0, "reward_parts": '{"raw_score": 0.5}'},
        {"uid": "b", "score": 0.0, "reward_parts": '{"acc": 9}', "reward_error": "x", "drop_reason": "reward_error"},
        {"uid": "b", "score": 0.0, "reward_parts": "{}"},
    ]
    got = reduce([iteration_metrics(table(*rows))])
    parts = {name: value for name, value in got.items() if name.startswith("reward/") and name.endswith("/mean")}
    assert parts == {
        "reward/raw_score/mean": pytest.approx(2.5 / 3),
        "reward/acc/mean": 0.5,
        "reward/format/ok/mean": 1.0,
        "reward/格式 ok!/mean": 3.0,
    }
    assert (got["reward/solved_all"], got["reward/solved_none"]) == (0.5, 0.5)
    split = [iteration_metrics(table(row)) for row in rows]
    assert reduce(split)["reward/acc/mean"] == 0.5
    many = {f"p{number:03}": number for number in range(100)}
    row = {"uid": "a", "reward_parts": json.dumps(many | {"x" * 201: 1})}
    got = reduce([iteration_metrics(table(row))])
    assert got["reward/parts_left_out"] == 101 - MOST_PARTS
    assert without_metric([row]) == f"parts of the reward: {', '.join([*list(many)[MOST_PARTS:], 'x' * 201])}"
    assert [name for name in got if name.startswith("reward/p0")] == [f"reward/p{n:03}/mean" for n in range(MOST_PARTS)]


def test_parts_that_some_rows_lack_are_counted_whatever_the_ranks() -> None:
    rows = [
        {"uid": "a", "reward_parts": '{"acc": 1, "format": 1}'},
        {"uid": "a", "reward_parts": '{"format": 0, "acc": "no number"}'},
        {"uid": "b", "reward_parts": '{"format": 1, "acc": null}'},
        {"uid": "b"},
        {"uid": "c", "reward_parts": "{}", "reward_error": "x", "drop_reason": "reward_error"},
    ]
    for cuts in ([rows], [rows[:1], rows[1:]], [[row] for row in rows]):
        merged = merge(iteration_metrics(table(*part)) for part in cuts)
        assert reduce([missing_rates(merged)]) == {
            "reward/acc/missing_rate": 3 / 4,
            "reward/format/missing_rate": 1 / 4,
        }
        assert reduce([merged])["reward/acc/mean"] == 1
    assert missing_rates(merge([iteration_metrics(table(rows[0]))])) == {}


def test_ages_of_tokens_whose_weights_changed_on_the_way():
    def runs(*own: tuple[int, int]) -> list[dict[str, int]]:
        return [{"version": version, "tokens": tokens} for version, tokens in own]

    rows = table(
        {"uid": "a", "n": 4, "policy_version": 0, "version_runs": runs((0, 1), (1, 2), (2, 1))},
        {"uid": "a", "n": 2, "version_runs": runs((2, 2))},
        {"uid": "b", "n": 0, "version_runs": runs((2, 0))},
    )
    got = reduce([iteration_metrics(rows, max_staleness=2)])
    # Version 2 trains on them: ages 2, 1, 1, 0 and 0, 0.
    assert got["training/token_staleness"] == pytest.approx(4 / 6)
    assert got["rollout/versions_per_response/mean"] == pytest.approx(5 / 3)
    assert got["rollout/versions_per_response/max"] == 3
    # Rows are as old as their oldest token.
    assert got["training/staleness/mean"] == pytest.approx(2 / 3)
    whole, halves = iteration_metrics(rows), [iteration_metrics(rows.slice(0, 1)), iteration_metrics(rows.slice(1))]
    assert reduce(halves)["training/token_staleness"] == pytest.approx(reduce([whole])["training/token_staleness"])
