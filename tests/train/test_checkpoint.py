"""Checkpoints of actor and critic, with a folder in the place of Ray Train's storage."""

import errno
import os
import re
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray.train
import torch
from torch.distributed.checkpoint.api import CheckpointException

from pipeline.advantage.kl_controller import AdaptiveKL
from pipeline.config import Config, load_yaml, save_yaml
from pipeline.errors import FinalError
from pipeline.models.batch import TrainBatch
from pipeline.models.fsdp import full_state_dict
from pipeline.rows import flat
from pipeline.run.checkpoint_keeper import CheckpointKeeper
from pipeline.storage import checkpoints, room
from pipeline.storage.checkpoints import newest
from pipeline.storage.fingerprints import Fingerprints
from pipeline.storage.fingerprints import load as load_fingerprints
from pipeline.storage.manifest import listed, parse
from pipeline.store.cursor import PromptCursor
from pipeline.store.status import TrainerState
from pipeline.train import checkpoint, restore
from pipeline.train.checkpoint import NotStored, Saver, staging
from pipeline.train.optim import LOW
from pipeline.train.setup import build_actor, build_critic
from tests.train.updates import CPU, make_config, moved, table, update, with_column

pytestmark = pytest.mark.usefixtures("one_rank")


class Storage:
    """Ray Train's side: `report` copies in a thread, and files may be refused for a while."""

    def __init__(self, run_dir: Path):
        self.run_dir, self.refuses, self.held = run_dir, 0, threading.Event()
        self.held.set()
        self.last: Path | None = None

    def persist_current_checkpoint(self, checkpoint: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        assert self.held.wait(30)
        if self.refuses:
            self.refuses -= 1
            raise OSError(5, "the storage is away")
        place = self.run_dir / "checkpoints" / name
        shutil.copytree(checkpoint.path, place, dirs_exist_ok=True)
        return ray.train.Checkpoint.from_directory(str(place))

    def report(self, metrics: dict[str, Any], *, checkpoint, checkpoint_dir_name, checkpoint_upload_fn, **mode) -> None:
        assert mode == {"checkpoint_upload_mode": ray.train.CheckpointUploadMode.ASYNC}
        threading.Thread(target=checkpoint_upload_fn, args=(checkpoint, checkpoint_dir_name), daemon=True).start()


def listed_again(folder: Path) -> None:
    """Let the list of a checkpoint's files be that of what it holds now."""
    mark = folder / "complete_0"
    mark.unlink()
    mark.write_text(listed(folder))


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Storage:
    made = Storage(tmp_path)
    context = SimpleNamespace(get_storage=lambda: made)
    stand_in = vars(ray.train) | {"report": made.report, "get_context": lambda: context}
    monkeypatch.setattr(checkpoint.ray, "train", SimpleNamespace(**stand_in))
    monkeypatch.setattr(checkpoint, "FIRST_PAUSE_S", 0.05)
    return made


def saver(
    storage: Storage, done: list[int] | None = None, deadline: float = 30.0, said: list[str] | None = None
) -> Saver:
    settings = Config()
    settings.trainer.deadlines.checkpoint = deadline
    root = str(storage.run_dir)
    say = (said if said is not None else []).append
    return Saver(root, root, deadline, partial(save_yaml, settings), (done if done is not None else []).append, say)


def config(model: Path) -> Config:
    settings = make_config(model)
    for part in (settings.actor, settings.critic):
        part.optim.lr, part.optim.eps, part.optim.lr_warmup_steps = 1e-2, 1e-2, 10
    return settings


def rows(seed: int) -> TrainBatch:
    count = len(flat(table(seed), "response_ids")[0])
    drawn = np.random.default_rng(seed).normal(size=(2, count))
    return TrainBatch.from_table(with_column(with_column(table(seed), "values", drawn[0]), "returns", drawn[1]))


class Learners:
    """An actor and a critic, with the controller of the KL."""

    def __init__(self, model: Path, dtype: str = "float32"):
        settings = config(model)
        settings.model.dtype = dtype
        self.actor, self.critic = build_actor(settings, CPU, 100), build_critic(settings, CPU, 100)
        self.both, self.kl = [self.actor, self.critic], AdaptiveKL(0.3, 0.1, 1000)

    def save(self, with_saver: Saver, version: int, wait: bool = True) -> TrainerState:
        state = TrainerState(version, PromptCursor(0, 4 * version), True)
        with_saver.save(self.both, self.kl, version, state)
        if wait:
            with_saver.wait()
        return state

    def restore(self, root: Path | str, *args: Any) -> TrainerState:
        return restore.restore(self.both, self.kl, str(root), *args)

    def distance(self, other: "Learners") -> float:
        pairs = zip(self.both, other.both, strict=True)
        return max(moved(full_state_dict(a.module), full_state_dict(b.module)) for a, b in pairs)


@pytest.mark.parametrize("warmup", [0, 2], ids=["both stepped", "critic alone"])
def test_goes_on_as_if_it_had_not_stopped(tiny_model: Path, storage: Storage, warmup: int) -> None:
    """Also where the policy has not stepped yet, and neither saving nor restoring shows."""
    whole, saved, restored = Learners(tiny_model), Learners(tiny_model), Learners(tiny_model)
    for version in range(2):
        for learners in (whole, saved):
            update(learners.critic, rows(version))
            learners.kl.update(0.2, 16)
            if version >= warmup:
                update(learners.actor, rows(version))
    done: list[int] = []
    state = saved.save(saver(storage, done), 2)
    assert done == [2]
    assert restored.restore(storage.run_dir) == state
    assert restored.kl.coef == whole.kl.coef != 0.3
    for learners in (whole, saved, restored):
        update(learners.actor, rows(2))
        update(learners.critic, rows(2))
    assert whole.distance(saved) == 0 and whole.distance(restored) == 0
    for learners in (whole, saved, restored):
        assert learners.actor.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * (4 - warmup) / 10)


def test_what_bfloat16_weights_lack_is_in_the_checkpoint(tiny_model: Path, storage: Storage) -> None:
    whole, restored = Learners(tiny_model, "bfloat16"), Learners(tiny_model, "bfloat16")
    update(whole.actor, rows(0))
    state = whole.save(saver(storage), 1)
    assert restored.restore(storage.run_dir) == state
    for learners in (whole, restored):
        update(learners.actor, rows(1))
    assert whole.distance(restored) == 0
    for mine, theirs in zip(whole.actor.module.parameters(), restored.actor.module.parameters(), strict=True):
        low = [
            learners.actor.optimizer.state[parameter][LOW].full_tensor()
            for learners, parameter in ((whole, mine), (restored, theirs))
        ]
        assert torch.equal(*low) and low[0].any()


def test_a_checkpoint_of_bfloat16_weights_alone_is_taken(tiny_model: Path, storage: Storage) -> None:
    """As an earlier version wrote it: without the lower halves, and with averages in bfloat16."""
    old, restored = Learners(tiny_model, "bfloat16"), Learners(tiny_model, "bfloat16")
    update(old.actor, rows(0))
    for learner in (old.actor, old.critic):
        for kept in learner.optimizer.state.values():
            del kept[LOW]
            kept |= {name: kept[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")}
    state = old.save(saver(storage), 1)
    assert restored.restore(storage.run_dir) == state and old.distance(restored) == 0
    for mine, theirs in zip(old.actor.module.parameters(), restored.actor.module.parameters(), strict=True):
        kept, found = old.actor.optimizer.state[mine], restored.actor.optimizer.state[theirs]
        assert torch.equal(found["exp_avg"].full_tensor(), kept["exp_avg"].full_tensor().float())
        assert found["step"] == 1 and not found[LOW].full_tensor().any()
    update(restored.actor, rows(1))


def test_training_goes_on_while_a_checkpoint_is_copied(tiny_model: Path, storage: Storage) -> None:
    learners, one = Learners(tiny_model), saver(storage, deadline=0.3)
    (storage.run_dir / "mlflow_run_id").write_text("abc\n")
    kept = Fingerprints({"model.path": {"config.json": "1 bytes 0"}})
    kept.save(storage.run_dir)
    storage.held.clear()
    learners.save(one, 1, wait=False)
    assert newest(str(storage.run_dir)) is None
    with pytest.raises(TimeoutError, match=r"rank 0 did not copy version 1 to .*trainer\.deadlines\.checkpoint"):
        learners.save(one, 2)
    storage.held.set()
    one.wait()
    found = newest(str(storage.run_dir))
    assert found is not None and found.progress["mlflow_run_id"] == "abc" and found.progress["cursor"] == {"offset": 4}
    assert load_yaml(Path(found.place) / "config.yaml", Config).trainer.deadlines.checkpoint == 0.3
    assert load_fingerprints(found.place) == kept


def test_a_storage_that_is_away_is_tried_again(tiny_model: Path, storage: Storage) -> None:
    storage.refuses = 3
    said: list[str] = []
    Learners(tiny_model).save(saver(storage, said=said), 1)
    assert storage.refuses == 0 and newest(str(storage.run_dir)) is not None
    assert said == [
        f"checkpoint: {storage.run_dir}/checkpoints cannot be written: the storage is away; free space there or allow "
        "access: it is tried again, for 30 s after the run has to wait for it"
    ]


def test_checkpoints_may_lie_behind_a_url(
    tiny_model: Path, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved, found, resumed from and deleted in `trainer.storage_path`; the run's folder holds none."""
    settings, run_dir = Config(), tmp_path / "runs" / "mine"
    settings.trainer.storage_path, settings.trainer.experiment_name = f"file://{tmp_path}/far", "mine"
    root = checkpoints.root(settings.trainer, run_dir)
    assert root == f"file://{tmp_path}/far/mine"
    storage.run_dir = tmp_path / "far" / "mine"
    saved, restored, done = Learners(tiny_model), Learners(tiny_model), []
    update(saved.actor, rows(0))
    # Files of an earlier attempt would make a checkpoint complete that is not.
    left = storage.run_dir / "checkpoints" / "iteration_000002" / "complete_9"
    left.parent.mkdir(parents=True)
    left.touch()
    one = Saver(str(run_dir), root, 30.0, partial(save_yaml, settings), done.append, print)
    saved.save(one, 2)
    state = saved.save(one, 4)
    assert done == [2, 4] and not run_dir.exists() and not left.exists()
    assert restored.restore(root) == state
    assert saved.distance(restored) == 0
    keeper = CheckpointKeeper(run_dir, 1, None, "max", root)
    keeper.saved(4, 0, 1)
    keeper.close()
    assert checkpoints.iterations(root) == [4]


@pytest.mark.parametrize("after", [2, 10**9], ids=["comes back", "stays away"])
def test_reading_waits_for_a_storage_that_is_away(
    tiny_model: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    learners = Learners(tiny_model)
    state = learners.save(saver(storage), 1)
    tries, real = [0], restore.places

    def away(root: str) -> Any:
        tries[0] += 1
        if tries[0] <= after:
            raise OSError(5, "the storage is away")
        return real(root)

    monkeypatch.setattr(restore, "places", away)
    if after == 2:
        assert learners.restore(storage.run_dir, None, 30.0) == state
    else:
        with pytest.raises(OSError, match=r"could not be read for 0 s \(trainer.deadlines.checkpoint\): the"):
            learners.restore(storage.run_dir, None, 0.2)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_training_waits_a_short_time_for_a_storage_that_stays_full(
    tiny_model: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The first failure is said, tries go on while training works, and no error ends the workers before they save."""
    tries: list[str] = []
    said: list[str] = []
    ended: list[BaseException | None] = []

    def full(checkpoint: Any, name: str) -> None:
        tries.append(name)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(storage, "persist_current_checkpoint", full)
    monkeypatch.setattr(checkpoint, "STANDING_S", 0.3)
    monkeypatch.setattr(checkpoint, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(threading, "excepthook", lambda hook: ended.append(hook.exc_value))
    learners, one = Learners(tiny_model), saver(storage, said=said)
    learners.save(one, 1, wait=False)
    deadline = time.monotonic() + 60
    # More tries than fit into `STANDING_S`.
    while len(tries) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(said) == 1
    for part in (f"{storage.run_dir}/checkpoints cannot be written", os.strerror(number), "is tried again, for 0 s"):
        assert part in said[0]
    began = time.monotonic()
    with pytest.raises(NotStored) as error:
        learners.save(one, 2)
    assert time.monotonic() - began < 30
    for part in (f"{storage.run_dir}/checkpoints could not be written", os.strerror(number), "start the same command"):
        assert part in str(error.value)
    with pytest.raises(NotStored):
        one.wait()
    assert newest(str(storage.run_dir)) is None and len(said) == 1 and not ended


def test_a_copy_that_failed_leaves_room_for_records(
    tiny_model: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, left = storage.persist_current_checkpoint, list[list[str]]()
    folder = storage.run_dir / "checkpoints" / "iteration_000001"

    def half(staged: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        left.append(sorted(path.name for path in folder.iterdir()) if folder.exists() else [])
        made = copy(staged, name)
        (folder / "of_another_rank").touch()
        if len(left) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return made

    monkeypatch.setattr(storage, "persist_current_checkpoint", half)
    Learners(tiny_model).save(saver(storage), 1)
    assert left == [[], ["of_another_rank"], ["of_another_rank"]]
    assert newest(str(storage.run_dir)) is not None


def test_a_list_of_files_that_is_half_written_goes_with_them(
    tiny_model: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a list would be that of a damaged checkpoint."""
    folder, left = storage.run_dir / "checkpoints" / "iteration_000001", list[list[str]]()
    real = checkpoint.listed

    class Full:
        def open_output_stream(self, path: str) -> Any:
            Path(path).write_text('{"a')
            raise OSError(errno.ENOSPC, "No space left on device")

    copy = storage.persist_current_checkpoint

    def once(staged: ray.train.Checkpoint, name: str) -> Any:
        left.append(sorted(path.name for path in folder.iterdir()) if folder.exists() else [])
        made = copy(staged, name)
        return SimpleNamespace(filesystem=Full(), path=made.path) if len(left) < 3 else made

    monkeypatch.setattr(storage, "persist_current_checkpoint", once)
    Learners(tiny_model).save(saver(storage), 1)
    assert left == [[], [], []]
    found = newest(str(storage.run_dir))
    assert found is not None and found.files == parse((folder / "complete_0").read_text()) and found.files
    (folder / "complete_0").unlink()
    assert parse(real(folder)) == found.files


def test_a_full_folder_of_temporary_files_is_named(
    tiny_model: Path, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever writes there: a folder, torch's files, or a small file after these; nothing is left."""
    place = tmp_path / "small"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    learners = Learners(tiny_model)

    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def torn(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    def wrapped(*arguments: Any, **more: Any) -> None:
        raise CheckpointException("save", {0: (OSError(errno.ENOSPC, "No space left on device"), None)})  # type: ignore[dict-item]

    for module, name, failing in (
        (checkpoint.tempfile, "mkdtemp", full),
        (checkpoint.dcp, "save", wrapped),
        (checkpoint.torch, "save", torn),
        (checkpoint.Path, "write_text", full),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing)
            with pytest.raises(
                NotStored, match=f"checkpoint: {place}.* could not be written: (No space|.enforce.*MiB free)"
            ):
                learners.save(saver(storage), 1)
        assert not list(place.iterdir()), name
    learners.save(saver(storage), 1)


def test_checkpoints_are_staged_in_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert staging() == str(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with pytest.raises(OSError, match="missing is not a folder that can be written on this node"):
        staging()
    monkeypatch.delenv("TMPDIR")
    assert Path(staging()).is_dir()


def shard(folder: Path) -> Path:
    return folder / "__0_0.distcp"


def halved(folder: Path) -> None:
    with shard(folder).open("r+b") as file:
        file.truncate(shard(folder).stat().st_size // 2)


def of_another(folder: Path) -> None:
    shutil.copy(shard(folder.with_name("iteration_000001")), shard(folder))


@pytest.mark.parametrize(
    ("damage", "problem"), [(halved, "has .* bytes"), (of_another, "another content than was written")]
)
def test_the_checkpoint_before_a_damaged_one_is_taken(
    tiny_model: Path, storage: Storage, damage: Any, problem: str
) -> None:
    """It is said, the damaged one stays under another name, and its number is free."""
    saved, restored = Learners(tiny_model), Learners(tiny_model)
    one = saver(storage)
    states = []
    for version in (1, 2, 3):
        update(saved.actor, rows(version))
        states.append(saved.save(one, version))
        if version == 1:
            expected = {name: tensor.clone() for name, tensor in full_state_dict(saved.actor.module).items()}
    folder = storage.run_dir / "checkpoints"
    for name in ("iteration_000003", "iteration_000002"):
        damage(folder / name)
    said: list[str] = []
    assert restored.restore(storage.run_dir, None, 0.0, said.append) == states[0]
    assert moved(full_state_dict(restored.actor.module), expected) == 0
    for sentence, number in zip(said, (3, 2), strict=True):
        assert re.search(
            f"^the checkpoint {folder}/iteration_00000{number} is damaged: __0_0.*{problem}.*; it is kept as "
            f"iteration_00000{number}.damaged, and {folder}/iteration_000001 is taken$",
            sentence,
        )
    restored.save(saver(storage), 2)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("iteration_000001", "iteration_000002", "iteration_000002.damaged", "iteration_000003.damaged")
    ]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tiny_model: Path, storage: Storage) -> None:
    learners, untouched = Learners(tiny_model), Learners(tiny_model)
    learners.save(saver(storage), 1)
    folder = storage.run_dir / "checkpoints" / "iteration_000001"
    given = storage.run_dir / "given"
    shutil.copytree(folder, given)
    halved(folder)
    with pytest.raises(
        FinalError, match=r"000001 is damaged: .*No earlier checkpoint is complete; put back the files, or"
    ):
        untouched.restore(storage.run_dir, str(given))
    assert folder.is_dir()
    # One of another run is left as it is.
    shutil.rmtree(folder)
    of_another_kind = shard(given).read_bytes()[::-1]
    shard(given).write_bytes(of_another_kind)
    with pytest.raises(FinalError, match=f"^trainer.resume: the checkpoint {given} is damaged: .*; name another one"):
        untouched.restore(storage.run_dir, str(given))
    assert given.is_dir() and untouched.distance(Learners(tiny_model)) == 0


@pytest.mark.parametrize("file", ["__0_0.distcp", "rng_0.pt", ".metadata"])
def test_an_older_checkpoint_that_cannot_be_loaded_is_named(tiny_model: Path, storage: Storage, file: str) -> None:
    """It has no list of its files."""
    learners = Learners(tiny_model)
    learners.save(saver(storage), 1)
    folder = storage.run_dir / "checkpoints" / "iteration_000001"
    (folder / "complete_0").write_text("")
    (folder / file).write_bytes((folder / file).read_bytes()[:100])
    with pytest.raises(FinalError, match=f"^the checkpoint {folder} cannot be loaded: .*; move it away to use the one"):
        learners.restore(storage.run_dir)


def test_disks_without_room_for_a_checkpoint_are_named_before_the_first_one(
    tiny_model: Path, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "small"))
    learners, said = Learners(tiny_model), list[str]()
    one = saver(storage, said=said)
    one.check_room(learners.both)
    assert not said
    free = [0]
    monkeypatch.setattr(room.shutil, "disk_usage", lambda place: SimpleNamespace(free=free[0]))
    one.check_room(learners.both)
    assert [re.sub(r"needs \d+ MiB", "needs N MiB", text) for text in said] == [
        f"checkpoint: {tmp_path}/small has 0 MiB free, and a checkpoint needs N MiB there; make room, or name another "
        "folder (trainer.env_vars.TMPDIR)",
        f"checkpoint: {tmp_path}/checkpoints has 0 MiB free, and a checkpoint needs N MiB there; make room, or name "
        "another place (trainer.storage_path)",
    ]
    # What is needed is what is written, but for what torch writes around it.
    for learner in learners.both:
        update(learner, rows(1))
    learners.save(one, 1)
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoints" / "iteration_000001").iterdir())
    del said[:]
    free[0] = int(0.8 * written)
    one.check_room(learners.both)
    assert len(said) == 2
    free[0] = written
    one.check_room(learners.both)
    assert len(said) == 2
