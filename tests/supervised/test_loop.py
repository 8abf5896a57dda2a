"""The train loop of the supervised jobs as the only rank: checkpoints, and a run that continues from one."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
import ray.train
import ray.train.torch
import torch
from safetensors.torch import load_file

from pipeline.config.preference import DPOConfig
from pipeline.config.supervised import PreferenceConfig, SFTConfig
from pipeline.errors import FinalError
from pipeline.storage.checkpoints import iterations
from pipeline.store.events import AttemptBegun, CheckpointSaved, IterationTrained, TrainingEnded
from pipeline.supervised.dpo import DPOLoop
from pipeline.supervised.loop import SupervisedLoop, WorkerSettings
from pipeline.supervised.preference import PreferenceLoop
from pipeline.supervised.sft import SFTLoop
from pipeline.train import checkpoint
from tests.jobs.test_reward_model import pair
from tests.supervised.test_sft import conversation
from tests.train.test_checkpoint import Storage

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS, ROWS = 4, 4
JOBS: dict[str, tuple[type[SupervisedLoop[Any]], Callable[[], Any]]] = {
    "sft": (SFTLoop, SFTConfig),
    "dpo": (DPOLoop, DPOConfig),
    "reward_model": (PreferenceLoop, PreferenceConfig),
}


class Runs:
    """Starts of runs of one job in one folder."""

    def __init__(self, job: str, model: Path, out: Path):
        self.loop, schema = JOBS[job]
        self.config = schema()
        self.config.out, self.config.model.path = str(out), str(model)
        self.config.data.train_batch_size, self.config.optim.lr = ROWS, 1e-2
        self.config.data.truncation = "right" if job == "sft" else "drop"
        self.config.data.max_length = 60
        rows = [{"messages": conversation(i)} if job == "sft" else pair(i) for i in range(STEPS * ROWS)]
        if job != "sft":
            rows[1]["chosen"][0]["content"] *= 40
        encoder = self.loop.encoder.of(self.config.model, self.config.data)
        table = encoder.whole(pa.Table.from_pylist(rows), SimpleNamespace(first=0))  # type: ignore[arg-type]
        encoded = encoder.encode(table, [f"row {i}" for i in range(len(rows))])
        self.tables = [encoded.slice(ROWS * step, ROWS) for step in range(STEPS)]
        self.posted: list[Any] = []

    def start(self, done: int = 0, stop: int | None = None) -> None:
        """Train after `done` steps; a request to stop comes in step `stop`."""
        shards = {"train": self.tables[done:], "first_pass": self.tables}

        def answer(ref: Any, timeout: float) -> bool:
            return any(isinstance(event, IterationTrained) and event.iteration == stop for event in self.posted)

        progress = SimpleNamespace(
            post=SimpleNamespace(remote=self.posted.append), flush=SimpleNamespace(remote=lambda seconds: None)
        )
        self.posted.clear()
        with (
            patch.object(
                ray.train,
                "get_dataset_shard",
                lambda name: SimpleNamespace(iter_batches=lambda **_: iter(shards[name])),
            ),
            patch.object(ray.train.torch, "get_device", return_value=torch.device("cpu")),
            patch("ray.get", answer),
        ):
            self.loop(WorkerSettings(self.loop, self.config, STEPS, [], progress, done)).run()

    def trained(self) -> list[dict[str, float]]:
        """Metrics of the steps, without times and memory."""
        found = [(event.iteration, event.metrics) for event in self.posted if isinstance(event, IterationTrained)]
        kept = ("loss", "grad_norm", "lr", "dropped", "accuracy", "rewards/accuracies", "perf/total_num_tokens")
        return [{"step": step} | {name: metrics[name] for name in kept if name in metrics} for step, metrics in found]

    @property
    def out(self) -> Path:
        return Path(self.config.out)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Storage:
    """Ray Train's side of checkpoints, for the run in `tmp_path/out`."""
    made = Storage(tmp_path / "out")
    context = SimpleNamespace(get_storage=lambda: made, get_world_rank=lambda: 0, get_world_size=lambda: 1)
    stand_in = vars(ray.train) | {"report": made.report, "get_context": lambda: context}
    monkeypatch.setattr(ray, "train", SimpleNamespace(**stand_in))
    monkeypatch.setattr(checkpoint, "FIRST_PAUSE_S", 0.05)
    return made


@pytest.mark.parametrize("job", JOBS)
def test_a_stopped_run_continues_as_if_it_had_not(job: str, tiny_model: Path, tmp_path: Path, storage: Storage) -> None:
    whole, stopped = (Runs(job, tiny_model, tmp_path / name) for name in ("whole", "out"))
    whole.start()
    assert AttemptBegun(0) in whole.posted and whole.posted[-1] == TrainingEnded(STEPS, False)
    assert (whole.out / "config.json").is_file() and iterations(str(whole.out)) == []
    assert not any(isinstance(event, CheckpointSaved) for event in whole.posted), "the model takes its place"

    stopped.start(stop=2)
    assert stopped.posted[-1] == TrainingEnded(2, True) and CheckpointSaved(2, 0, 1) in stopped.posted
    assert not (stopped.out / "config.json").exists() and iterations(str(stopped.out)) == [2]
    first = stopped.trained()
    stopped.start(done=2)
    assert AttemptBegun(2) in stopped.posted and stopped.posted[-1] == TrainingEnded(STEPS, False)
    assert [*first, *stopped.trained()] == whole.trained() and len(first) == 2
    weights = [load_file(runs.out / "model.safetensors") for runs in (whole, stopped)]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())
    if job != "sft":
        assert stopped.trained()[-1]["dropped"] == 1, "also of the steps before"


def test_checkpoints_are_saved_at_their_frequency(tiny_model: Path, tmp_path: Path, storage: Storage) -> None:
    runs = Runs("sft", tiny_model, tmp_path / "out")
    runs.config.trainer.save_freq = 1
    runs.start()
    assert iterations(str(runs.out)) == [1, 2, 3]
    assert (runs.out / "checkpoints" / "iteration_000003" / "config.yaml").is_file()
    # All steps are done: the model alone is saved.
    (runs.out / "config.json").unlink()
    runs.start(done=3)
    assert [event.iteration for event in runs.posted if isinstance(event, IterationTrained)] == [4]


def test_a_damaged_checkpoint_is_kept_aside_and_the_next_start_continues(
    tiny_model: Path, tmp_path: Path, storage: Storage
) -> None:
    runs = Runs("sft", tiny_model, tmp_path / "out")
    runs.config.trainer.save_freq = 1
    runs.start(stop=2)
    (file,) = (runs.out / "checkpoints" / "iteration_000002").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(FinalError, match="after step 2 is damaged; start the same command again, .* from step 1"):
        runs.start(done=2)
    assert (runs.out / "checkpoints" / "iteration_000002.damaged").is_dir()
    runs.start(done=1)
    assert runs.posted[-1] == TrainingEnded(STEPS, False)


def test_the_model_is_saved_elsewhere_if_a_checkpoint_cannot_be(
    tiny_model: Path, tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs("sft", tiny_model, tmp_path / "out")
    runs.config.trainer.data_timeout = 0.2
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    storage.refuses = 10**6
    with pytest.raises(FinalError, match=r"\(trainer.data_timeout\): .*The model is in .*/out-\d+ "):
        runs.start(stop=1)
    assert list(tmp_path.glob("out-*/config.json")) and not (runs.out / "config.json").exists()
