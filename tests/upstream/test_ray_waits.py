"""Ray Data's wait is shortened where this version of Ray allows it, and a warning is printed where it does not."""

from types import SimpleNamespace

import pytest
import ray
from ray.data import DataContext
from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.metadata_fetcher import _PREFETCH_ON_THREAD

from pipeline.run import cluster
from pipeline.upstream import ray_waits


def test_the_installed_ray_has_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_executor_state, ray_waits.CONSTANT, 0.1)
    context = DataContext()
    for _ in range(2):
        ray_waits.shorten_waits(context)
    assert context.custom_execution_callback_classes.count(ray_waits.ShortWaits) == 1
    ray_waits.ShortWaits().before_execution_starts(None)
    assert ray_waits.SHORTEST_S == streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S
    assert isinstance(_PREFETCH_ON_THREAD, bool) and cluster.ENV["RAY_DATA_METADATA_PREFETCH_ON_THREAD"] == "0"


def test_another_ray_runs_at_stock_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ray_waits, "streaming_executor_state", None)
    context = DataContext()
    ray_waits.shorten_waits(context)
    assert ray_waits.ShortWaits not in context.custom_execution_callback_classes
    assert "each iteration takes about 0.5 s longer" in capsys.readouterr().err


def test_the_timeout_grows_while_no_block_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_executor_state, ray_waits.CONSTANT, 0.1)
    stages = [SimpleNamespace(metrics=SimpleNamespace(num_outputs_taken=0)) for _ in range(2)]
    waits, running, seen = ray_waits.ShortWaits(), SimpleNamespace(_topology=stages), []
    waits.before_execution_starts(running)
    for moved in (0, 0, 1, 0, *[0] * 20, 1):
        stages[1].metrics.num_outputs_taken += moved
        waits.on_execution_step(running)
        seen.append(streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S)
    assert seen[:4] == pytest.approx([0.00625, 0.0078125, 0.005, 0.00625])
    assert seen[-2:] == [ray_waits.LONGEST_S, ray_waits.SHORTEST_S]


@pytest.mark.ray
def test_the_installed_ray_counts_blocks_that_leave_a_stage(ray_session: None) -> None:
    seen: list[int] = []

    class Watch(ray_waits.ShortWaits):
        def after_execution_succeeds(self, executor: object) -> None:
            seen.append(self._moved)

    rows = ray.data.range(4, override_num_blocks=4).map(lambda row: row)
    rows.context.custom_execution_callback_classes = [Watch]
    rows.materialize()
    assert seen and seen[0] >= 4
