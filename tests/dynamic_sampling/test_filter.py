"""The filter stage on rows made by hand, with the real account behind it."""

import asyncio
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.dynamic_sampling.filter import Filter, judge
from pipeline.dynamic_sampling.ledger import FilterRules
from pipeline.errors import FinalError
from pipeline.store.admission import Admission
from pipeline.store.client import StoreClient
from pipeline.store.cursor import PromptCursor
from pipeline.store.errors import StaleAttempt
from pipeline.store.policy_store import PolicyStore
from pipeline.store.status import TrainerState

CHUNK, BATCH = 2, 4
AGREE, DIFFER = [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]


def table(chunk: int, *groups: list[float | None], acc: list[list[Any]] | None = None) -> pa.Table:
    """Rows with these scores; None is a reward that failed."""
    rows = []
    for number, scores in enumerate(groups):
        for sample, score in enumerate(scores):
            parts = {"acc": acc[number][sample], "pred": "x"} if acc else {}
            rows.append(
                {
                    "iteration": 1,
                    "chunk": chunk,
                    "uid": f"{chunk}-{number}",
                    "data_source": "countdown",
                    "sample": sample,
                    "spans": [{"kind": 1, "tokens": sample + 1}],
                    "score": 0.0 if score is None else score,
                    "reward_error": "ValueError: no" if score is None else None,
                    "reward_parts": "{}" if score is None else json.dumps(parts),
                }
            )
    kinds = {"score": pa.float32(), "reward_error": pa.string()}
    return pa.table({name: pa.array([row[name] for row in rows], kinds.get(name)) for name in rows[0]})


class LocalStore(StoreClient):
    """A store of this process."""

    def __init__(self, store: PolicyStore, attempt: int):
        super().__init__(store, attempt)
        self.loop = asyncio.new_event_loop()

    def _send(self, method: Any, *args: Any) -> Any:
        return self.loop.run_until_complete(method(self._store, *args))

    def _answer(self, method: Any, ref: Any, timeout: float) -> Any:
        return ref

    def wait(self, method: Any, /, *args: Any) -> Any:
        return self.call(method, *args)


class Stage:
    """The stage of a run that began with version 2."""

    def __init__(self, staleness: int = 0, carry: bool = False, most: int = 2, max_error_rate: float = 0.1) -> None:
        rules = FilterRules("score", most, carry, BATCH, CHUNK, 9, max_error_rate)
        self.store = PolicyStore(Admission(CHUNK, BATCH, staleness, 9))
        self.client = LocalStore(self.store, 1)
        self.client.ask(PolicyStore.new_attempt)
        self.client.call(PolicyStore.register_trainer, TrainerState(2, PromptCursor(), False), 1)
        self.filter = Filter(rules, self.client, 1.0)

    def __call__(self, rows: pa.Table) -> list[tuple[str, int]]:
        """Group and iteration of what stays, one for each row."""
        kept = self.filter(rows)
        assert kept.schema.equals(rows.schema)
        return list(zip(*(kept[name].to_pylist() for name in ("uid", "iteration")), strict=True))


def test_groups_that_agree_go_and_the_others_are_numbered() -> None:
    stage = Stage()
    assert stage(table(0, DIFFER, AGREE)) == [("0-0", 3)] * 3
    assert stage(table(1, AGREE, AGREE)) == []
    assert stage(table(2, DIFFER, DIFFER)) == [("2-0", 3)] * 3 + [("2-1", 3)] * 3
    # The batch has room for one group more.
    assert stage(table(3, DIFFER, DIFFER)) == [("3-0", 3)] * 3
    assert stage(table(4, DIFFER, AGREE)) == [("4-0", 4)] * 3
    assert stage.store.dropped_groups == 1 + 2 + 1 + 1


def test_surplus_is_carried() -> None:
    stage = Stage(staleness=1, carry=True)
    stage(table(0, DIFFER, AGREE))
    stage(table(1, DIFFER, DIFFER))
    assert stage(table(2, DIFFER, DIFFER)) == [("2-0", 3)] * 3 + [("2-1", 4)] * 3


def test_a_chunk_that_comes_again_gives_the_same() -> None:
    stage = Stage()
    stage(table(0, DIFFER, AGREE))
    once = stage(table(1, DIFFER, DIFFER))
    assert stage(table(1, DIFFER, DIFFER)) == once != []
    assert stage.store.dropped_groups == 1


def test_an_actor_that_lost_count_restarts_the_attempt() -> None:
    with pytest.raises(StaleAttempt, match="chunk 3 but expected 0"):
        Stage()(table(3, DIFFER, DIFFER))


def test_no_rows_stay_no_rows() -> None:
    assert Stage()(table(0, DIFFER).slice(0, 0)) == []


def test_order_and_columns_of_rows_are_kept() -> None:
    rows = table(0, AGREE, DIFFER)
    kept = Stage().filter(rows)
    assert kept.drop_columns(["iteration"]).equals(rows.slice(3).drop_columns(["iteration"]))


def test_a_failed_reward_agrees_with_nobody() -> None:
    _, found = judge(
        table(
            *(0, [1.0, None, 1.0], [0.0, None, 0.0]),  # 0 is what the column holds of a failure
            *([None, 1.0, 0.0], [None, None, 1.0], [None, None, None], [0.0, None, 1.0]),
        ),
        "score",
    )
    assert found.kept == [2, 5] and (found.groups, found.equal, found.failed) == (6, 2, 2)
    assert (found.rows, found.errors, found.score) == (18, 9, 1.0 + 1.0 + 0.0 + 0.0 + 1.0 + 1.0 + 1.0)


def test_the_metric_says_what_is_compared() -> None:
    rows = table(0, [0.1, 0.2, 0.3], AGREE, acc=[[1, True, 1.0], [0, 1, 0]])
    assert judge(rows, "score")[1].kept == [0]
    assert judge(rows, "acc")[1].kept == [1]


def test_a_metric_that_the_reward_does_not_give() -> None:
    words = r"algorithm\.filter_groups\.metric=pred: the reward of a row of uid 0-0 \(countdown\) has no number of that"
    with pytest.raises(ValueError, match=words + r" name; there are: score, acc"):
        judge(table(0, DIFFER, acc=[[1, 0, 1]]), "pred")
    # What failed has no parts, and needs none.
    assert judge(table(0, [None, 0.0, 1.0], acc=[[None, 0, 1]]), "acc")[1].kept == [0]


def test_rows_of_a_group_need_not_stand_together() -> None:
    rows = table(0, DIFFER, AGREE).take(np.array([0, 3, 1, 4, 2, 5]))
    group, found = judge(rows, "score")
    assert group.tolist() == [0, 1, 0, 1, 0, 1] and found.kept == [0]


def test_what_never_passes_ends_the_run_with_a_sentence() -> None:
    stage = Stage()
    for chunk in range(3):
        assert stage(table(chunk, AGREE, AGREE)) == []
    with pytest.raises(FinalError) as error:
        stage(table(3, AGREE, AGREE))
    assert str(error.value).startswith(
        "iteration 3 is not full after 8 groups, algorithm.filter_groups.max_num_gen_batches=2 x "
        "data.train_batch_size=4: 100% of them were dropped, 8 because their score agrees; all rewards"
    )


def test_the_last_group_that_fills_the_iteration_saves_the_run() -> None:
    stage = Stage()
    for chunk in range(3):
        stage(table(chunk, DIFFER, AGREE))
    assert stage(table(3, AGREE, DIFFER)) == [("3-1", 3)] * 3


def test_too_little_that_passes_says_why() -> None:
    stage = Stage(max_error_rate=1.0)
    stage(table(0, DIFFER, [None, None, 1.0]))
    for chunk in (1, 2):
        stage(table(chunk, AGREE, AGREE))
    with pytest.raises(FinalError, match="88% of them were dropped, 6 because their score agrees and 1 had fewer than"):
        stage(table(3, AGREE, AGREE))


def test_errors_of_dropped_groups_count_towards_the_error_rate() -> None:
    stage = Stage(max_error_rate=0.2)
    stage(table(0, DIFFER, [None, None, None]))
    stage(table(1, DIFFER, DIFFER))
    with pytest.raises(FinalError, match="the reward failed for 22% of the rows generated for iteration 3.*=20%; one"):
        stage(table(2, DIFFER, [None, 0.0, 0.0]))
