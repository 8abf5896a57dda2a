import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.advantage.baseline import Baseline
from pipeline.rows import BASELINE, PROMPT, REWARD, ROLLOUT

SCORED = pa.schema([*PROMPT, *ROLLOUT, *REWARD])
FAILED = "the reward of the greedy baseline failed: "


def row(uid: str, score: float, split: str = "train", error: str | None = None, sample: int = 0) -> dict:
    given = {"uid": uid, "score": score, "split": split, "reward_error": error, "sample": sample}
    return dict.fromkeys(SCORED.names) | given


def greedy(uid: str, score: float, error: str | None = None) -> dict:
    return row(uid, score, "baseline", error, sample=2)


def scored(*made: dict) -> pa.Table:
    return pa.Table.from_pylist(list(made), schema=SCORED)


def test_greedy_scores_by_hand() -> None:
    table = scored(
        *(row("a", 1.0), row("a", 0.0, sample=1), greedy("a", 0.25)),
        *(row("b", 3.0), row("b", 4.0, sample=1), greedy("b", -2.0)),
    )
    done = Baseline()(table)
    assert done["baseline"].to_pylist() == [0.25, 0.25, -2.0, -2.0]
    assert done["uid"].to_pylist() == ["a", "a", "b", "b"]
    assert done["score"].to_pylist() == [1.0, 0.0, 3.0, 4.0]
    assert done["split"].to_pylist() == ["train"] * 4
    assert done.schema.equals(pa.schema([*SCORED, *BASELINE]))
    # All that the other rows hold stays as it was.
    assert done.drop_columns(["baseline"]).equals(table.take([0, 1, 3, 4]))


def test_a_failed_greedy_reward_fails_its_group_and_no_other() -> None:
    done = Baseline()(
        scored(
            *(
                row("a", 1.0),
                row("a", 0.0, error="TypeError: own", sample=1),
                greedy("a", 0.0, "ValueError: no number"),
            ),
            *(row("b", 3.0), row("b", 0.0, error="KeyError: own", sample=1), greedy("b", 5.0)),
        )
    )
    assert done["baseline"].to_pylist() == [None, None, 5.0, 5.0]
    assert done["reward_error"].to_pylist() == [
        FAILED + "ValueError: no number",
        "TypeError: own",
        None,
        "KeyError: own",
    ]
    assert done["score"].to_pylist() == [1.0, 0.0, 3.0, 0.0]


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 5), st.randoms(use_true_random=False))
def test_rows_of_any_order_and_any_blocks(prompts: int, n: int, cuts: int, rng: random.Random) -> None:
    scores = {f"u{i}": float(rng.randrange(100)) for i in range(prompts)}
    broken = {uid for uid in scores if rng.random() < 0.3}
    made = [row(uid, rng.random(), sample=i) for uid in scores for i in range(n)]
    made += [greedy(uid, score, "x" if uid in broken else None) for uid, score in scores.items()]
    rng.shuffle(made)
    at = sorted(rng.randrange(len(made) + 1) for _ in range(cuts))
    parts = [scored(*made[i:j]) for i, j in zip([0, *at], [*at, len(made)], strict=True)]
    done = Baseline()(pa.concat_tables(parts)).to_pylist()
    kept = [r for r in made if r["split"] == "train"]
    assert [(r["uid"], r["sample"]) for r in done] == [(r["uid"], r["sample"]) for r in kept]
    for r in done:
        failed = r["uid"] in broken
        assert r["baseline"] == (None if failed else scores[r["uid"]])
        assert r["reward_error"] == (FAILED + "x" if failed else None)


def test_a_group_without_a_greedy_row() -> None:
    table = scored(row("a", 1.0), greedy("a", 1.0), row("b", 1.0), row("b", 2.0), row("c", 1.0))
    with pytest.raises(
        ValueError, match="3 of 4 rows have no greedy response, the first of them with uid 'b': one row"
    ):
        Baseline()(table)


def test_a_recorded_column_is_kept_and_its_gaps_are_failures() -> None:
    """As the rows of a replay bring it."""
    table = scored(row("a", 1.0), row("b", 0.0), row("b", 0.0, error="KeyError: own"))
    table = table.append_column(BASELINE.field("baseline"), pa.array([0.5, None, None], pa.float32()))
    done = Baseline()(table)
    assert done.drop_columns(["reward_error"]).equals(table.drop_columns(["reward_error"]))
    errors = done["reward_error"].to_pylist()
    assert errors[0] is None and errors[2] == "KeyError: own"
    assert errors[1] == FAILED + "it failed in the run that was recorded"
    assert done.schema.equals(table.schema)


def test_no_rows() -> None:
    for empty in (SCORED.empty_table(), scored(row("a", 1.0)).slice(0, 0)):
        done = Baseline()(empty)
        assert len(done) == 0 and done.schema.equals(pa.schema([*SCORED, *BASELINE]))
