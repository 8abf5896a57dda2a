"""Validation metrics against hand-worked tables."""

import json
import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from pipeline.config.agent import AgentConfig
from pipeline.rows import SCHEMA
from pipeline.stats import Stats, reduce
from pipeline.track.validation import check_metric, prompt_scores, validation_metrics


def validation(*rows: tuple) -> pa.Table:
    """Rows of source, uid, score, response, reward_parts, reward_error."""
    names = ("data_source", "uid", "score", "response", "reward_parts", "reward_error")
    made = [dict(zip(names, (*row, None, None)[:6], strict=True)) for row in rows]
    return pa.Table.from_pylist(made, schema=pa.schema([SCHEMA.field(name) for name in names]))


def pred(answer) -> str:
    return json.dumps({"pred": answer})


def metrics_of(table: pa.Table) -> Stats:
    return validation_metrics(prompt_scores(table))


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
    got = reduce([metrics_of(VALIDATION)])
    assert got == pytest.approx(
        {
            "val-core/s/reward/mean@4": 3 / 8,
            "val-core/s/reward/best@4/mean": 1.0,
            "val-core/s/reward/maj@4/mean": 0.5,
            "val-aux/s/reward/worst@4/mean": 0.0,
            "val-aux/s/reward/std@4": (0.5 + math.sqrt(3 / 16)) / 2,
            # The means of the two prompts are 1/2 and 1/4; source dir/t has only one prompt.
            "val-aux/s/reward/stderr@4": 1 / 8,
            "val-aux/s/reward/best@2/mean": (5 / 6 + 3 / 6) / 2,
            "val-aux/s/reward/worst@2/mean": (1 / 6 + 0) / 2,
            "val-aux/s/reward/error_rate": 0.0,
            "val-core/dir/t/reward/mean@1": 0.5,
            "val-core/dir/t/reward/best@1/mean": 0.5,
            "val-core/dir/t/reward/maj@1/mean": 0.5,
            "val-aux/dir/t/reward/error_rate": 0.0,
        }
    )


def test_the_standard_error_of_right_answers_is_the_binomial_one():
    prompts = [("s", f"{i}", float(i < 30), "x", json.dumps({"acc": int(i < 30)})) for i in range(100)]
    got = reduce(metrics_of(validation(*part)) for part in (prompts[:37], prompts[37:]))
    assert got["val-core/s/acc/mean@1"] == pytest.approx(0.3)
    assert got["val-aux/s/acc/stderr@1"] == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert got["val-aux/s/reward/stderr@1"] == got["val-aux/s/acc/stderr@1"]


def test_validation_merges_over_ranks():
    uid = np.array(VALIDATION["uid"].to_pylist())
    parts = [VALIDATION.filter(pa.array(uid == u)) for u in ("b", "a", "none")]
    assert reduce(metrics_of(part) for part in parts) == pytest.approx(reduce([metrics_of(VALIDATION)]))


def test_failed_validation_rows_are_counted_and_left_out():
    failed = [("s", uid, 0.0, "x", None, "TimeoutError") for uid in ("a", "b", "b")]
    got = reduce([metrics_of(validation(("s", "a", 1.0, "x"), *failed))])
    assert got["val-aux/s/reward/error_rate"] == 0.75
    assert got["val-core/s/reward/mean@2"] == 1.0
    only = reduce([metrics_of(validation(("s", "a", 0.0, "x", None, "TimeoutError")))])
    assert only == {"val-aux/s/reward/error_rate": 1.0}


def test_a_source_is_judged_by_acc_where_the_reward_gives_one():
    def right(acc):
        return json.dumps({"acc": acc})

    got = reduce([metrics_of(validation(("s", "a", 1.0, "x", right(1)), ("s", "b", 0.1, "y", right(0))))])
    assert got["val-core/s/acc/mean@1"] == 0.5
    assert got["val-aux/s/reward/mean@1"] == pytest.approx(0.55)
    assert not [name for name in got if name.startswith("val-core/s/reward")]


def test_an_answer_without_acc_is_not_right() -> None:
    rows = [("s", "a", 1.0, "3", '{"acc": 1}'), ("s", "a", 0.5, "4", '{"acc": null}'), ("s", "b", 0.0, "?", "{}")]
    rows += [("s", "b", 0.0, "!"), ("s", "c", 0.0, "x", "{}", "TimeoutError"), ("t", "d", 1.0, "y", "{}")]
    got = reduce([metrics_of(validation(*rows))])
    assert (got["val-core/s/acc/mean@2"], got["val-core/s/acc/best@2/mean"]) == (1 / 4, 1 / 2)
    assert got["val-core/s/acc/maj@2/mean"] == 1 / 4
    assert got["val-aux/s/acc/missing_rate"] == 3 / 4
    # A source in which no row has one is judged by its score.
    assert got["val-core/t/reward/mean@1"] == 1 and not [name for name in got if "/t/acc" in name]


def test_a_worker_of_the_light_stages_imports_no_model_library() -> None:
    modules = ("reward.stage", "track.validation", "advantage.baseline", "advantage.stage", "track.trajectories")
    code = f"import sys, {', '.join(f'pipeline.{name}' for name in modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"torch", "transformers", "vllm", "ray.train"} & set(loaded.split())


SOURCES = {"数学": True, "a/b": False, "new": None}


@pytest.mark.parametrize(
    "metric",
    [
        *(
            "val-core/数学/acc/mean@4",
            "val-aux/数学/acc/missing_rate",
            "val-aux/数学/reward/best@2/mean",
            "val-core/数学/acc/maj@4/mean",
        ),
        *("val-core/a/b/reward/mean@4", "val-aux/a/b/reward/error_rate", "val-aux/a/b/reward/std@4"),
        *("val-core/new/acc/mean@4", "val-core/new/reward/mean@4"),
    ],
)
def test_metrics_that_a_validation_will_report(metric: str) -> None:
    check_metric(metric, SOURCES, 4, AgentConfig())


@pytest.mark.parametrize(
    "metric",
    [
        *("acc", "val-core/数学/mean@4", "val-core/数学/acc/mean@1", "val-core/语文/acc/mean@4", "critic/score/mean"),
        *("val-core/a/b/acc/mean@4", "val-core/数学/reward/mean@4", "val-agent/turns/mean"),
    ],
)
def test_metrics_that_no_validation_will_report(metric: str) -> None:
    with pytest.raises(
        ValueError, match=f"trainer.best_metric={metric} is not a metric of this run's validation"
    ) as error:
        check_metric(metric, SOURCES, 4, AgentConfig())
    assert "there are: val-core/数学/acc/mean@4, " in str(error.value)


def test_episodes_may_give_what_is_not_known_before() -> None:
    agent = AgentConfig(environment="m:E")
    check_metric("val-agent/turns/mean", SOURCES, 4, agent)
    check_metric("val-core/a/b/acc/mean@4", SOURCES, 4, agent)
