import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.advantage.estimators import NEEDS, Estimate, EstimatorInput, register_adv_est
from pipeline.advantage.stage import Advantage
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.rows import (
    ADVANTAGE,
    AGENT,
    ANSWER,
    BASELINE,
    KL_COEF,
    OBSERVATION,
    POLICY,
    PROMPT,
    REFERENCE,
    REWARD,
    ROLLOUT,
    VALUE,
)
from pipeline.store.policy_store import PolicyStore
from pipeline.weights.load import Shard
from tests.scoring.published import LocalStore, get

BEFORE = pa.schema([*PROMPT, *ROLLOUT, *REWARD, *KL_COEF])
ALL = pa.schema([*BEFORE, *BASELINE, *REFERENCE, *VALUE, *POLICY])
SEEN: list[EstimatorInput] = []


@register_adv_est("test_reads_everything", scope="batch", needs=NEEDS)
def reads_everything(data, config):
    SEEN.append(data)
    return Estimate(data.token_rewards, data.values)


@register_adv_est("test_reads_rewards")
def reads_rewards(data, config):
    SEEN.append(data)
    return Estimate(data.token_rewards, data.per_token(data.rewards))


@pytest.fixture(autouse=True)
def _custom_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def table(*rows: dict, schema: pa.Schema = BEFORE) -> pa.Table:
    """Rows of uid, score and mask (and what else the schema has); the rest of the columns is null."""
    made = []
    for row in rows:
        mask = row.get("mask", [1, 1])
        made.append(
            dict.fromkeys(schema.names)
            | {"split": "train", "reward_error": None, "rollout_log_probs": [-1.0] * len(mask), "kl_coef": 0.0}
            | {k: v for k, v in row.items() if k != "mask"}
            | {"response_mask": mask, "response_ids": [5] * len(mask)}
        )
    return pa.Table.from_pylist(made, schema=schema)


def run(rows: pa.Table, turn_rewards: bool = False, **config) -> dict[str, list]:
    done = Advantage(AlgorithmConfig(**config), turn_rewards=turn_rewards)(rows)
    assert done.schema.equals(pa.schema([*rows.schema, *ADVANTAGE]))
    return done.select(["advantages", "returns", "drop_reason", "uid", "reward", "kl"]).to_pydict()


def seen(rows: pa.Table, turn_rewards: bool = False, **config) -> EstimatorInput:
    """What an estimator gets to see of these rows."""
    SEEN.clear()
    run(rows, turn_rewards, **({"adv_estimator": "test_reads_everything"} | config))
    return SEEN.pop()


def test_groups_by_uid_wherever_the_rows_stand():
    got = run(
        table(
            {"uid": "a", "score": 1.0, "mask": [1, 0, 1]},
            {"uid": "b", "score": 7.0},
            {"uid": "a", "score": 0.0, "mask": []},
            {"uid": "b", "score": 7.0},
            {"uid": "a", "score": 0.5, "mask": [1]},
        )
    )
    a = 0.5 / (0.5 + 1e-6)
    assert got["advantages"][0] == pytest.approx([a, 0, a])
    assert got["advantages"][1:] == [[0, 0], [], [0, 0], [0]]
    assert got["returns"] == got["advantages"]


def test_a_failed_row_keeps_its_place_and_takes_no_part():
    good = [{"uid": "a", "score": s} for s in (1.0, 0.0, 0.0)]
    failed = {"uid": "a", "score": 0.0, "reward_error": "ValueError: no number"}
    without = run(table(*good), norm_adv_by_std_in_grpo=False)["advantages"]
    got = run(table(good[0], failed, good[1], good[2]), norm_adv_by_std_in_grpo=False)
    assert got["reward"] == [1, 0, 0, 0]
    assert got["advantages"] == [without[0], [0, 0], without[1], without[2]]
    assert got["advantages"][0] == pytest.approx([2 / 3] * 2)
    assert got["drop_reason"] == [None, "reward_error", None, None]
    # One or none left.
    got = run(table(good[0], failed, {**failed, "uid": "b"}, {**failed, "uid": "b", "mask": []}))
    assert got["advantages"] == [[0, 0], [0, 0], [0, 0], []]


def test_validation_rows_pass_untouched():
    rows = [
        {"uid": "a", "score": s, "split": "val", "reward_error": e} for s, e in ((1.0, None), (0.0, None), (0.0, "x"))
    ]
    got = run(table(*rows))
    assert got["advantages"] == got["returns"] == [[0, 0]] * 3
    assert got["drop_reason"] == [None] * 3
    assert got["reward"] == [1, 0, 0] and got["kl"] == [None] * 3
    # A mixed table: training statistics do not see validation rows of the same uid.
    mixed = run(table(*rows, {"uid": "a", "score": 3.0}, {"uid": "a", "score": 1.0}), norm_adv_by_std_in_grpo=False)
    assert mixed["advantages"] == [[0, 0]] * 3 + [[1, 1], [-1, -1]]


def test_empty_sliced_and_chunked_tables():
    rows = table(*({"uid": u, "score": s, "mask": [1] * n} for u, s, n in (("a", 1, 3), ("a", 0, 1), ("b", 2, 2))))
    assert run(rows.slice(0, 0))["advantages"] == []
    for estimator in ("grpo", "gae", "test_reads_everything"):
        for kl in (True, False):
            for empty in (BEFORE, ALL):
                got = run(empty.empty_table(), adv_estimator=estimator, use_kl_in_reward=kl)
                assert got == dict.fromkeys(got, [])
    whole = run(rows)
    assert run(pa.concat_tables([rows.slice(0, 1), rows.slice(1)])) == whole
    assert run(pa.concat_tables([rows.slice(1), rows.slice(0, 1)]))["advantages"][-1] == whole["advantages"][0]


def test_an_estimator_of_ones_own():
    rows = table({"uid": "a", "score": 3.0, "mask": [1, 1, 0]}, {"uid": "a", "score": 1.0, "mask": [1]})
    got = run(rows, adv_estimator="custom_estimators:last_token")
    assert got["advantages"] == [[0, 3, 0], [1]]
    assert got["returns"] == [[3, 3, 0], [1]]
    assert Advantage(AlgorithmConfig(adv_estimator="custom_estimators:last_token")).scope == "group"
    assert Advantage(AlgorithmConfig(adv_estimator="custom_estimators:whole_batch")).scope == "batch"
    assert run(rows, adv_estimator="test_whole_batch")["advantages"] == [[1, 1, 0], [-1]]
    assert run(rows, adv_estimator="custom_estimators:everywhere")["advantages"] == [[1, 1, 0], [1]]
    with pytest.raises(
        ValueError, match=r"'custom_estimators:too_short' returned advantages of shape \(1,\).* 4 response tokens"
    ):
        run(rows, adv_estimator="custom_estimators:too_short")
    with pytest.raises(ValueError, match="not finite, first for uid a, whose reward is 3.0"):
        run(rows, adv_estimator="custom_estimators:not_finite")
    with pytest.raises(ValueError, match="has no function 'constant'"):
        Advantage(AlgorithmConfig(adv_estimator="custom_estimators:constant"))


def test_output_is_float32_of_a_float64_computation():
    # In float32 the mean of these scores would already have lost the difference between them.
    scores = [16777216.0, 16777218.0]
    got = run(table(*({"uid": "a", "score": s} for s in scores)))["advantages"]
    assert got[0] == pytest.approx([-1 / (math.sqrt(2) + 1e-6)] * 2, rel=1e-6)
    assert got[0] == [float(np.float32(got[0][0]))] * 2


A = {
    **{"uid": "a", "score": 1.0, "mask": [1, 0, 1, 0], "kl_coef": 0.5},
    **{"rollout_log_probs": [-1.0, -9.0, -2.0, -9.0], "ref_log_probs": [-1.5, -1.0, -1.0, -1.0]},
}
B = {"uid": "a", "score": 0.0, "mask": [1], "kl_coef": 0.5, "rollout_log_probs": [-1.0], "ref_log_probs": [-1.25]}
EMPTY = {"uid": "a", "score": 3.0, "mask": [], "kl_coef": 0.5, "rollout_log_probs": [], "ref_log_probs": []}
MASKED = {**A, "score": 2.0, "mask": [0, 0, 0, 0]}
WITH_REFERENCE = pa.schema([*BEFORE, *REFERENCE])


def penalised(*rows: dict) -> pa.Table:
    return table(*rows, schema=WITH_REFERENCE)


@pytest.mark.parametrize(
    ("kind", "tokens", "b"),
    [("kl", [0.5, -1.0], 0.25), ("abs", [0.5, 1.0], 0.25), ("mse", [0.125, 0.5], 0.03125)],
)
def test_kl_in_the_reward_worked_by_hand(kind, tokens, b):
    """d is 0.5 and -1 on the trained tokens of A, 0.25 on that of B, and enormous where the mask is 0."""
    rows = penalised(A, B, EMPTY, MASKED)
    got = run(rows, adv_estimator="test_reads_rewards", use_kl_in_reward=True, kl_penalty=kind)
    first, last = tokens
    assert got["advantages"] == [
        pytest.approx([-0.5 * first, 0, 1 - 0.5 * last, 0]),
        pytest.approx([-0.5 * b]),
        [],
        [0, 0, 0, 0],
    ]
    assert got["reward"] == pytest.approx([1 - 0.5 * (first + last), -0.5 * b, 3, 2])
    assert got["returns"][0] == pytest.approx([got["reward"][0], 0, got["reward"][0], 0])
    assert got["kl"] == [pytest.approx((first + last) / 2), pytest.approx(b), None, None]


def test_the_coefficient_is_looked_up_by_the_version_once(monkeypatch):
    monkeypatch.setattr(ray, "get", get)
    store = LocalStore()
    for version, coef in enumerate((0.0, 1.0, 4.0)):
        store.call(PolicyStore.publish, version, {"policy": Shard(0, [], [], [])}, 0.0, coef)
    rows = penalised(*({**B, "policy_version": version} for version in (2, 0, 1, 2))).drop_columns("kl_coef")
    done = Advantage(AlgorithmConfig(use_kl_in_reward=True), store)(rows)
    assert done["kl_coef"].to_pylist() == [4.0, 0.0, 1.0, 4.0]
    assert done["reward"].to_pylist() == [-1, 0, -0.25, -1]
    plain = Advantage(AlgorithmConfig(), store)(rows)
    assert "kl_coef" not in plain.column_names


def test_failed_rows_pay_nothing():
    got = run(penalised({**A, "score": 0.0, "reward_error": "x"}, B), use_kl_in_reward=True)
    assert got["reward"] == [0, -0.125] and got["kl"] == [None, 0.25]
    assert got["drop_reason"] == ["reward_error", None]


@st.composite
def groups(draw: st.DrawFn) -> pa.Table:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = []
    for mask in draw(st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=8)):
        row = {"uid": str(rng.integers(3)), "score": float(rng.normal()), "mask": mask, "kl_coef": float(rng.random())}
        made.append(row | {n: -rng.random(len(mask)) for n in ("rollout_log_probs", "ref_log_probs")})
    return penalised(*made)


@settings(max_examples=50)
@given(rows=groups(), kind=st.sampled_from(["kl", "abs", "mse", "low_var_kl"]))
def test_token_rewards_add_up_to_the_reward(rows, kind):
    config = {"adv_estimator": "test_reads_rewards", "use_kl_in_reward": True, "kl_penalty": kind}
    data = seen(rows, **config)
    tokens = [part.sum() for part in np.split(data.token_rewards, data.offsets[1:-1])]
    trains = [any(mask) for mask in rows["response_mask"].to_pylist()]
    want = [reward if some else 0.0 for reward, some in zip(data.rewards, trains, strict=True)]
    assert tokens == pytest.approx(want, abs=1e-12)
    assert not data.token_rewards[~data.mask].any()
    got = run(rows, **config)
    assert got["reward"] == pytest.approx(data.rewards.tolist(), rel=1e-6)
    scores, coefs = rows["score"].to_pylist(), rows["kl_coef"].to_pylist()
    for row, (reward, kl) in enumerate(zip(got["reward"], got["kl"], strict=True)):
        count = sum(rows["response_mask"][row].as_py())
        assert (kl is None) == (count == 0)
        assert reward == pytest.approx(scores[row] - coefs[row] * (kl or 0.0) * count, abs=1e-5)


def test_everything_reaches_an_estimator_that_needs_it():
    parts = [{"format": 1, "right": True, "note": "x", "deep": [1], "rare": 2}, {"format": 0.5, "right": False}]
    numbers = [
        {"values": [1.0, 2.0], "sum_pi_squared": [0.5, 0.25], "rollout_log_probs": [-0.5, -1.5], "baseline": 0.75},
        {"values": [3.0], "sum_pi_squared": [0.125], "rollout_log_probs": [-2.5], "baseline": -0.5, "mask": [1]},
    ]
    failed = {**numbers[0], "score": 0.0, "baseline": None, "reward_parts": "{}", "reward_error": "no baseline"}
    rows = [
        {"uid": u, "score": s, "reward_parts": json.dumps(p)} | n
        for u, s, p, n in zip("ab", (1.0, 2.0), parts, numbers, strict=True)
    ]
    whole = table(rows[0], {"uid": "a", **failed}, rows[1], schema=ALL)
    data = seen(whole)
    assert data.values.tolist() == [1, 2, 3]
    assert data.sum_pi_squared.tolist() == [0.5, 0.25, 0.125]
    assert data.log_probs.tolist() == [-0.5, -1.5, -2.5]
    assert data.baselines.tolist() == [0.75, -0.5]
    assert {name: part.tolist() for name, part in data.parts.items()} == {
        "score": [1, 2],
        "format": [1, 0.5],
        "right": [1, 0],
    }
    arrays = [data.values, data.sum_pi_squared, data.log_probs, data.baselines, *data.parts.values()]
    assert all(array.dtype == np.float64 for array in arrays)
    got = run(whole, adv_estimator="test_reads_everything")
    assert got["returns"] == [[1, 2], [0, 0], [3]] and got["drop_reason"] == [None, "reward_error", None]


def test_what_nobody_needs_is_not_parsed_and_not_missed():
    data = seen(table({"uid": "a", "score": 1.0, "reward_parts": "no json"}), adv_estimator="test_reads_rewards")
    assert data.values is data.baselines is data.sum_pi_squared is data.parts is None
    # A critic may be trained without the estimator asking for it.
    row = {"uid": "a", "score": 1.0, "values": [1.0, 2.0]}
    whole = table(row, schema=pa.schema([*BEFORE, *VALUE]))
    assert seen(whole, adv_estimator="test_reads_rewards").values.tolist() == [1, 2]


GOOD = {"uid": "a", "score": 1.0, "reward_parts": '{"format": 1}'}
GDPO = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["score", "format"]}
KL = {"use_kl_in_reward": True}


@pytest.mark.parametrize(
    ("row", "schema", "config", "words"),
    [
        *[({"score": bad}, BEFORE, {}, "row of uid b has score") for bad in (math.nan, math.inf, None)],
        ({"rollout_log_probs": [-1.0]}, BEFORE, {}, "uid b has 1 entries in 'rollout_log_probs' but 2 response tokens"),
        ({}, BEFORE, {"adv_estimator": "gae"}, "no column 'values', which algorithm.*needs; the stage 'value' should"),
        ({}, BEFORE, {"adv_estimator": "remax"}, "no column 'baseline', which .* the stage 'baseline' should"),
        ({}, BEFORE, KL, "no column 'ref_log_probs', which .* the stage 'reference' should"),
        ({}, pa.schema([*BEFORE, *BASELINE]), {"adv_estimator": "remax"}, "has baseline None and no reward_error"),
        ({**B, "ref_log_probs": [math.nan]}, WITH_REFERENCE, KL, "uid b has a KL to the reference policy of nan"),
        ({**B, "ref_log_probs": [-math.inf]}, WITH_REFERENCE, KL, "uid b has a KL to the reference policy of inf"),
        ({**B, "kl_coef": None}, WITH_REFERENCE, KL, "row of uid b has kl_coef None; the number published"),
        (
            {"reward_parts": '{"other": 2}'},
            BEFORE,
            GDPO,
            "format.* row of uid b .it returned score, other",
        ),
        ({"reward_parts": '{"format": "good"}'}, BEFORE, GDPO, "names 'format', but .* no number .* row of uid b"),
        ({"reward_parts": None}, BEFORE, GDPO, "names 'format', but .* no number .* row of uid b"),
    ],
)
def test_rows_that_are_refused(row, schema, config, words):
    reference = {"ref_log_probs": [-1.0, -1.0]} if schema is WITH_REFERENCE else {}
    first = GOOD | reference | ({"baseline": 0.0} if "baseline" in schema.names else {})
    bad = {"score": 1.0, "reward_parts": '{"format": 1}'} | row | {"uid": "b"}
    with pytest.raises(ValueError, match=words):
        run(table(first, bad, schema=schema), **config)
    if "reward_error" not in row and set(row) & {"score", "reward_parts"}:
        run(table(first, bad | {"score": 0.0, "reward_error": "x"}, schema=schema), **config)


def test_a_kl_of_masked_tokens_is_not_read():
    run(penalised({**MASKED, "ref_log_probs": [math.nan] * 4}), use_kl_in_reward=True)


WITH_SPANS = pa.schema([*BEFORE, *AGENT, *REFERENCE])


def episode(*spans: tuple[int, int, float | None], **row) -> dict:
    """A row of these spans (kind, tokens, reward); all tokens of answers train, unless the row has a mask."""
    mask = [int(kind == ANSWER) for kind, tokens, _ in spans for _ in range(tokens)]
    made = [dict(zip(("kind", "tokens", "reward"), span, strict=True)) for span in spans]
    return {"uid": "a", "mask": mask, "spans": made} | row


def say(tokens: int, reward: float | None = None) -> tuple[int, int, float | None]:
    return ANSWER, tokens, reward


def see(tokens: int) -> tuple[int, int, float | None]:
    return OBSERVATION, tokens, None


EPISODES = [
    episode(say(2, 0.5), see(3), say(1), see(1), say(2, 2.0), score=2.5),
    # The environment said more than was rewarded, as with a function beside it, or a penalty.
    episode(say(1, 1.0), see(1), say(2, -1.0), score=0.25),
    # The policy wrote the middle answer, and it does not train: what it earned goes to the end.
    episode(say(1, 1.0), see(2), say(2, 4.0), see(1), say(1, 8.0), score=13.0, mask=[1, 0, 0, 0, 0, 0, 1]),
    # No answer, none that trains, one that was cut to nothing, and an answer behind which the environment went on.
    episode(score=1.0),
    episode(say(2, 3.0), see(1), score=3.0, mask=[0, 0, 0]),
    episode(say(2, 1.0), see(2), say(0, 2.0), score=3.0),
    episode(say(1), see(2), score=0.5),
]


def test_rewards_of_answers_stand_on_their_last_tokens():
    whole = table(*EPISODES, schema=WITH_SPANS)
    data = seen(whole, adv_estimator="test_reads_rewards", turn_rewards=True)
    tokens = [part.tolist() for part in np.split(data.token_rewards, data.offsets[1:-1])]
    assert tokens == [
        [0, 0.5, 0, 0, 0, 0, 0, 0, 2],
        [1, 0, 0, -0.75],
        [1, 0, 0, 0, 0, 0, 12],
        [],
        [0, 0, 0],
        [0, 3, 0, 0],
        [0.5, 0, 0],
    ]
    turns = [part.tolist() for part in np.split(data.turns, data.offsets[1:-1])]
    assert turns[0] == [0, 0, -1, -1, -1, 1, -1, 2, 2] and turns[2] == [0, -1, -1, 1, 1, -1, 2]
    assert turns[3:] == [[], [0, 0, -1], [0, 0, -1, -1], [0, -1, -1]]
    assert data.rewards.tolist() == [2.5, 0.25, 13, 1, 3, 3, 0.5]
    # Where a function scores alone, the environment's rewards are no part of it; turns are turns.
    alone = seen(whole, adv_estimator="test_reads_rewards")
    assert alone.token_rewards[data.offsets[0] : data.offsets[1]].tolist() == [0] * 8 + [2.5]
    assert alone.turns.tolist() == data.turns.tolist()
    assert seen(table({"uid": "a", "score": 1.0}), adv_estimator="test_reads_rewards").turns is None


def test_rounding_of_the_score_is_no_reward():
    rewards = [float(np.float32(reward)) for reward in (0.1, 0.2, 0.7, 1e-3)]
    spans = [span for reward in rewards for span in (say(1, reward), see(1))]
    score = float(np.float32(0.1 + 0.2 + 0.7 + 1e-3))
    assert score != sum(rewards)
    data = seen(table(episode(*spans, score=score), schema=WITH_SPANS), True, adv_estimator="test_reads_rewards")
    assert data.token_rewards.tolist() == [x for reward in rewards for x in (reward, 0)]


def test_the_kl_is_paid_beside_rewards_of_answers():
    row = episode(say(1, 0.5), see(1), say(1, 1.0), score=1.5, kl_coef=0.5)
    row |= {"rollout_log_probs": [-1.0, -9.0, -2.0], "ref_log_probs": [-1.5, -1.0, -1.0]}
    config = {"adv_estimator": "test_reads_rewards", "use_kl_in_reward": True, "kl_penalty": "kl"}
    got = run(table(row, schema=WITH_SPANS), True, **config)
    assert got["advantages"] == [[0.25, 0, 1.5]] and got["reward"] == [1.75]


def test_turn_rewards_need_spans_that_fit():
    with pytest.raises(ValueError, match="no column 'spans', which agent.reward needs; the stage 'rollout' should"):
        run(table({"uid": "a", "score": 1.0}), True)
    wrong = episode(say(2), see(1), score=1.0, mask=[1, 1])
    rows = table(
        EPISODES[0], {**EPISODES[0], "score": 0.0, "reward_error": "x"}, wrong | {"uid": "b"}, schema=WITH_SPANS
    )
    with pytest.raises(ValueError, match="spans of a row of uid b have 3 tokens, and its response has 2"):
        run(rows)
    # Rows that failed are left out with their spans.
    data = seen(rows.slice(0, 2), True, adv_estimator="test_reads_rewards")
    assert data.turns.tolist() == [0, 0, -1, -1, -1, 1, -1, 2, 2]


def test_turn_grpo_in_the_stage():
    rows = [episode(say(1, 0.0), see(1), say(1, 1.0), score=1.0), episode(say(1, 1.0), see(2), say(1, -1.0), score=0.0)]
    got = run(table(*rows, schema=WITH_SPANS), True, adv_estimator="turn_grpo", norm_adv_by_std_in_grpo=False)
    assert got["advantages"] == [[0.5, 0, 1], [-0.5, 0, 0, -1]]
    assert got["returns"] == [[1, 0, 1], [0, 0, 0, -1]]
    # A function's score says nothing about the first of two answers, so both get what GRPO gives.
    got = run(table(*rows, schema=WITH_SPANS), adv_estimator="turn_grpo", norm_adv_by_std_in_grpo=False)
    assert got["advantages"] == [[0.5, 0, 0.5], [-0.5, 0, 0, -0.5]]
