"""Sharded checkpoints of the training state, through `torch.distributed.checkpoint` and Ray Train.

    all ranks     write their shards to a local folder     collective; training waits
    each rank     copies its files to the run's storage    during the next iteration, with retries; the first failure is
                                                           reported; after the last retry the model is saved, and the
                                                           run ends
    each rank     writes `complete_RANK` last              a list of the rank's files; with the lists of all ranks the
                                                           checkpoint is complete

A checkpoint holds tensors, plain numbers and settings; loading it cannot run foreign code. For a model with adapters it
holds only the adapters.
"""

import contextlib
import json
import math
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray.train
import torch
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint, CheckpointUploadMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

from pipeline.advantage.kl_controller import KLController
from pipeline.storage import fingerprints
from pipeline.storage.checkpoints import FOLDER, PROGRESS, complete_name, delete, folder_name
from pipeline.storage.filesystem import STANDING, filesystem_of
from pipeline.storage.manifest import listed
from pipeline.storage.room import STAGING_REMEDY, STORAGE_REMEDY, disk, lacking
from pipeline.store.status import TrainerState
from pipeline.train import ranks
from pipeline.train.optim import bytes_kept
from pipeline.train.own_state import own_state, strategy_of

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""First and longest pause between attempts to reach the storage, in seconds. The pause doubles each time."""
STANDING_S = 60.0
"""Seconds for which a `STANDING` error, which rarely passes by itself, is retried while training waits."""
DEADLINE = "trainer.deadlines.checkpoint"
"""Key of the time limit for copying a checkpoint."""


class Trained(Protocol):
    """A sharded model whose training a checkpoint continues: of an RL run, actor or critic."""

    name: str
    module: Any
    optimizer: Any
    scheduler: Any


class NotStored(RuntimeError):
    """Error if a checkpoint could not be stored. Every rank raises it, so the ranks can save the model elsewhere."""


class Saver:
    """Writer of checkpoints, one at a time, which are copied to the run's storage while training continues.

    Args:
        run_dir: the run's folder or URL.
        root: folder or URL that holds the folder of checkpoints.
        deadline: seconds that copying a checkpoint may take (`trainer.deadlines.checkpoint`).
        save_settings: writes the run's settings to a file.
        copied: called in the copying thread with the version, after this rank's part was copied.
        say: called, in any thread, with a sentence about a retry.
        deadline_key: name of the setting `deadline`, for errors.
        remedies: advice for a lack of room in the local folder and in the storage.

    Raises OSError as `staging` does.
    """

    def __init__(
        self,
        run_dir: str,
        root: str,
        deadline: float,
        save_settings: Callable[[Path], None],
        copied: Callable[[int], None],
        say: Callable[[str], None],
        deadline_key: str = DEADLINE,
        remedies: tuple[str, str] = (STAGING_REMEDY, STORAGE_REMEDY),
    ):
        self._run_dir = run_dir
        self._root = root
        self._deadline, self._key, self._remedies = deadline, deadline_key, remedies
        self._save_settings = save_settings
        self._copied = copied
        self._say = say
        self._rank = ranks.rank()
        self.staging = staging()
        self._idle = threading.Event()
        self._idle.set()
        self._version = -1
        self._failure: str | None = None
        """Reason why this rank's part could not be written to the local folder or copied."""
        self._awaited: float | None = None
        """Monotonic time since which training waits for the copy; None if it does not wait."""

    def check_room(self, learners: Sequence[Trained]) -> None:
        """Report each disk, local or of the storage, without room for a checkpoint of `learners`; a collective."""
        needed = sum(map(_checkpoint_bytes, learners))
        here = (socket.gethostname(), disk(self.staging))
        parts = ranks.all_gather((*here, needed))
        beside = [rank for rank, (*place, _) in enumerate(parts) if tuple(place) == here]
        checks = []
        if beside[0] == self._rank:
            checks.append((self.staging, sum(parts[rank][-1] for rank in beside), self._remedies[0]))
        if self._rank == 0:
            checks.append((f"{self._root}/{FOLDER}", sum(part[-1] for part in parts), self._remedies[1]))
        for place, count, remedy in checks:
            if problem := lacking(place, count, remedy):
                self._say(f"checkpoint: {problem}")

    def save(self, learners: Sequence[Trained], kl: KLController, version: int, state: TrainerState | None) -> None:
        """Write a checkpoint of an RL run, as `write` does; a collective.

        Args:
            learners: actor and critic.
            kl: KL controller; its coefficient is saved.
            version: policy version of the learners.
            state: version, prompt cursor and state of the validation; needed on rank 0, None on others.
        """
        own = {"cursor": state.cursor.to_json(), "validated": state.validated, "kl_coef": kl.coef} if state else {}
        self.write(learners, version, own)

    def write(self, learners: Sequence[Trained], version: int, own: dict[str, Any]) -> None:
        """Write a checkpoint and begin to copy it; a collective. Waits first until the previous one has been copied.

        Args:
            learners: their models, optimisers and schedules are saved.
            version: number of iterations that the learners have trained.
            own: further entries of `progress.json`; rank 0's are written.

        Raises:
            TimeoutError: copying took longer than `trainer.deadlines.checkpoint`.
            NotStored: the local folder or the storage cannot be written.
        """
        self.wait()
        progress: dict[str, Any] | None = None
        if self._rank == 0:
            mlflow_run = self._record("mlflow_run_id")
            progress = {
                "version": version,
                **own,
                "scheduler_steps": {learner.name: learner.scheduler.last_epoch for learner in learners},
                "learning_rates": {learner.name: float(learner.scheduler.get_last_lr()[0]) for learner in learners},
                "strategy": strategy_of(learners),
                "world_size": ranks.count(),
                "mlflow_run_id": mlflow_run.strip() if mlflow_run else None,
            }
            storage = f"{self._root}/{FOLDER}"
            with self._noted(storage):
                # Files of an earlier attempt would count as parts of this checkpoint.
                place = f"{storage}/{folder_name(version)}"
                retry(lambda: delete(place), self._deadline, storage, "written", self._say, key=self._key)
        folder: Path | None = None
        with self._noted(self.staging):
            folder = Path(tempfile.mkdtemp(prefix="slipstream-checkpoint-", dir=self.staging))
        # No rank copies before rank 0 has cleared the folder, and none saves without the others.
        self._agree()
        assert folder is not None
        try:
            with self._noted(str(folder)):
                dcp.save(training_state(learners), checkpoint_id=folder)
                if progress is not None:
                    (folder / PROGRESS).write_text(json.dumps(progress))
                    self._save_settings(folder / "config.yaml")
                    if (kept := self._record(fingerprints.FILE)) is not None:
                        (folder / fingerprints.FILE).write_text(kept)
                torch.save(_rng(), folder / f"rng_{self._rank}.pt")
            self._agree()
        except NotStored:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._version = version
        self._awaited = None
        self._idle.clear()
        ray.train.report(
            {"version": version},
            checkpoint=Checkpoint.from_directory(str(folder)),
            checkpoint_dir_name=folder_name(version),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=self._copy,
        )

    def wait(self) -> None:
        """Wait until all ranks have copied the last checkpoint; a collective.

        Raises:
            TimeoutError: copying took longer than `trainer.deadlines.checkpoint`.
            NotStored: a rank could not copy its part.
        """
        self._awaited = time.monotonic()
        if not self._idle.wait(self._deadline):
            raise TimeoutError(
                f"checkpoint: rank {self._rank} did not copy version {self._version} to {self._root}/{FOLDER} "
                f"within {self._deadline:.0f} s ({self._key})"
            )
        self._agree()

    @contextlib.contextmanager
    def _noted(self, place: str) -> Iterator[None]:
        """Catch an error of writing to `place` within the block, and keep it (the first one only) for `_agree`."""
        try:
            yield
        # torch's writers raise errors of their own for a full disk.
        except (OSError, RuntimeError, CheckpointException) as error:
            self._failure = self._failure or _reason(error, place)

    def _agree(self) -> None:
        """Raise NotStored on all ranks if one of them has kept an error (`_noted`); a collective."""
        failures = [failure for failure in ranks.all_gather(self._failure) if failure]
        if failures:
            raise NotStored(failures[0])

    def _copy(self, checkpoint: Checkpoint, name: str) -> Checkpoint:
        storage = ray.train.get_context().get_storage()
        files = listed(Path(checkpoint.path)).encode()

        def copy() -> Checkpoint:
            try:
                persisted = storage.persist_current_checkpoint(checkpoint, name)
                with persisted.filesystem.open_output_stream(f"{persisted.path}/{complete_name(self._rank)}") as mark:
                    mark.write(files)
            except OSError:
                self._withdraw(checkpoint, name)
                raise
            return persisted

        try:
            place = f"{self._root}/{FOLDER}"
            persisted = retry(copy, self._deadline, place, "written", self._say, lambda: self._awaited, self._key)
        except OSError as error:
            self._failure = error.strerror or str(error)
            self._idle.set()
            # An error that leaves this thread would end the train workers before they have saved the model.
            threading.Event().wait()
            raise
        self._copied(self._version)
        self._idle.set()
        return persisted

    def _withdraw(self, checkpoint: Checkpoint, name: str) -> None:
        """Delete this rank's files of a failed copy in the storage, so that the run's records have room."""
        filesystem, path = filesystem_of(f"{self._root}/{FOLDER}/{name}")
        for file in (complete_name(self._rank), *(file.name for file in Path(checkpoint.path).iterdir())):
            with contextlib.suppress(OSError):
                filesystem.delete_file(f"{path}/{file}")

    def _record(self, name: str) -> str | None:
        """Return the content of the file `name` in the run's folder; None if it cannot be read."""
        filesystem, path = filesystem_of(f"{self._run_dir}/{name}")
        try:
            with filesystem.open_input_stream(path) as stream:
                return stream.read().decode()
        except OSError:
            return None


def staging() -> str:
    """Return the local folder to which checkpoints are written before they are copied to the storage.

    This is `TMPDIR`, or else the system's folder for temporary files. Raises OSError if `TMPDIR` is not a writable
    folder: Python would silently take another folder, which may be too small.
    """
    folder = os.environ.get("TMPDIR")
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise OSError(
            f"checkpoint: TMPDIR={folder} is not a folder that can be written on this node; make it there, or name "
            "another one (trainer.env_vars.TMPDIR)"
        )
    return folder or tempfile.gettempdir()


def retry(
    action: Callable[[], Any],
    patience: float,
    place: str,
    done: str,
    say: Callable[[str], None],
    awaited: Callable[[], float | None] = lambda: -math.inf,
    key: str = DEADLINE,
) -> Any:
    """Return the result of `action`, which is retried while it raises OSError.

    Args:
        action: the function to run.
        patience: seconds for which it is retried; at most `STANDING_S` for `STANDING` errors.
        place: file or folder that the action reads or writes, for sentences.
        done: "read" or "written", for sentences.
        say: called with a sentence at the first failure.
        awaited: returns the monotonic time since which the run waits for the result, from which `patience` counts; or
            None while the run does not wait, and retries have no end.
        key: name of the setting `patience`, for the error.

    Raises OSError if the action still fails after that time.
    """
    began, pause, failed = time.monotonic(), FIRST_PAUSE_S, False
    while True:
        try:
            return action()
        except OSError as error:
            reason = error.strerror or str(error)
            limit = min(patience, STANDING_S) if error.errno in STANDING else patience
            if not failed:
                say(
                    f"checkpoint: {place} cannot be {done}: {reason}; free space there or allow access: it is tried "
                    f"again, for {limit:.0f} s after the run has to wait for it"
                )
            failed, since = True, awaited()
            if since is not None and time.monotonic() + pause > max(since, began) + limit:
                by = f" ({key})" if limit == patience else ""
                raise OSError(
                    error.errno or 5,
                    f"checkpoint: {place} could not be {done} for {limit:.0f} s{by}: {reason}; free space there "
                    "or allow access, and start the same command again",
                ) from error
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _reason(error: BaseException, place: str) -> str:
    """Return the reason why a checkpoint could not be written to `place`, unwrapped from torch's error."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if isinstance(error, RuntimeError):
        # torch's writer does not report that the disk is full.
        text += f" ({shutil.disk_usage(place).free >> 20} MiB free there)"
    return text if text.startswith("checkpoint: ") else f"checkpoint: {place} could not be written: {text}"


def _rng() -> dict[str, torch.Tensor]:
    """Return the states of this rank's random generators."""
    return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _checkpoint_bytes(learner: Trained) -> int:
    """Return the number of bytes of this rank's part of the learner in a checkpoint."""
    if own := own_state(learner):
        return own.checkpoint_bytes()
    trained = (parameter for parameter in learner.module.parameters() if parameter.requires_grad)
    return sum(bytes_kept(parameter, learner.optimizer) for parameter in trained)


def training_state(learners: Sequence[Trained], to_load: bool = False) -> dict[str, dict[str, Any]]:
    """Return learner's name to its model and optimiser state, as tensors that `dcp` saves from or loads into.

    Weights that are not trained are left out, and settings of the optimiser, which come from the configuration.
    """
    state = {}
    for learner in learners:
        if own := own_state(learner):
            state[learner.name] = own.training_state(to_load)
            continue
        unused = not learner.optimizer.state
        model, optimizer = get_state_dict(learner.module, learner.optimizer)
        if unused:
            # torch creates the state by a step with learning rate 0, which AdamW would count in its bias correction.
            for moments in learner.optimizer.state.values():
                moments["step"].zero_()
        untrained = frozen(learner)
        trained = {name: tensor for name, tensor in model.items() if name not in untrained}
        state[learner.name] = {"model": trained, "optimizer": {"state": optimizer["state"]}}
    return state


def frozen(learner: Trained) -> set[str]:
    """Return the names of weights that are not trained (with adapters, the base's). A tied weight has several names."""
    parameters = learner.module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if not parameter.requires_grad}
