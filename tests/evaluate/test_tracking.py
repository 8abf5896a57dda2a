"""An evaluation at MLflow: a run of its own beside the training run."""

import copy
import shutil
from pathlib import Path

import pytest

from pipeline.config import Config, to_flat
from pipeline.evaluate.report import tracked
from pipeline.evaluate.settings import used
from pipeline.track.async_loggers import AsyncLoggers
from pipeline.track.loggers import TrackedRun
from pipeline.track.mlflow_logger import MlflowLogger
from tests.evaluate.test_summary import TABLE, summed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def config(stream_config: Config) -> Config:
    return used(copy.deepcopy(stream_config))


def test_a_run_of_its_own_in_the_experiment_of_the_training_run(
    config: Config, tmp_path: Path, mlflow_database: Path
) -> None:
    from mlflow.tracking import MlflowClient

    home, out = tmp_path / "run", tmp_path / "run" / "evaluations" / "test"
    out.mkdir(parents=True)
    shutil.copyfile(mlflow_database, tmp_path / "mlflow.db")
    training = MlflowLogger(TrackedRun(home, {}, "project", "trained"))
    training.start()
    training.finish("finished")
    table = out / "table.csv"
    table.write_text("source,mean\n")
    summary = summed((1, 3), TABLE)
    for status in ("interrupted", "finished"):
        loggers = AsyncLoggers(["mlflow"], TrackedRun(out, to_flat(config), "project", "trained on test", True, home))
        loggers.start()
        loggers.log(12, 0.0, tracked(summary))
        loggers.file(table)
        assert loggers.finish(status, 30.0) == []
    client = MlflowClient(f"sqlite:///{home.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("project")
    page = f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs?compareRunsMode=CHART"
    assert loggers.where() == {
        "mlflow": f"mlflow ui --backend-store-uri sqlite:///{home.parent / 'mlflow.db'}",
        "mlflow curves": page,
    }
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"trained", "trained on test"}
    found = runs["trained on test"]
    assert found.info.status == "FINISHED" and found.info.run_id == (out / "mlflow_run_id").read_text().strip()
    assert (home / "mlflow_run_id").read_text().strip() == runs["trained"].info.run_id
    assert found.data.metrics["eval/s/pass_at_3"] == 0.5
    assert found.data.metrics["eval-all/maj_at_3"] == pytest.approx(1 / 3)
    assert {point.step for point in client.get_metric_history(found.info.run_id, "eval/s/mean")} == {12}
    assert found.data.params["rollout.val_kwargs.n"] == "1"
    assert "table.csv" in [item.path for item in client.list_artifacts(found.info.run_id)]


def test_only_what_the_settings_name(tmp_path: Path) -> None:
    loggers = AsyncLoggers(["console"], TrackedRun(tmp_path, {}, "project", "quiet", True))
    loggers.start()
    loggers.log(0, 0.0, {"eval-all/mean": 1.0})
    assert loggers.finish("finished", 30.0) == [] and loggers.where() == {}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="did you mean 'mlflow'"):
        AsyncLoggers(["mlfow"], TrackedRun(tmp_path, {}, "project", "quiet"))
