"""The prompt stage of dynamic sampling against its real policy store, which runs in a thread."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipeline.dynamic_sampling.ledger import ChunkStats, FilterRules, Ledger
from pipeline.prompts import stage
from pipeline.prompts.sampler import Sampler
from pipeline.prompts.stage import Schedule
from pipeline.store.cursor import PromptCursor
from pipeline.store.policy_store import PolicyStore
from tests.prompts.test_stage import START, WAIT, Run, make, shape  # noqa: F401 (a fixture)

MOST = 3


class Endless(Run):
    """A store and the stage of a run with dynamic sampling; chunks of 2 prompts, 2 chunks to an iteration."""

    def __init__(self, plain: Run):
        config = plain.config
        config.algorithm.filter_groups.enable = True
        config.algorithm.filter_groups.max_num_gen_batches = MOST
        schedule = Schedule.of(config, plain.schedule.iterations)
        self.rules = FilterRules.of(config, schedule.iterations)
        super().__init__(config, schedule, plain.actor_handle._loop, plain.run_dir)

    def start(self, version: int = 0, cursor: PromptCursor = START, validated: bool = True) -> None:
        super().start(version, cursor, validated)
        self.ledger = Ledger(self.rules, version)

    def pass_on(self, chunk: int, kept: int) -> None:
        """The filter keeps so many groups of the chunk."""
        decision = self.ledger.decide(chunk, ChunkStats(2, list(range(kept)), 2 - kept))
        if decision.full:
            self.store.call(PolicyStore.report_filled, decision.iteration, *decision.used, {})
        self.store.call(PolicyStore.report_groups, self.ledger.kept, self.ledger.dropped)


def uids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["uid"] for row in rows if row["split"] == "train"]


def test_pages_go_on_past_the_prompts_of_an_iteration(make: Callable[..., Run]) -> None:  # noqa: F811
    run = Endless(make(iterations=2, rows=40))
    assert shape(run.page(0)) == [("train", chunk, None) for chunk in (0, 0, 1, 1)]
    assert shape(run.page(1)) == [("train", chunk, None) for chunk in (2, 2, 3, 3)]
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(run.page, 2)
        with pytest.raises(TimeoutError):
            third.result(0.3)
        for chunk in range(2):
            run.pass_on(chunk, kept=0)
        # Iteration 1 goes on with the second page, and the third is made ahead.
        assert shape(third.result(WAIT)) == [("train", chunk, None) for chunk in (4, 4, 5, 5)]
    assert uids(run.page(0)) + uids(run.page(1)) == uids([*run.page(0), *run.page(1)])


def test_data_is_gone_through_as_often_as_needed(make: Callable[..., Run]) -> None:  # noqa: F811
    run = Endless(make(iterations=2, rows=5, epochs=1))
    seen = []
    for page in range(run.schedule.pages - 1):
        seen += run.page(page)
        for chunk in (2 * page, 2 * page + 1):
            run.pass_on(chunk, kept=0)
    assert len(seen) > 20 and {row["epoch"] for row in seen} > {0, 1, 2}


def test_pages_end_with_the_last_iteration(make: Callable[..., Run]) -> None:  # noqa: F811
    run = Endless(make(iterations=2, val_rows=2))
    run.config.trainer.val_before_train = False
    run.page(0)
    for version in (1, 2):
        for chunk in range(2 * version - 2, 2 * version):
            run.pass_on(chunk, kept=2)
        run.publish(version)
        rows = run.page(version)
    assert shape(rows) == [("val", -1, 2)] * 2
    assert run.store.call(PolicyStore.last_version) == 2
    assert [run.page(page) for page in range(3, run.schedule.pages)] == [[]] * (run.schedule.pages - 3)
    ticket = run.store.wait(PolicyStore.admit, 4, WAIT)
    assert ticket is None, "a chunk that was made ahead does not start any more"


def test_a_version_is_validated_in_front_of_its_first_page(make: Callable[..., Run]) -> None:  # noqa: F811
    run = Endless(make(iterations=3, val_rows=2, test_freq=1))
    assert shape(run.page(0))[:2] == [("val", -1, 0)] * 2
    assert {split for split, *_ in shape(run.page(1))} == {"train"}, "made ahead, at version 0"
    run.pass_on(0, 2)
    run.pass_on(1, 2)
    run.publish(1)
    assert shape(run.page(2))[:2] == [("val", -1, 1)] * 2
    # An actor that is started again makes the same page.
    assert run.page(2, run.actor()) == run.page(2)
    assert shape(run.page(2))[:2] == [("val", -1, 1)] * 2


def test_a_resumed_run_leaves_out_what_is_used_up(make: Callable[..., Run]) -> None:  # noqa: F811
    run = Endless(make(iterations=6, rows=40))
    whole = [uid for page in range(2) for uid in uids(run.page(page))]
    run.pass_on(0, 1)
    run.pass_on(1, 2)
    run.pass_on(2, 2)  # one of them is surplus, and discarded
    run.publish(1)
    whole += uids(run.page(2))
    end = run.end_of(1)
    assert end == PromptCursor(0, 4, batch=2, skip=2)
    run.start(1, end)
    resumed = uids(run.page(0)) + uids(run.page(1))
    assert resumed[:6] == whole[6:] and not set(resumed[6:]) & set(whole)
    assert run.page(0, run.actor()) == run.page(0)


def test_a_checkpoint_of_a_run_without_filter_is_a_start(make: Callable[..., Run]) -> None:  # noqa: F811
    run = Endless(make(iterations=6, rows=40, shuffle=False))
    run.start(1, PromptCursor(0, 8))
    assert [row["offset"] for row in run.page(0)] == [8, 9, 10, 11]


class Learning(Sampler):
    def update(self, iteration: int, outcomes: Any) -> None:
        pass


def test_what_learns_from_recorded_rows_is_refused(make: Callable[..., Run]) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="dropped groups are not recorded"):
        Endless(make(iterations=2, sampler="tests.prompts.test_endless:Learning"))


def test_pages_are_enough_for_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    for iterations in (1, 7, 100, 2000):
        for test_freq, val in ((-1, True), (1, True), (5, False)):
            schedule = Schedule(iterations, 2, 2, val, True, test_freq, 1, MOST)
            # The last page has no prompts, but the last validation.
            assert (schedule.pages - 1) * schedule.page_iterations >= iterations * MOST + 2
            assert schedule.page_iterations == 1 or not (val and test_freq > 0)
            assert test_freq == 1 or schedule.pages <= stage.MAX_PAGES + 2
