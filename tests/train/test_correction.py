import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.algorithm import RolloutCorrectionConfig
from pipeline.stats import reduce
from pipeline.train.correction import RULES, Corrected, Correction, correct, parse

LN2 = math.log(2.0)
NAN, INF = math.nan, math.inf
# Ratios 2, 1/2 and 4: their product is 4, their geometric mean 4^(1/3) = 1.5874.
ROW = [2.0, 0.5, 4.0]


def correction(**keys) -> Correction:
    return parse(RolloutCorrectionConfig(**keys))


def rules(names: str, thresholds: str) -> Correction:
    return correction(rollout_rs=names, rollout_rs_threshold=thresholds)


def offsets_of(rows: list[list]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)])


def run(settings: Correction, rows: list[list[float]], masks: list[list[int]] | None = None, all_sum=list) -> Corrected:
    """`correct` for the log ratios of each response's tokens."""
    log_ratios = np.array(list(itertools.chain(*rows)), dtype=np.float64)
    mask = np.ones(len(log_ratios)) if masks is None else np.array(list(itertools.chain(*masks)))
    # An engine that was certain of each token makes the log ratio exactly the trainer's log-prob.
    return correct(settings, log_ratios, np.zeros(len(log_ratios)), mask, offsets_of(rows), all_sum)


def with_weights(level: str, threshold: str, normalize: bool, names: list[str]) -> Correction:
    return correction(
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalize,
        rollout_rs=",".join(names) or None,
        rollout_rs_threshold=",".join("2.0" for _ in names) or None,
    )


def logs(ratios: list[float]) -> list[float]:
    return [math.log(r) for r in ratios]


def shown(corrected: Corrected) -> dict[str, float]:
    return {name.removeprefix("rollout_corr/"): value for name, value in reduce([corrected.stats]).items()}


def on_ranks(settings: Correction, parts: list[list[list[float]]]) -> list[Corrected]:
    """Each rank's part, corrected with sums over all of them."""
    sums: list[list[float]] = []

    def record(values: list[float]) -> list[float]:
        sums.append(values)
        return values

    for rows in parts:
        run(settings, rows, all_sum=record)
    total = [math.fsum(column) for column in zip(*sums, strict=True)]
    return [run(settings, rows, all_sum=lambda values: total) for rows in parts]


# Settings


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"rollout_is": "tokens"}, "rollout_is=tokens .*must be one of null, none, token, sequence"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, "rollout_is_threshold: 'two' is neither a number"),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_inf"}, "'0.5_inf' is neither a number"),
        ({"rollout_is": "token", "rollout_is_threshold": "-1_2"}, "'-1_2' must be above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_2"}, "bounds of '2_2' are upside down"),
        ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=true has no weights to normalise"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": "1"}, "is not a rejection rule. Did you mean 'token_k"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": "2"}, "is not a rejection rule"),
        ({"rollout_rs": "token_k2,token_k2", "rollout_rs_threshold": "1,2"}, "names 'token_k2' twice"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold=null gives 0 bounds for the 1 rules"),
        ({"rollout_rs": "token_k1,seq_sum_k1", "rollout_rs_threshold": "2"}, "gives 1 bounds for the 2 rules"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1.0"}, "token_k1 reads .* as the bounds 1/1.0 to 1.0"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "token_k2 takes one number"),
    ],
)
def test_malformed_settings_are_refused(keys, sentence):
    with pytest.raises(ValueError, match=f"algorithm.rollout_correction.*{sentence}"):
        correction(**keys)


def test_weights_of_a_part_cannot_be_normalised():
    with pytest.raises(ValueError, match="rollout_is_batch_normalize=true needs all weights .*use actor.old_log_probs"):
        run(correction(rollout_is="token", rollout_is_batch_normalize=True), [[0.0]], all_sum=None)


# Importance weights


@pytest.mark.parametrize(
    ("level", "threshold", "weights"),
    [
        ("token", "2.0", [2, 0.5, 2, 0.25]),  # truncated
        ("token", "0.5_2.0", [2, 0.5, 0, 0]),  # IcePop: both bounds are inside
        ("sequence", "2.0", [2, 2, 2, 0.25]),  # products 4 and 1/4
        ("sequence", "0.25_3.0", [0, 0, 0, 0.25]),
        ("sequence", "0.3_4.0", [4, 4, 4, 0]),
    ],
)
def test_weights_by_hand(level, threshold, weights):
    got = run(correction(rollout_is=level, rollout_is_threshold=threshold), [logs(ROW), logs([0.25])])
    assert got.weights == pytest.approx(weights)
    assert got.weights.dtype == np.float64
    assert got.keep.all()


@pytest.mark.parametrize(
    ("level", "weights"),
    [
        ("token", [4 / 3, 1 / 3, 4 / 3, 1.0]),  # 2, 1/2, 2, 3/2 have the mean 3/2
        ("sequence", [8 / 7, 8 / 7, 8 / 7, 6 / 7]),  # 2 and 3/2 have the mean 7/4
    ],
)
def test_normalised_weights_by_hand(level, weights):
    got = run(correction(rollout_is=level, rollout_is_batch_normalize=True), [logs(ROW), logs([1.5]), []])
    assert got.weights == pytest.approx(weights)
    assert shown(got)["rollout_is_batch_norm_factor"] == pytest.approx(1.5 if level == "token" else 1.75)


def test_rejected_tokens_do_not_count_in_the_mean_of_the_weights():
    both = {"rollout_is_threshold": "10", "rollout_is_batch_normalize": True}
    token = correction(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="3", **both)
    got = run(token, [logs(ROW)])
    assert got.keep.tolist() == [True, True, False]
    assert got.weights[got.keep] == pytest.approx([2 / 1.25, 0.5 / 1.25])
    # The ratio of a response is that of all its tokens, one that a token rule rejects among them.
    sequence = correction(rollout_is="sequence", rollout_rs="token_k1", rollout_rs_threshold="3", **both)
    got = run(sequence, [logs(ROW), logs([2.0]), logs([9.0])])
    assert got.keep.tolist() == [True, True, False, True, False]
    assert got.weights[got.keep] == pytest.approx([4 / 3, 4 / 3, 2 / 3])


# Rejection


# k2 of the ratios 2, 1/2, 4 with l = log 2: l^2/2, l^2/2, 2 l^2. k3: 1 - l, l - 1/2, 3 - 2 l.
@pytest.mark.parametrize(
    ("rule", "bound", "keep"),
    [
        ("token_k1", "0.5_2.0", [1, 1, 0]),  # bounds are inclusive
        ("token_k1", "2.0", [1, 1, 0]),
        ("token_k1", "0.6_4.0", [1, 0, 1]),
        ("token_k2", "0.2403", [1, 1, 0]),
        ("token_k2", "0.2402", [0, 0, 0]),
        ("token_k3", "0.3069", [1, 1, 0]),
        ("token_k3", "0.3068", [0, 1, 0]),
    ],
)
def test_token_rules_by_hand(rule, bound, keep):
    assert run(rules(rule, bound), [logs(ROW)]).keep.tolist() == [bool(k) for k in keep]


@pytest.mark.parametrize(
    ("rule", "passes", "rejects"),
    [
        ("seq_sum_k1", "0.1_4.0001", "0.1_3.9999"),
        ("seq_sum_k1", "3.9999_9", "4.0001_9"),
        ("seq_sum_k1", "4.0001", "3.9999"),
        ("seq_mean_k1", "0.9_1.5875", "0.9_1.5873"),
        ("seq_mean_k1", "1.5873_2", "1.5875_2"),
        ("seq_sum_k2", "1.4414", "1.4413"),  # 3 l^2
        ("seq_mean_k2", "0.4805", "0.4804"),
        ("seq_max_k2", "0.9610", "0.9609"),
        ("seq_sum_k3", "2.1138", "2.1136"),  # 3.5 - 2 l
        ("seq_mean_k3", "0.7046", "0.7045"),
        ("seq_max_k3", "1.6138", "1.6137"),
    ],
)
def test_response_rules_by_hand(rule, passes, rejects):
    # The token behind the mask would change every one of these numbers, and so would the other response.
    rows, masks = [[LN2, 7.0, -LN2, 2 * LN2], [-5.0, -5.0]], [[1, 0, 1, 1], [1, 1]]
    assert run(rules(rule, passes), rows, masks).keep[:4].tolist() == [True, False, True, True]
    assert not run(rules(rule, rejects), rows, masks).keep.any()


def test_every_rule_must_pass():
    rows = [logs([3.0, 1.0]), logs([1.1, 1.0]), logs([0.2, 5.0])]
    got = run(rules("token_k1,seq_sum_k1,seq_max_k2", "2,4,1"), rows)
    # Token rule: 3, 0.2 and 5 go. Responses: products 3, 1.1, 1 pass, and so do the largest k2 of the first two.
    assert got.keep.tolist() == [False, True, True, True, False, False]
    shares = {name: value for name, value in shown(got).items() if name.startswith("rollout_rs_")}
    assert shares == pytest.approx(
        {
            "rollout_rs_token_k1_fraction": 3 / 6,
            "rollout_rs_seq_sum_k1_fraction": 0.0,
            "rollout_rs_seq_max_k2_fraction": 1 / 3,
            "rollout_rs_masked_fraction": 3 / 6,
            "rollout_rs_seq_masked_fraction": 2 / 3,
        }
    )


# Metrics

ENGINE = np.array([-1.0, -2.0, -3.0])
RATIOS = np.array([2.0, 0.5, 4.0])
OFFSETS = np.array([0, 2, 2, 3])


def metrics(settings: Correction) -> dict[str, float]:
    return shown(correct(settings, ENGINE + np.log(RATIOS), ENGINE, np.ones(3), OFFSETS, list))


def test_gap_by_hand():
    assert metrics(correction()) == pytest.approx(
        {
            "kl": -2 * LN2 / 3,
            "k3_kl": (3.5 - 2 * LN2) / 3,
            "chi2_token": (4 + 0.25 + 16) / 3 - 1,
            "chi2_seq": (1 + 16) / 2 - 1,
            "training_ppl": (math.exp(1.5) + math.exp(3) / 4) / 2,
            "rollout_ppl": (math.exp(1.5) + math.exp(3)) / 2,
            "log_ppl_diff": -LN2,
            "ppl_ratio": (1 + 0.25) / 2,
        }
    )


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        (
            "token",
            "2.0",  # weights 2, 1/2, 2
            {
                "mean": 6.5 / 3, "max": 4.0, "min": 0.5, "std": math.sqrt(20.25 / 3 - (6.5 / 3) ** 2),
                "ratio_fraction_high": 1 / 3, "eff_sample_size": 4.5**2 / (3 * 8.25),
            },
        ),
        (
            "sequence",
            "1.5_4.0",  # ratios 1 and 4, weights 0 and 4; the empty response has none
            {
                "mean": 2.5, "max": 4.0, "min": 1.0, "std": 1.5,
                "ratio_fraction_high": 0.0, "ratio_fraction_low": 1 / 2, "eff_sample_size": 1 / 2,
            },
        ),
    ],
)  # fmt: skip
def test_metrics_of_weights_by_hand(level, threshold, expected):
    got = metrics(correction(rollout_is=level, rollout_is_threshold=threshold))
    got = {name.removeprefix("rollout_is_"): value for name, value in got.items() if name.startswith("rollout_is_")}
    assert got == pytest.approx(expected)


def test_a_part_of_the_batch_has_no_effective_sample_size():
    settings = correction(rollout_is="token")
    whole, part = run(settings, [logs(ROW)]), run(settings, [logs(ROW)], all_sum=None)
    assert set(shown(whole)) - set(shown(part)) == {"rollout_is_eff_sample_size"}
    assert part.weights == pytest.approx(whole.weights)


# Batches that are empty, rejected or not numbers


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_all_rejected_and_all_weights_zero(level):
    normalized = {"rollout_is": level, "rollout_is_batch_normalize": True}
    got = run(correction(**normalized, rollout_rs="seq_sum_k2", rollout_rs_threshold="0.01"), [logs(ROW), logs([3.0])])
    assert not got.keep.any() and np.isfinite(got.weights).all()
    assert shown(got)["rollout_rs_masked_fraction"] == shown(got)["rollout_rs_seq_masked_fraction"] == 1.0
    assert "rollout_is_eff_sample_size" not in shown(got)
    got = run(correction(**normalized, rollout_is_threshold="0.9_1.1"), [logs(ROW), logs([3.0])])
    assert got.keep.all() and not got.weights.any()
    assert shown(got)["rollout_is_eff_sample_size"] == 0.0


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_nothing_to_correct(rows):
    calls = []
    got = run(
        with_weights("token", "0.1_10", True, list(RULES)), rows, all_sum=lambda values: calls.append(values) or values
    )
    assert len(got.keep) == len(got.weights) == 0
    assert shown(got) == {}
    # The other ranks wait for this one's part of the sums.
    assert calls == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_no_rule_is_passed_by_a_token_beyond_numbers(name, bad):
    got = run(rules(name, "1e300"), [[0.1, bad, 0.1], [0.1]])
    assert got.keep.tolist() == [name.startswith("token"), False, name.startswith("token"), True]


@pytest.mark.parametrize(("name", "bound"), [("token_k1", "1e10"), ("seq_sum_k2", "300"), ("seq_max_k3", "1e10")])
def test_rules_see_ratios_that_weights_hold_back(name, bound):
    """A log ratio of 30; held to 20 it would pass all three."""
    assert not run(rules(name, bound), [[30.0]]).keep.any()


@pytest.mark.parametrize(
    ("trainer", "engine", "token", "sequence"),
    [
        (INF, -1.0, 2.0, 2.0),
        (-INF, -1.0, math.exp(-20), math.exp(-20)),
        (-1.0, -INF, 2.0, 2.0),
        (-1.0, INF, math.exp(-20), math.exp(-20)),
        (NAN, -1.0, 0.0, 0.0),
        (-1.0, NAN, 0.0, 0.0),
        (-INF, -INF, 0.0, 0.0),
        (900.0, -1.0, 2.0, 2.0),
    ],
)
def test_weights_and_metrics_stay_finite(trainer, engine, token, sequence):
    arguments = (np.array([-1.0, trainer, -0.5]), np.array([-1.0, engine, -0.5]), np.ones(3), np.array([0, 2, 3]), list)
    for level, expected in (("token", [1.0, token, 1.0]), ("sequence", [sequence, sequence, 1.0])):
        got = correct(correction(rollout_is=level), *arguments)
        assert got.weights == pytest.approx(expected)
        assert np.isfinite(list(shown(got).values())).all()


# Properties

log_ratio = st.floats(-3.0, 3.0)
batch = st.lists(st.lists(log_ratio, max_size=5), min_size=1, max_size=6)
level = st.sampled_from(["token", "sequence"])
threshold = st.sampled_from(["1.5", "2.0", "0.5_2.0", "0.8_1.2"])
some_rules = st.sets(st.sampled_from(RULES), max_size=3).map(sorted)


any_settings = st.builds(with_weights, level, threshold, st.booleans(), some_rules)


@settings(max_examples=100)
@given(any_settings, batch, st.data())
def test_ranks_together_are_the_whole_batch(chosen, rows, data):
    cut = data.draw(st.integers(0, len(rows)))
    whole = run(chosen, rows)
    parts = on_ranks(chosen, [rows[:cut], rows[cut:]])
    assert np.concatenate([part.weights for part in parts]) == pytest.approx(whole.weights)
    assert np.concatenate([part.keep for part in parts]).tolist() == whole.keep.tolist()
    together = reduce(part.stats for part in parts)
    assert together == pytest.approx(reduce([whole.stats]), abs=1e-9)


@settings(max_examples=100)
@given(any_settings, batch, st.data())
def test_masked_tokens_have_no_influence(chosen, rows, data):
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=len(row), max_size=len(row))) for row in rows]
    junk = st.sampled_from([NAN, INF, -INF, 50.0])
    dirty = [
        [x if m else data.draw(junk) for x, m in zip(row, mask, strict=True)]
        for row, mask in zip(rows, masks, strict=True)
    ]
    without = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(rows, masks, strict=True)]
    expected, got = run(chosen, without), run(chosen, dirty, masks)
    trained = np.array(list(itertools.chain(*masks)), dtype=bool)
    assert not got.keep[~trained].any() and not got.weights[~trained].any()
    assert got.keep[trained].tolist() == expected.keep.tolist()
    assert got.weights[trained] == pytest.approx(expected.weights)
    assert shown(got) == pytest.approx(shown(expected), abs=1e-9)
