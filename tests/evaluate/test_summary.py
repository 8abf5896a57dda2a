"""Metrics of an evaluation: the same as validation's, whatever the chunks."""

import json
import math

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluate.summary import Summary
from pipeline.rows import SCHEMA, SPANS
from pipeline.stats import reduce
from pipeline.track.validation import prompt_scores, validation_metrics

NAMES = ("data_source", "uid", "score", "response", "reward_parts", "reward_error", "response_ids", "finish_reason")


def responses(*rows: tuple) -> pa.Table:
    """Rows of source, uid, score, response, reward_parts, reward_error, tokens and finish_reason."""
    made = []
    for row in rows:
        values = [*row, *(None, None, 1, "stop")[len(row) - 4 :]]
        made.append(dict(zip(NAMES, values, strict=True)) | {"response_ids": [7] * values[6]})
    return pa.Table.from_pylist(made, schema=pa.schema([SCHEMA.field(name) for name in NAMES]))


def summed(ks: tuple[int, ...], *tables: pa.Table) -> Summary:
    summary = Summary(ks)
    for table in tables:
        summary.add(table)
    return summary


def pred(answer: object, **more: object) -> str:
    return json.dumps({"pred": answer, **more})


PROMPTS = st.lists(
    st.tuples(
        st.sampled_from(["s", "dir/t"]),
        st.lists(
            st.tuples(
                st.floats(-1, 1, width=32), st.sampled_from([" a", "a", "b"]), st.sampled_from([None, '{"pred": 1}'])
            ),
            min_size=4,
            max_size=4,
        ),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40)
@given(PROMPTS, st.booleans())
def test_as_validation(prompts: list, with_acc: bool) -> None:
    tables = []
    for number, (source, group) in enumerate(prompts):
        rows = []
        for score, response, parts in group:
            known = json.loads(parts or "{}") | ({"acc": abs(score) / 2} if with_acc else {})
            rows.append((source, f"u{number}", score, response, json.dumps(known)))
        tables.append(responses(*rows))
    expected = reduce([validation_metrics(prompt_scores(pa.concat_tables(tables)))])
    variable = "acc" if with_acc else "reward"
    for order in (tables, [pa.concat_tables(tables)]):
        found = summed((1, 2, 4), *order).by_source()
        assert set(found) == {source for source, _ in prompts}
        for source, metrics in found.items():
            core, aux = f"val-core/{source}/{variable}", f"val-aux/{source}/{variable}"
            assert metrics["mean"] == pytest.approx(expected[f"{core}/mean@4"], abs=1e-9)
            assert metrics["pass@1"] == pytest.approx(metrics["mean"], abs=1e-9)
            assert metrics["pass@2"] == pytest.approx(expected[f"{aux}/best@2/mean"], abs=1e-9)
            assert metrics["pass@4"] == pytest.approx(expected[f"{core}/best@4/mean"], abs=1e-9)
            assert metrics["maj@4"] == pytest.approx(expected[f"{core}/maj@4/mean"], abs=1e-9)
            own = {True: "val-aux", False: "val-core"}[with_acc]
            assert metrics["score/mean"] == pytest.approx(expected[f"{own}/{source}/reward/mean@4"], abs=1e-9)


TABLE = responses(
    ("s", "a", 1.0, "7", pred(7), None, 3),
    ("s", "a", 0.0, "8", pred(8), None, 5, "length"),
    ("s", "a", 0.0, "8 ", pred(8), None, 4),
    ("s", "b", 0.0, "x", None, "TimeoutError: 3 s", 2),
    ("s", "b", 0.0, "y", None, "TimeoutError: 4 s", 2),
    ("s", "b", 0.0, "z", None, None, 2),
    ("t", "c", -2.0, "x", pred(1, acc=0.5), None, 9),
    ("t", "c", -1.0, "x", pred(2, acc=1), None, 1),
    ("t", "c", -1.0, "x", pred(2, acc=1), None, 1),
)


def test_by_hand() -> None:
    summary = summed((1, 2, 3), TABLE)
    s, t = summary.by_source().values()
    assert s == pytest.approx(
        {
            "prompts": 2,
            "responses": 6,
            "mean": 1 / 6,
            "pass@1": 1 / 6,
            "pass@2": (2 / 3 + 0) / 2,
            "pass@3": 1 / 2,
            "maj@1": 1 / 6,
            "maj@2": 1 / 6,
            "maj@3": 0.0,
            "score/mean": 1 / 6,
            "error_rate": 2 / 6,
            "response_length/mean": 3.0,
            "response_length/max": 5,
            "response_length/clip_ratio": 1 / 6,
        }
    )
    assert (summary.judged_by("s"), summary.judged_by("t")) == ("reward", "acc")
    assert (t["mean"], t["maj@3"], t["score/mean"]) == pytest.approx((5 / 6, 1.0, -4 / 3))
    assert summary.first_error == "TimeoutError: 3 s"
    assert (summary.prompts, summary.tokens) == (3, 29)


def test_an_answer_without_acc_is_not_right_whichever_chunk_comes_first() -> None:
    tables = [
        responses(("s", "a", 1.0, "?"), ("s", "a", 1.0, "!")),
        responses(("s", "b", 1.0, "3", '{"acc": 1}'), ("s", "b", 0.0, "x", None, "TimeoutError")),
        responses(("t", "c", 1.0, "x")),
    ]
    for order in (tables, tables[::-1]):
        summary = summed((1, 2), *order)
        found = summary.by_source()
        assert (found["s"]["mean"], found["s"]["pass@2"], found["s"]["maj@2"]) == (0.5, 0.5, 0.5)
        assert found["s"]["acc/missing_rate"] == summary.overall()["acc/missing_rate"] == pytest.approx(2 / 3)
        assert "acc/missing_rate" not in found["t"] and found["t"]["mean"] == 1.0
        assert summary.overall()["mean"] == pytest.approx(2 / 3)


def test_all_prompts_together_weigh_the_same() -> None:
    whole = summed((3,), TABLE).overall()
    assert whole["mean"] == pytest.approx((2 * 1 / 6 + 5 / 6) / 3)
    assert whole["maj@3"] == pytest.approx(1 / 3)
    assert whole["score/mean"] == pytest.approx((2 * 1 / 6 - 4 / 3) / 3)
    assert (whole["prompts"], whole["responses"], whole["error_rate"]) == (3, 9, pytest.approx(2 / 9))
    assert (whole["response_length/max"], whole["response_length/mean"]) == (9, pytest.approx(29 / 9))


def test_where_nothing_could_be_scored_there_is_no_mean() -> None:
    failed = responses(("s", "a", 0.0, "x", None, "ValueError: no"))
    assert "mean" not in summed((1,), failed).by_source()["s"]
    both = summed((1,), failed, responses(("t", "b", 1.0, "x"))).overall()
    assert both["mean"] == 1.0 and both["error_rate"] == 0.5 and both["prompts"] == 2
    assert summed((1,)).overall() == {}


def test_fewer_responses_than_k_are_all_of_them() -> None:
    rows = [("s", "a", float(i == 0), "x", None, None if i < 2 else "no") for i in range(4)]
    found = summed((2, 4), responses(*rows)).by_source()["s"]
    assert found["pass@2"] == found["pass@4"] == 1.0
    assert math.isclose(found["maj@4"], 0.5)


def test_of_episodes_the_tokens_of_the_model_count() -> None:
    def spans(*tokens: int) -> list[dict]:
        return [{"kind": (number + 1) % 2, "tokens": count} for number, count in enumerate(tokens)]

    made = responses(*(("s", uid, 1.0, "x", None, None, 9) for uid in "ab"))
    made = made.append_column("spans", pa.array([spans(2, 4, 3), spans(9)], SPANS))
    made = made.append_column("turns", pa.array([2, 1], pa.int32()))
    summary = summed((1,), made)
    got = summary.overall()
    assert (got["response_length/mean"], got["response_length/max"], got["turns/mean"]) == (7.0, 9, 1.5)
    assert summary.tokens == 14
    assert "turns/mean" not in summed((1,), made.drop_columns(["spans", "turns"])).overall()
