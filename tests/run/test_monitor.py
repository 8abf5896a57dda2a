"""The driver's watch over a run whose policy store dies, hangs or never comes back."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from pipeline.config.trainer import DeadlineConfig
from pipeline.run import monitor
from pipeline.store.errors import StoreTimeout
from pipeline.store.events import Event, IterationTrained, Noted, Trouble
from pipeline.store.policy_store import PolicyStore
from pipeline.store.status import StoreStatus

AWAY = ActorUnavailableError("The actor is restarting.", None)


class Store:
    """A store that follows a script: each step is its answer to one `read`."""

    def __init__(self, *steps: Any):
        self.steps, self.asked = list(steps), []
        self.stopping = False
        self.lives = 0

    def ask(self, method: Any, *args: Any) -> Any:
        if method is PolicyStore.read_events:
            self.asked.append(args[0])
            step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
            if isinstance(step, Callable):  # type: ignore[arg-type]
                step = step()
            if isinstance(step, BaseException):
                raise step
            return step
        if method is PolicyStore.stop:
            self.stopping = True
            return None
        return StoreStatus(1, 0, 0, self.stopping, {}, 0.0, "x")


class Seen:
    """A tracker that keeps notices, and what the monitor handled."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.notices: list[str] = []
        self.training = self.begun = True
        self.on_event: Callable[[], None] = lambda: None

    def handle(self, event: Event) -> None:
        self.on_event()
        self.events.append(event.iteration if isinstance(event, IterationTrained) else "failed")

    def notice(self, text: str) -> None:
        self.notices.append(text)


class Training(threading.Thread):
    """Lives until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    def is_alive(self) -> bool:
        return not self.ended


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Seen, Store]]:
    monkeypatch.setattr(monitor, "PAUSE_S", 0.0)
    monkeypatch.setattr(monitor.ray, "available_resources", lambda: {"CPU": 1.0, "memory": 5.0})

    def start(
        *steps: Any, seen: Seen | None = None, lost: Any = lambda: None, news: Any = tuple, **deadlines: float
    ) -> tuple[Any, Seen, Store]:
        seen, training, clock = seen or Seen(), Training(), itertools.count(1.0)

        def end() -> tuple[int, list[Any]]:
            training.ended = True
            return 10_000, []

        store = Store(*(end if step == "end" else step for step in steps))
        monkeypatch.setattr(monitor, "StoreClient", lambda handle: store)
        watched = monitor.RunMonitor(seen, None, None, 1, 0, 0, None)  # type: ignore[arg-type]
        watched.training, watched.begun = seen.training, seen.begun
        monkeypatch.setattr(watched, "handle", seen.handle)
        outcome = watched.watch(store, training, DeadlineConfig(**deadlines), lambda: next(clock), lost, news)
        return outcome, seen, store

    return start


def messages(first: int, last: int) -> tuple[int, list[Event]]:
    return last, [IterationTrained(number, {}) for number in range(first, last + 1)]


def test_all_messages_are_handled_once_and_confirmed(run: Any) -> None:
    outcome, seen, store = run(messages(1, 2), messages(3, 5), "end")
    assert outcome == (False, None)
    assert seen.events == [1, 2, 3, 4, 5] and store.asked[:3] == [0, 2, 5]


def test_a_restarted_store_is_read_on_with_its_own_numbers(run: Any) -> None:
    outcome, seen, store = run(messages(101, 103), AWAY, StoreTimeout("late"), AWAY, messages(2001, 2002), "end")
    assert outcome == (False, None)
    assert seen.events == [101, 102, 103, "failed", 2001, 2002]
    assert store.asked[:6] == [0, 103, 103, 103, 103, 2002]
    assert seen.notices == ["the policy store does not answer; Ray starts it again"]


def test_a_store_that_does_not_come_back_ends_the_run(run: Any) -> None:
    (interrupted, problem), _, _ = run(messages(1, 1), AWAY, store=20.0)
    assert not interrupted
    assert problem.startswith("the policy store is lost: it has not answered for 2")
    assert "trainer.deadlines.store" in problem and "same command" in problem


def test_training_that_ended_needs_no_store(run: Any) -> None:
    outcome, _, _ = run(messages(1, 1), "end", AWAY)
    assert outcome == (False, None)


def test_a_stop_is_not_forgotten_by_a_new_store(run: Any) -> None:
    def pressed() -> None:
        raise KeyboardInterrupt

    store: list[Store] = []

    def forgets() -> BaseException:
        store[0].stopping = False
        return AWAY

    def remembered() -> tuple[int, list[Any]]:
        assert store[0].stopping
        return messages(1, 1)

    steps: list[Any] = [pressed, messages(1, 1), remembered, forgets, messages(1, 1), remembered, "end"]
    original = Store.__init__

    def keep(self: Store, *steps: Any) -> None:
        original(self, *steps)
        store.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "__init__", keep)
        outcome, seen, _ = run(*steps)
    assert outcome == (True, None)
    assert seen.notices[0].startswith("stopping after this iteration")


def test_a_stop_before_rows_are_generated_waits_for_nothing(run: Any) -> None:
    def pressed() -> None:
        raise KeyboardInterrupt

    seen = Seen()
    seen.begun = False
    outcome, seen, store = run((0, []), pressed, messages(1, 1), seen=seen)
    assert outcome == (True, None) and seen.events == [] and not store.stopping
    assert seen.notices == ["stopped before the first iteration of this start, so nothing is lost"]


def test_a_message_that_ctrl_c_cuts_off_comes_again(run: Any) -> None:
    seen, calls = Seen(), [0]

    def on_event() -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt

    seen.on_event = on_event
    (interrupted, _), seen, store = run(messages(1, 3), messages(2, 3), "end", seen=seen)
    assert interrupted and seen.events == [1, 2, 3] and store.asked[:3] == [0, 1, 3]


def test_train_workers_that_never_begin_end_the_run(run: Any) -> None:
    seen = Seen()
    seen.training = False
    (_, problem), _, _ = run((0, []), seen=seen, train_start=50.0)
    assert problem == (
        "the train workers have not begun for 50 s (trainer.deadlines.train_start): they wait for nodes, or load "
        "models and a checkpoint; free in the cluster are 1 CPU"
    )


def test_a_run_whose_folder_belongs_to_another_process_ends(run: Any) -> None:
    reasons = iter([None, None, "taken"])
    outcome, seen, _ = run(messages(1, 1), messages(2, 2), messages(3, 3), "end", lost=lambda: next(reasons))
    assert outcome == (False, "taken") and seen.events == [1, 2]


def test_records_that_cannot_be_written_stop_the_run_as_ctrl_c_does(run: Any) -> None:
    """Training saves its model then; the reason is said at once, and is that of the end."""
    seen = Seen()
    failing = iter([OSError(28, "metrics.jsonl (No space left on device)"), OSError(28, "again"), None])

    def full() -> None:
        if error := next(failing):
            raise error

    seen.on_event = full
    outcome, _, store = run(messages(1, 1), messages(2, 2), messages(3, 3), "end", seen=seen)
    reason = "the run's records cannot be written: [Errno 28] metrics.jsonl (No space left on device)"
    assert outcome == (False, reason) and seen.events == [3]
    assert seen.notices == [f"{reason}; stopping after this iteration"]
    assert store.stopping and store.asked[:4] == [0, 1, 2, 3]


def test_a_ray_that_is_gone_ends_the_watch_at_once(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = iter([None, None, "gcs_server"])
    monkeypatch.setattr(monitor.apart, "dead", lambda: next(ended))
    (interrupted, problem), seen, _ = run(messages(1, 1), (1, []), (1, []))
    assert not interrupted and seen.events == [1]
    assert problem.startswith("Ray is gone: its gcs_server has ended, by a signal to all processes of the job")


def test_what_several_processes_say_of_a_model_is_shown_once() -> None:
    seen = Seen()
    watched = monitor.RunMonitor(seen, None, None, 1, 0, 0, None)  # type: ignore[arg-type]
    for text in ("attention", "attention", "rope", "attention"):
        watched.handle(Noted(text))
    watched.handle(Trouble("attention"))
    assert seen.notices == ["attention", "rope", "attention"]


def test_news_of_killed_processes_are_shown(run: Any) -> None:
    told = iter([["the engine ended"], []])
    outcome, seen, _ = run(messages(1, 1), "end", news=lambda: next(told, []))
    assert outcome == (False, None) and seen.notices == ["the engine ended"]
