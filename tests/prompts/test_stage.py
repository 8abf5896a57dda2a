"""The prompt stage against the real policy store, which runs in a thread instead of a Ray actor."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import Config
from pipeline.prompts import stage
from pipeline.prompts.generator import Generator
from pipeline.prompts.stage import Prompts, Schedule
from pipeline.rows import PROMPT
from pipeline.sampling import row_limits
from pipeline.store.admission import Admission
from pipeline.store.client import StoreClient
from pipeline.store.cursor import PromptCursor
from pipeline.store.events import AttemptBegun, Event, PromptsMade, ValidationAnnounced
from pipeline.store.policy_store import PolicyStore
from pipeline.store.status import TrainerState
from pipeline.store.versions import POLICY
from pipeline.weights.load import Shard
from tests.prompts.recorded import record

WAIT = 30.0
START = PromptCursor()


class LocalActor:
    """An object whose methods are called as those of a Ray actor are: `actor.method.remote(...)` gives a future."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop):
        self._target, self._loop = target, loop

    def __getattr__(self, name: str) -> Any:
        class Method:
            @staticmethod
            def remote(*args: Any) -> Future:
                return asyncio.run_coroutine_threadsafe(getattr(self._target, name)(*args), self._loop)

        return Method


def get(future: Future, timeout: float | None = None) -> Any:
    return future.result(WAIT if timeout is None else timeout)


def stored(cursor: PromptCursor) -> PromptCursor:
    """As a checkpoint keeps it."""
    return PromptCursor.from_json(json.loads(json.dumps(cursor.to_json())))


class Run:
    """A store and the prompt stage of one attempt."""

    def __init__(self, config: Config, schedule: Schedule, loop: asyncio.AbstractEventLoop, run_dir: str):
        self.config, self.schedule, self.run_dir = config, schedule, run_dir
        sizes = config.rollout.chunk_prompts, config.data.train_batch_size, config.algorithm.max_staleness
        last = schedule.iterations if schedule.max_num_gen_batches is not None else None
        self.actor_handle = LocalActor(PolicyStore(Admission(*sizes, last)), loop)
        self.start()

    def start(self, version: int = 0, cursor: PromptCursor = START, validated: bool = True) -> None:
        """A new attempt of the stream, from `version` on."""
        attempt = StoreClient(self.actor_handle).ask(PolicyStore.new_attempt)
        self.store = StoreClient(self.actor_handle, attempt)
        self.store.call(PolicyStore.register_trainer, TrainerState(version, cursor, validated), 1)
        self.publish(version)
        self.prompts = self.actor()

    def actor(self) -> Prompts:
        config = self.config
        sections = config.data, config.model, config.trainer, row_limits(config)
        return Prompts(*sections, self.schedule, self.store, self.run_dir)

    def publish(self, version: int) -> None:
        self.store.call(PolicyStore.publish, version, {POLICY: Shard(0, [], [], [])}, 0.0)

    def page(self, number: int, prompts: Prompts | None = None) -> list[dict[str, Any]]:
        table = (prompts or self.prompts)(pa.table({"id": [number]}))
        assert table.schema.equals(PROMPT)
        return table.to_pylist()

    def end_of(self, iteration: int) -> PromptCursor:
        return self.store.call(PolicyStore.end_of_iteration, iteration)

    def events(self) -> list[Event]:
        """What the stage has reported to the driver."""
        _, events = self.store.ask(PolicyStore.read_events, 0, 0.0)
        return [event for event in events if not isinstance(event, AttemptBegun)]

    def made(self) -> list[PromptsMade]:
        return [event for event in self.events() if isinstance(event, PromptsMade)]


@pytest.fixture
def make(
    write: Callable[..., str],
    prompt_row: Callable[..., dict[str, Any]],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Run]]:
    """Makes a run: chunks of 2 prompts, 2 chunks to an iteration, one iteration to a page."""
    monkeypatch.setattr(stage, "load_tokenizer", lambda model: tokenizer)
    monkeypatch.setattr(stage, "PAGE_PROMPTS", 0)
    monkeypatch.setattr(ray, "get", get)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def make_run(
        iterations: int,
        rows: int = 40,
        epochs: int = 1,
        val_rows: int = 0,
        test_freq: int = -1,
        staleness: int = 0,
        **data: Any,
    ) -> Run:
        config = Config()
        config.algorithm.max_staleness = staleness
        config.data.train_files = write([prompt_row(i) for i in range(rows)])
        if val_rows:
            config.data.val_files = write([prompt_row(100 + i) for i in range(val_rows)], "val.parquet")
        config.data.train_batch_size = 4
        config.rollout.chunk_prompts = 2
        config.trainer.total_epochs = epochs
        config.trainer.test_freq = test_freq
        for name, value in data.items():
            setattr(config.data, name, value)
        return Run(config, Schedule.of(config, iterations), loop, str(tmp_path / "run"))

    yield make_run
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT)
    loop.close()


def shape(rows: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(row["split"], row["chunk"], row["iteration"]) for row in rows]


def train(iteration: int, first: int) -> list[tuple[str, int, int]]:
    """The two chunks of an iteration, of which the first has the number `first`."""
    return [("train", first + i // 2, iteration) for i in range(4)]


@given(st.integers(1, 200_000))
def test_pages_hold_every_iteration_and_one_more(iterations: int) -> None:
    schedule = Schedule(iterations, 2, 2, False, True, -1)
    assert (schedule.pages - 1) * schedule.page_iterations >= iterations
    assert (schedule.pages - 2) * schedule.page_iterations < iterations
    assert schedule.pages <= stage.MAX_PAGES + 1
    assert schedule.page_iterations == 1 or iterations > stage.MAX_PAGES


def test_which_versions_are_validated() -> None:
    def validated(validation: bool = True, before: bool = True, freq: int = -1) -> list[int]:
        schedule = Schedule(5, 2, 2, validation, before, freq)
        return [version for version in range(6) if schedule.validates(version, version == 5)]

    assert validated() == [0, 5]
    assert validated(freq=2) == [0, 2, 4, 5]
    assert validated(before=False, freq=1) == [1, 2, 3, 4, 5]
    assert validated(validation=False, freq=1) == []


def test_schedule_of_a_config() -> None:
    config = Config()
    config.data.train_batch_size, config.rollout.chunk_prompts = 12, 4
    config.trainer.val_before_train, config.trainer.test_freq = False, 7
    assert Schedule.of(config, 9) == Schedule(9, 3, 4, False, False, 7, page_prompts=stage.PAGE_PROMPTS)
    config.data.val_files = "val.parquet"
    assert Schedule.of(config, 9).validation


def test_small_iterations_share_a_page_as_far_as_nothing_stands_between_them() -> None:
    def together(iterations: int = 100, page_prompts: int = 48, **more: Any) -> int:
        given = {"validation": False, "val_before_train": False, "test_freq": -1} | more
        return Schedule(iterations, 2, 2, page_prompts=page_prompts, **given).page_iterations

    assert together() == 12 and together(page_prompts=3) == together(page_prompts=0) == 1
    assert together(validation=True) == together(test_freq=5) == 12
    assert together(validation=True, test_freq=5) == 5, "one validation to a page"
    assert together(100 * stage.MAX_PAGES, validation=True, test_freq=5) == 100
    assert together(page_prompts=0, max_num_gen_batches=1) == together(max_num_gen_batches=1) == 1


@pytest.mark.parametrize(
    ("data", "shared"),
    [
        ({}, True),
        ({"sampler": "weighted"}, True),
        ({"sampler": "solve_rate"}, False),
        ({"sampler": "my/sampler.py:Own"}, False),
        ({"generator": "my/generator.py:Own"}, False),
    ],
)
def test_prompts_that_may_depend_on_what_became_of_others_are_made_late(data: dict[str, str], shared: bool) -> None:
    config = Config()
    config.data.train_batch_size = config.rollout.chunk_prompts = 4
    for name, value in data.items():
        setattr(config.data, name, value)
    assert (Schedule.of(config, 9).page_iterations > 1) is shared


@pytest.mark.parametrize("staleness", [0, 2])
def test_prompts_are_made_for_as_many_iterations_as_may_start_and_one_more(
    make: Callable[..., Run], staleness: int
) -> None:
    run, due = make(iterations=4 + staleness, staleness=staleness), 2 + staleness
    for page in range(due):
        assert shape(run.page(page)) == train(page + 1, 2 * page)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(run.page, due)
        with pytest.raises(TimeoutError):
            late.result(0.3)
        run.publish(1)
        assert shape(late.result(WAIT)) == train(due + 1, 2 * due)
    run.publish(2)
    run.publish(3)
    assert shape(run.page(due + 1)) == train(due + 2, 2 * due + 2)
    assert run.store.call(PolicyStore.last_version) is None
    assert run.page(due + 2) == []
    assert run.store.call(PolicyStore.last_version) == 4 + staleness


def test_rows_follow_the_order_of_the_source(make: Callable[..., Run]) -> None:
    run = make(iterations=3, shuffle=False)
    rows = [row for page in range(2) for row in run.page(page)]
    assert [row["offset"] for row in rows] == list(range(8))
    assert [row["uid"] for row in rows] == [f"0-{i}" for i in range(8)]
    assert [run.end_of(iteration) for iteration in range(3)] == [
        PromptCursor(0, 4 * done, batch=done + 1) for done in range(3)
    ]
    assert run.events() == [
        PromptsMade(iteration, {"prompts/filtered_overlong": 0, "prompts/truncated": 0, "prompts/quarantined": 0})
        for iteration in (1, 2)
    ]


def test_a_resumed_run_goes_on_where_it_stopped(make: Callable[..., Run]) -> None:
    run = make(iterations=6, rows=10, epochs=3)
    whole = []
    for page in range(6):
        whole.append(run.page(page))
        run.publish(page + 1)
    assert {row["epoch"] for rows in whole for row in rows} == {0, 1, 2}
    run.start(version=4, cursor=run.end_of(4))
    resumed = [run.page(0), run.page(1)]
    assert [[row["uid"] for row in rows] for rows in resumed] == [[row["uid"] for row in rows] for rows in whole[4:]]
    # Chunks are counted from the start of the attempt, iterations along the run.
    assert shape(resumed[0]) == train(5, 0) and shape(resumed[1]) == train(6, 2)
    run.publish(5)
    run.publish(6)
    assert run.page(2) == [] == run.page(3)


def test_a_restarted_actor_makes_the_same_page_again(make: Callable[..., Run]) -> None:
    run = make(iterations=6, rows=10, epochs=3)
    made = []
    for page in range(3):
        made.append(run.page(page))
        run.publish(page)
    assert run.page(2, run.actor()) == made[2]
    # Without a restart a page may come again too, and out of turn.
    assert run.page(1) == made[1] and run.page(2) == made[2]


@pytest.mark.parametrize("rows", [8, 10, 11])
def test_data_that_ends_early(make: Callable[..., Run], rows: int) -> None:
    run = make(iterations=9, rows=rows, val_rows=2)
    run.config.trainer.val_before_train = False
    assert shape(run.page(0))[-4:] == train(1, 0)
    assert shape(run.page(1)) == train(2, 2)
    run.publish(1)
    # Too few prompts for a whole iteration: the last policy is validated, and that is all.
    assert shape(run.page(2)) == [("val", -1, 2)] * 2
    assert run.store.call(PolicyStore.last_version) == 2
    run.publish(2)
    assert run.page(3) == []
    assert run.page(4) == []


def test_total_training_steps_go_round_the_data(make: Callable[..., Run]) -> None:
    run = make(iterations=5, rows=6)
    run.config.trainer.total_training_steps = 5
    run.prompts = run.actor()
    epochs = []
    for page in range(5):
        epochs += [row["epoch"] for row in run.page(page)]
        run.publish(page + 1)
    assert epochs == [i // 6 for i in range(20)]
    assert run.page(5) == []


def test_validation_comes_before_the_rows_of_the_same_version(make: Callable[..., Run]) -> None:
    run = make(iterations=3, val_rows=3, test_freq=2)
    pages = []
    for page in range(4):
        pages.append(run.page(page))
        run.publish(page + 1)

    def validation(version: int) -> list[tuple[str, int, int]]:
        # Three rows in chunks of two: the last one is filled up.
        return [("val", -1, version)] * 3 + [("pad", -1, version)]

    assert [shape(rows) for rows in pages] == [
        validation(0) + train(1, 0),
        train(2, 2),
        validation(2) + train(3, 4),
        validation(3),
    ]
    assert [row["uid"] for row in pages[0][:3]] == ["val-0", "val-1", "val-2"]
    announced = [event for event in run.events() if isinstance(event, ValidationAnnounced)]
    assert announced == [ValidationAnnounced(version, 3) for version in (0, 2, 3)]
    assert run.store.call(PolicyStore.last_version) == 3


def order_of(run: Run, pages: int, published: int) -> list[tuple[str, int]]:
    """Split and iteration of what the pages hold, each kind once, while versions are published as they are needed."""
    found: list[tuple[str, int]] = []
    for page in range(pages):
        found += [(split, iteration) for split, _, iteration in shape(run.page(page)) if split != "pad"]
        run.publish(page + published)
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_validation_comes_before_the_first_rows_that_need_its_version(make: Callable[..., Run], staleness: int) -> None:
    run = make(iterations=6, val_rows=2, test_freq=2, staleness=staleness)
    found = order_of(run, run.schedule.pages, published=1)
    expected: list[tuple[str, int]] = [("val", 0)]
    for iteration in range(1, 7):
        version = iteration - 1 - staleness
        if version in (2, 4):
            expected.append(("val", version))
        expected.append(("train", iteration))
    # All that is left comes behind the last rows, in its order.
    expected += [("val", version) for version in (2, 4, 6) if version > 5 - staleness]
    assert found == expected
    assert run.store.call(PolicyStore.last_version) == 6


def test_data_that_ends_early_leaves_no_validation_out(make: Callable[..., Run]) -> None:
    run = make(iterations=9, rows=12, val_rows=2, test_freq=1, staleness=2)
    found = order_of(run, 6, published=1)
    train = [("train", 1), ("train", 2), ("train", 3)]
    assert found == [("val", 0), *train, ("val", 1), ("val", 2), ("val", 3)]
    assert run.store.call(PolicyStore.last_version) == 3


def test_a_resumed_run_says_which_validation_it_does_not_make(make: Callable[..., Run]) -> None:
    run = make(iterations=8, val_rows=2, test_freq=2, staleness=1)
    run.start(version=4, cursor=PromptCursor(0, 16))
    run.store.call(PolicyStore.publish, 4, {POLICY: Shard(0, [], [], [])}, 0.0, 0.0, True)
    assert shape(run.page(0)) == train(5, 0)
    run.publish(5)  # version 4 would hold it up
    assert run.store.ask(PolicyStore.status).version == 5
    assert shape(run.page(1)) == train(6, 2)
    run.publish(6)
    assert [split for split, *_ in shape(run.page(2))][:2] == ["train", "train"]
    assert shape(run.page(3))[:2] == [("val", -1, 6)] * 2


def test_what_a_resumed_run_starts_from_is_not_validated_again(make: Callable[..., Run]) -> None:
    run = make(iterations=4, val_rows=2, test_freq=1)
    run.start(version=2, cursor=PromptCursor(0, 8))
    assert shape(run.page(0)) == train(3, 0)
    assert shape(run.page(1)) == [("val", -1, 3)] * 2 + train(4, 2)
    run.publish(3)
    assert shape(run.page(2)) == [("val", -1, 4)] * 2
    # A run that had already reached its end has nothing left to do.
    run.start(version=4, cursor=PromptCursor(0, 16))
    assert run.page(0) == []
    assert run.store.call(PolicyStore.last_version) == 4


def test_a_resumed_run_validates_what_it_starts_from_unless_that_was_done(make: Callable[..., Run]) -> None:
    run = make(8, val_rows=3, test_freq=2)
    for validated in (True, False):
        run.start(4, PromptCursor(0, 16), validated)
        assert (run.page(0)[0]["split"] == "val") is not validated


def test_a_page_of_several_iterations(make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "MAX_PAGES", 2)
    run = make(iterations=5, val_rows=2, test_freq=2)
    assert (run.schedule.page_iterations, run.schedule.pages) == (3, 3)
    validation = [[("val", -1, version)] * 2 for version in range(6)]
    assert shape(run.page(0)) == validation[0] + train(1, 0) + train(2, 2) + validation[2] + train(3, 4)
    run.publish(1)
    run.publish(2)
    second = run.page(1)
    assert shape(second) == train(4, 6) + validation[4] + train(5, 8) + validation[5]
    # An actor may die after it has reported the end and before its rows are taken.
    assert run.page(1, run.actor()) == second
    assert run.page(2) == []
    assert run.page(2, run.actor()) == []


class Counting(Generator):
    """One prompt an iteration; it says how many were solved so far."""

    def __init__(self, data: Any, seed: int) -> None:
        super().__init__(data, seed)
        self.solved = 0.0

    def generate(self, iteration: int, count: int) -> list[dict[str, Any]]:
        prompt = [{"role": "user", "content": f"{iteration} after {self.solved}"}]
        return [{"data_source": "countdown", "prompt": prompt, "reward_model": {"ground_truth": iteration}}]

    def update(self, iteration: int, outcomes: Any) -> None:
        self.solved += sum(outcome.solved for outcome in outcomes)

    def state_dict(self) -> dict[str, Any]:
        return {"solved": self.solved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.solved = state.get("solved", 0.0)


LEARNS = {"sampler": "solve_rate", "generator": f"{__name__}:Counting"}


def train_on(run: Run, rows: list[dict[str, Any]]) -> None:
    """What the stream records of an iteration before the trainer has it."""
    rows = [row for row in rows if row["split"] == "train"]
    record(run.run_dir, rows, [[1.0, float(row["prompt_index"] % 3)] for row in rows])


@pytest.mark.parametrize("max_pages", [256, 4])
def test_what_learns_from_outcomes_goes_on_exactly(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, max_pages: int
) -> None:
    """Whether the run is resumed, its actor restarted, or neither; pages of one iteration and of three."""
    monkeypatch.setattr(stage, "MAX_PAGES", max_pages)
    run = make(iterations=12, rows=12, epochs=9, **LEARNS)
    size, whole = run.schedule.page_iterations, []
    assert size == (1 if max_pages == 256 else 3)
    for page in range(12 // size):
        rows = run.page(page)
        # A restarted actor makes it again, though meanwhile more has been recorded.
        if page % 2:
            assert run.page(page, run.actor()) == rows
        whole += [[row for row in rows if row["iteration"] == page * size + i] for i in range(1, size + 1)]
        for i in range(size):
            train_on(run, whole[page * size + i])
            run.publish(page * size + i + 1)
    passed = run.made()[-1].metrics
    assert passed["prompts/passed_over"] > 0 and passed["prompts/generated"] == 1
    known = 12 - run.schedule.feedback_lag
    states = {version: run.end_of(version) for version in (11, 12)}
    assert states[12].learnt == known
    uids = [[row["uid"] for row in rows] for rows in whole]
    # Resumed: the later pages lie elsewhere, so that an iteration is made at another time.
    checkpoint = stored(states[11])
    run.start(version=11, cursor=checkpoint)
    resumed = [row for row in run.page(0) if row["iteration"] == 12]
    assert [row["uid"] for row in resumed] == uids[11]
    assert [row["prompt"] for row in resumed] == [row["prompt"] for row in whole[11]]


def test_bad_rows_are_counted_and_listed(make: Callable[..., Run], prompt_row: Any, write: Any) -> None:
    run = make(iterations=4, rows=20, shuffle=False, max_bad_rows=2)
    run.config.data.train_files = write(
        [prompt_row(i, **({"data_source": None} if i in (1, 5) else {})) for i in range(20)]
    )
    run.prompts = run.actor()
    run.page(0)
    run.page(1)
    run.publish(1)
    run.publish(2)
    # The actor that takes over knows what the first one has set aside.
    run.page(2, run.actor())
    assert [event.metrics["prompts/quarantined"] for event in run.made()] == [1, 2, 2]
    assert ds.dataset(f"{run.run_dir}/quarantine").count_rows() == 2


def test_only_generated_prompts_end_the_run_when_none_come(make: Callable[..., Run]) -> None:
    run = make(iterations=9, generator=f"{__name__}:Three", shuffle=False)
    run.config.data.train_files = None
    run.prompts = run.actor()
    assert [row["uid"] for row in run.page(0)] == [f"g1-{i}" for i in range(4)]
    assert run.page(1) == []
    assert run.store.call(PolicyStore.last_version) == 1


class Three(Generator):
    """Enough for one iteration."""

    def generate(self, iteration: int, count: int) -> list[dict[str, Any]]:
        row = {"data_source": "s", "prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": 1}}
        return [row] * min(count, 3) if iteration == 1 else []


def test_a_stage_of_an_old_attempt_fails(make: Callable[..., Run]) -> None:
    run = make(iterations=4)
    old = run.prompts
    run.start()
    with pytest.raises(RuntimeError, match="attempt 1 of the stream has ended"):
        run.page(0, old)
