import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.advantage.config import AlgorithmConfig
from pipeline.advantage.stage import Advantage
from pipeline.rows import PROMPT, REWARD, ROLLOUT, SCHEMA

BEFORE = pa.schema([*PROMPT, *ROLLOUT, *REWARD])


@pytest.fixture(autouse=True)
def _custom_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def table(*rows: dict) -> pa.Table:
    """Rows of uid, score and mask; the rest of the columns is null."""
    made = []
    for row in rows:
        mask = row.get("mask", [1, 1])
        made.append(
            dict.fromkeys(BEFORE.names)
            | {"split": "train", "reward_error": None}
            | {k: v for k, v in row.items() if k != "mask"}
            | {"response_mask": mask, "response_ids": [5] * len(mask)}
        )
    return pa.Table.from_pylist(made, schema=BEFORE)


def run(rows: pa.Table, **config) -> dict[str, list]:
    done = Advantage(AlgorithmConfig(**config))(rows)
    assert done.schema.equals(SCHEMA)
    return done.select(["advantages", "returns", "response_mask", "uid"]).to_pydict()


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
    assert got["response_mask"][0] == [1, 0, 1]


def test_a_failed_row_keeps_its_place_and_takes_no_part():
    good = [{"uid": "a", "score": s} for s in (1.0, 0.0, 0.0)]
    failed = {"uid": "a", "score": 0.0, "reward_error": "ValueError: no number"}
    without = run(table(*good), norm_adv_by_std_in_grpo=False)["advantages"]
    got = run(table(good[0], failed, good[1], good[2]), norm_adv_by_std_in_grpo=False)
    assert got["advantages"] == [without[0], [0, 0], without[1], without[2]]
    assert got["advantages"][0] == pytest.approx([2 / 3] * 2)
    assert got["response_mask"] == [[1, 1], [0, 0], [1, 1], [1, 1]]


def test_one_or_none_left_gives_zero():
    failed = {"uid": "a", "score": 0.0, "reward_error": "x"}
    got = run(table({"uid": "a", "score": 1.0}, failed, {**failed, "uid": "b"}, {**failed, "uid": "b", "mask": []}))
    assert got["advantages"] == [[0, 0], [0, 0], [0, 0], []]
    assert got["response_mask"] == [[1, 1], [0, 0], [0, 0], []]


def test_validation_rows_pass_untouched():
    rows = [
        {"uid": "a", "score": s, "split": "val", "reward_error": e} for s, e in ((1.0, None), (0.0, None), (0.0, "x"))
    ]
    got = run(table(*rows))
    assert got["advantages"] == got["returns"] == [[0, 0]] * 3
    assert got["response_mask"] == [[1, 1]] * 3
    # A mixed table: training statistics do not see validation rows of the same uid.
    mixed = run(table(*rows, {"uid": "a", "score": 3.0}, {"uid": "a", "score": 1.0}), norm_adv_by_std_in_grpo=False)
    assert mixed["advantages"] == [[0, 0]] * 3 + [[1, 1], [-1, -1]]


def test_empty_sliced_and_chunked_tables():
    rows = table(*({"uid": u, "score": s, "mask": [1] * n} for u, s, n in (("a", 1, 3), ("a", 0, 1), ("b", 2, 2))))
    assert run(rows.slice(0, 0))["advantages"] == []
    assert run(BEFORE.empty_table())["advantages"] == []
    whole = run(rows)
    assert run(pa.concat_tables([rows.slice(0, 1), rows.slice(1)])) == whole
    assert run(pa.concat_tables([rows.slice(1), rows.slice(0, 1)]))["advantages"][-1] == whole["advantages"][0]


def test_same_result_group_by_group_and_all_at_once():
    rng = np.random.default_rng(0)
    rows = [
        {"uid": f"g{i // 4}", "score": float(rng.random()), "mask": [1] * int(rng.integers(0, 5))} for i in range(32)
    ]
    whole = run(table(*rows))["advantages"]
    assert whole == [a for i in range(0, 32, 4) for a in run(table(*rows[i : i + 4]))["advantages"]]


def test_a_score_without_error_must_be_a_number():
    for bad in (float("nan"), float("inf"), None):
        with pytest.raises(ValueError, match="row of uid b has score"):
            run(table({"uid": "a", "score": 1.0}, {"uid": "b", "score": bad}))


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
