"""Ray Data's wait is shortened where this version of Ray allows it, and a warning is printed where it does not."""

import pytest
from ray.data import DataContext
from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.metadata_fetcher import _PREFETCH_ON_THREAD

from pipeline import executor
from pipeline.run import cluster


def test_the_installed_ray_has_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_executor_state, executor.CONSTANT, 0.1)
    context = DataContext()
    for _ in range(2):
        executor.shorten_waits(context)
    assert context.custom_execution_callback_classes.count(executor.ShortWaits) == 1
    executor.ShortWaits().before_execution_starts(None)
    assert executor.TIMEOUT_S == streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S
    assert isinstance(_PREFETCH_ON_THREAD, bool) and cluster.ENV["RAY_DATA_METADATA_PREFETCH_ON_THREAD"] == "0"


def test_another_ray_runs_at_stock_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(executor, "streaming_executor_state", None)
    context = DataContext()
    executor.shorten_waits(context)
    assert executor.ShortWaits not in context.custom_execution_callback_classes
    assert "each iteration takes about 0.5 s longer" in capsys.readouterr().err
