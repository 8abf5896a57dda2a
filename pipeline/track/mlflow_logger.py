"""MLflow: one SQLite store for all runs of a folder, or the server that `MLFLOW_TRACKING_URI` names.

1. Without a server: the store is `runs/mlflow.db`, next to the folders of the runs, and artifacts are in
   `runs/mlartifacts`. With `MLFLOW_TRACKING_URI` set, MLflow's usual variables (`MLFLOW_TRACKING_USERNAME`,
   `MLFLOW_TRACKING_TOKEN`, `MLFLOW_EXPERIMENT_NAME`, ...) hold.
2. Names: MLflow takes letters and digits of any script, `_ - . /` and spaces. `@` becomes `_at_` (`mean@8` is
   `mean_at_8`), any other character its code, such as `:23:` for `#`. Different names stay different.
3. `runs/NAME/mlflow_run_id` has the run's id; a resumed run continues the same MLflow run. Its parameters cannot be
   changed, so a setting that differs from the first start becomes a tag `resumed.KEY`. Metrics of repeated iterations
   are points of the same step with a later time.
4. Only `MlflowClient` with explicit ids: the fluent interface keeps a run per thread.
5. Unless set otherwise, `MLFLOW_HTTP_REQUEST_MAX_RETRIES` is 0 and `MLFLOW_HTTP_REQUEST_TIMEOUT` 30 s (the
   `RetryQueue` retries), and MLflow's progress bars and usage reports are off.
6. Traces are read from the recorded rows, in this thread, and sent with ids that follow from run and row. An iteration
   that is trained again replaces its traces if it samples the same rows.
"""

import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.track.conversation import COLUMNS
from pipeline.track.datasets import dataset_inputs
from pipeline.track.history import write_atomically
from pipeline.track.loggers import TrackedRun, shown
from pipeline.track.provenance import flattened, git_commit, user, versions
from pipeline.track.retry_queue import Rejected
from pipeline.track.samples import Rows, watched
from pipeline.track.traces import Trace

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
PARAM_LENGTH = 6000
TAG_LENGTH = 5000
NAME_LENGTH = 250
CELL_LENGTH = 4000
LOCAL_PAGE = "http://127.0.0.1:5000"
"""Address of a local `mlflow ui`."""
OVERVIEW = {"algorithm": "algorithm.adv_estimator", "loss": "actor.policy_loss.loss_mode", "model": "model.path"}
"""Tags for the columns of MLflow's table of runs, with the settings that they show."""
ITERATIONS_PER_TABLE = 500
QUIET = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

_ESCAPED = re.compile(
    r"[^\w\-. /@]"
    # The form of an escape.
    r"|_(?=at[_@])"
    # Forms that MLflow would read as another path: `/a`, `a//b`, `a/`, `./a`, `a/../b`, `..a`.
    r"|\A/|/(?=/|\Z)|(?<![^/])\.(?=\.?(?:/|\Z))|\A\.(?=\.)"
    # Invisible blanks, which some databases leave out.
    r"|(?<![^/]) | (?=/|\Z)"
)
"""Pattern of the characters in a name that are replaced by their codes."""

log = logging.getLogger(__name__)


def mlflow_name(name: str) -> str:
    """Return a metric's or parameter's name for MLflow, with the characters that MLflow refuses replaced by codes.

    Different names stay different.
    """
    name = _ESCAPED.sub(lambda match: f":{ord(match[0]):x}:", name).replace("@", "_at_") or "::"
    if len(name) <= NAME_LENGTH:
        return name
    # The end of a name identifies the quantity.
    begin, end = name[: NAME_LENGTH // 2], name[-NAME_LENGTH // 4 :]
    return f"{begin}:{hashlib.sha256(name.encode()).hexdigest()[:16]}:{end}"


def local_store(run_dir: Path) -> Path:
    """Return the SQLite file for the run in `run_dir` without a server: one file for all runs in the same parent
    folder.

    A run that began with a store in its own folder keeps that store.
    """
    earlier = run_dir / "mlflow.db"
    return earlier if earlier.is_file() else run_dir.parent / "mlflow.db"


class MlflowLogger:
    """Logs to one MLflow run. The first call, `start`, takes seconds."""

    def __init__(self, run: TrackedRun) -> None:
        self._run, self._resume = run, run.resume
        self._id_file = run.folder / "mlflow_run_id"
        self._server = os.environ.get("MLFLOW_TRACKING_URI")
        self._store = local_store((run.store_of or run.folder).absolute())
        self._run_id = self._experiment_id = ""

    def start(self) -> None:
        client = self._client
        run = self._earlier_run()
        if run is None:
            run = client.create_run(self._experiment(), tags=self._who(), run_name=self._run.name)
            write_atomically(self._id_file, f"{run.info.run_id}\n".encode())
            # A retry of the calls below goes on in this run and makes no second one.
            self._resume = True
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        self._run_id, self._experiment_id = run.info.run_id, run.info.experiment_id
        self._log_settings(run)
        if inputs := dataset_inputs(self._run.settings):
            client.log_inputs(self._run_id, inputs)

    def log(self, iteration: int, time: float, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        moment = int(time * 1000)
        points = [Metric(mlflow_name(name), float(value), moment, iteration) for name, value in metrics.items()]
        try:
            self._client.log_batch(self._run_id, metrics=points)
        except MlflowException as error:
            if error.error_code in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"):
                raise Rejected(str(error)) from error
            raise

    def samples(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        names = list(dict.fromkeys(name for row in rows for name in row if name != "iteration"))
        table = {"iteration": [iteration] * len(rows)}
        table |= {name: [_cell(row.get(name)) for row in rows] for name in names}
        # Each call loads and rewrites its table, and MLflow lists all tables in one tag of bounded length. A single
        # table would cost more with each call, and one per iteration would overflow the tag.
        first = iteration // ITERATIONS_PER_TABLE * ITERATIONS_PER_TABLE
        self._client.log_table(self._run_id, table, f"samples/from_iteration_{first:06d}.json")

    def traces(self, split: str, iteration: int, time: float, count: int) -> None:
        from mlflow.tracing.client import TracingClient

        try:
            rows = Rows(str(self._run.folder), iteration, split)
            chosen = [rows.read(number, COLUMNS) for number in watched(rows, split, count)]
            run = self._run_id, self._run.name, self._experiment_id
            traces = [Trace(row, iteration, *run, ended=time) for row in chosen]
            infos, spans = [trace.info() for trace in traces], [span for trace in traces for span in trace.spans()]
        except FileNotFoundError:
            # Restarted train workers have discarded the rows; they train the iteration again.
            return
        except (ValueError, OSError) as error:
            raise Rejected(str(error)) from error
        client = TracingClient(self._client.tracking_uri)
        # Spans of an earlier try of the iteration that this one lacks would stay otherwise.
        client.delete_traces(self._experiment_id, trace_ids=[info.trace_id for info in infos])
        for info in infos:
            client.start_trace(info)
        client.log_spans(self._experiment_id, spans)

    def image(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run_id, STATUS[status])

    def where(self) -> str:
        if self._server:
            return self._server
        return f"mlflow ui --backend-store-uri sqlite:///{shown(self._store)}"

    def charts(self) -> str | None:
        """Return the address of the page with the curves of the experiment's runs; None before `start`.

        MLflow shows the traces of an experiment first.
        """
        if not self._experiment_id:
            return None
        place = self._server if (self._server or "").startswith("http") else LOCAL_PAGE
        return f"{place}/#/experiments/{self._experiment_id}/runs?compareRunsMode=CHART"

    def _who(self) -> dict[str, str]:
        """Return the tags that MLflow shows as the author, the source and the description of a run.

        The description has the whole command: of a source, MLflow shows only the part after the last slash.
        """
        found = {"mlflow.user": name} if (name := user()) else {}
        if command := self._run.command[: TAG_LENGTH - 10]:
            source = " ".join(takewhile(lambda word: "=" not in word, command.split()))
            found |= {"mlflow.source.name": source, "mlflow.source.type": "LOCAL"}
            found["mlflow.note.content"] = f"```\n{command}\n```"
        return found

    @cached_property
    def _client(self) -> "MlflowClient":
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        for noisy in ("mlflow.store.db.utils", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        # The SQLite tables are made here, which takes seconds the first time.
        return MlflowClient(self._server or f"sqlite:///{self._store}")

    def _earlier_run(self) -> "Run | None":
        """Return the MLflow run to continue; None if there is none, or the tracker has lost it."""
        from mlflow.exceptions import MlflowException

        if not (self._resume and self._id_file.exists()):
            return None
        run_id = self._id_file.read_text().strip()
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run = None
        if run is None or run.info.lifecycle_stage == "deleted":
            log.warning("mlflow has no run %s, which %s names; a new one is created", run_id, self._id_file)
            return None
        return run

    def _experiment(self) -> str:
        if os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._run.project
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        artifacts = None if self._server else (self._store.parent / "mlartifacts").as_uri()
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def _log_settings(self, run: "Run") -> None:
        from mlflow.entities import Param, RunTag

        settings = {key: value[:PARAM_LENGTH] for key, value in flattened(self._run.settings).items()}
        names = {key: mlflow_name(key) for key in settings}
        have = run.data.params
        tags = {f"version.{library}": version for library, version in versions().items()}
        if (commit := git_commit()) is not None:
            tags |= {"mlflow.source.git.commit": commit[0], "git.changed": str(commit[1]).lower()}
        tags |= {tag: Path(settings[key]).name[:TAG_LENGTH] for tag, key in OVERVIEW.items() if key in settings}
        for key, value in settings.items():
            if have.get(names[key], value) != value:
                tags[mlflow_name(f"resumed.{key}")] = value[:TAG_LENGTH]
        self._client.log_batch(
            self._run_id,
            params=[Param(names[key], value) for key, value in settings.items() if names[key] not in have],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
        self._client.log_dict(self._run_id, self._run.settings, "config.yaml")


def _cell(value: Any) -> Any:
    """Return a value for a table's cell. Long texts are cut; `trajectories/` has all of them."""
    if isinstance(value, str) and len(value) > CELL_LENGTH:
        return f"{value[:CELL_LENGTH]} … ({len(value)} characters)"
    return value
