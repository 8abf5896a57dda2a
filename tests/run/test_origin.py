"""Where a run begins, and what it is said to go on with."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import Config, ConfigError, load_config, save_yaml
from pipeline.run.inputs import fingerprints
from pipeline.run.origin import Origin, origin
from pipeline.storage.checkpoints import PROGRESS
from pipeline.storage.fingerprints import FILE, load
from tests.storage.test_checkpoints import written


class Project:
    """A run with a checkpoint of iteration 4, and the files that it reads."""

    def __init__(self, place: Path, *settings: str) -> None:
        self.place, self.settings = place, settings
        self.run = place / "runs" / "mine"
        for name in ("model/config.json", "model/model.safetensors", "code/reward.py", "code/helpers.py"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(name)
        (place / "code" / "reward.py").write_text("import helpers")
        self.rows("prompts/a.parquet", 1, 2)
        self.rows("val.parquet", 9)

    def rows(self, name: str, *values: int) -> None:
        (self.place / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"prompt": values}), self.place / name)

    def config(self, *more: str) -> Config:
        at = self.place
        return load_config(
            [
                *(f"model.path={at}/model", f"data.train_files={at}/prompts", f"data.val_files={at}/val.parquet"),
                *(f"reward.custom_reward_function.path={at}/code/reward.py", *self.settings, *more),
            ]
        )

    def train(self, fingerprinted: bool = True, iteration: int = 4, **progress: Any) -> Path:
        """What a run leaves; returns the checkpoint."""
        config = self.config()
        folder = written(self.run, iteration)
        known = json.loads((folder / PROGRESS).read_text())
        more = {"cursor": {"epoch": 1, "offset": 24}, "scheduler_steps": {"actor": 4}}
        (folder / PROGRESS).write_text(json.dumps(known | more | progress))
        for place in (self.run, folder):
            save_yaml(config, place / "config.yaml")
            if fingerprinted:
                fingerprints(config).save(place)
        return folder

    def start(self, *more: str) -> Origin:
        return origin(self.run, self.config(*more))

    def refused(self, *more: str) -> str:
        with pytest.raises(ConfigError) as error:
            self.start(*more)
        return str(error.value)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def test_a_new_run(project: Project) -> None:
    begin = project.start()
    assert not begin.exists and begin.own is None and begin.policy is None and begin.notes == []
    assert begin.fingerprints(project.config()).model.keys() == {"model.path"}
    assert not project.run.exists()


def test_the_same_files_go_on(project: Project) -> None:
    project.train()
    begin = project.start()
    assert begin.exists and begin.own is not None and begin.own.iteration == 4 and begin.notes == []
    assert begin.kept == load(str(project.run))


CHANGES = {
    "model": ("model/model.safetensors", "model.path: model.safetensors has"),
    "prompts": ("prompts/b.parquet", "data.train_files: b.parquet is new"),
    "code": ("code/helpers.py", "reward.custom_reward_function.path: helpers.py has"),
}


def change(project: Project, kind: str) -> str:
    name, said = CHANGES[kind]
    if kind == "prompts":
        project.rows(name, 3)
    else:
        (project.place / name).write_text(f"# {name}, and more")
    return said


@pytest.mark.parametrize("kind", list(CHANGES))
def test_other_files_are_refused_until_they_are_accepted(project: Project, kind: str) -> None:
    project.train()
    known = load(str(project.run))
    assert known is not None
    said = change(project, kind)
    sentence = project.refused()
    for part in (f"began on {known.began} with other files", f"- {said}", f"trainer.accept_changed=[{kind}]"):
        assert part in sentence
    assert "trainer.experiment_name" in sentence
    for other in set(CHANGES) - {kind}:
        assert said in project.refused(f"trainer.accept_changed=[{other}]")
    begin = project.start(f"trainer.accept_changed=[{kind}]")
    assert any(said in note for note in begin.notes) and begin.kept is not None
    [entry] = begin.kept.accepted
    assert entry["behind_iteration"] == 4 and said.split(": ")[1] in next(iter(entry["changed"].values()))
    assert any("epoch 1, after prompt 24" in note for note in begin.notes) == (kind == "prompts")
    begin.kept.save(project.run)
    again = project.start()
    assert again.notes == [] and again.kept == begin.kept
    assert project.start(f"trainer.accept_changed=[{kind}]").notes == [
        f"trainer.accept_changed={kind} has no effect: no file of that kind has changed"
    ]


def test_all_changes_are_named_with_the_whole_remedy(project: Project) -> None:
    project.train()
    said = [change(project, kind) for kind in CHANGES]
    sentence = project.refused("trainer.accept_changed=[code]")
    assert said[0] in sentence and said[1] in sentence and said[2] not in sentence
    assert "trainer.accept_changed=[model,prompts,code]" in sentence


def test_a_file_that_is_touched_or_copied_has_not_changed(project: Project) -> None:
    project.train()
    for path in [path for path in project.place.rglob("*") if path.is_file() and "runs" not in path.parts]:
        copy = path.with_suffix(".copy")
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
    assert project.start().notes == []


def test_a_project_that_is_moved_or_reached_by_a_link_goes_on(project: Project, tmp_path: Path) -> None:
    project.train()
    moved = tmp_path / "elsewhere"
    project.place.rename(moved)
    (tmp_path / "link").symlink_to(moved)
    for place in (moved, tmp_path / "link"):
        project.place, project.run = place, place / "runs" / "mine"
        assert project.start().notes == []
    change(project, "model")
    assert "model.path: model.safetensors has" in project.refused()


def test_another_model_with_the_same_name_is_refused_where_it_lies_elsewhere(project: Project) -> None:
    project.train()
    other = Project(project.place.parent / "other")
    (other.place / "model" / "model.safetensors").write_text("others")
    sentence = project.refused(f"model.path={other.place}/model")
    assert "model.path: model.safetensors has" in sentence
    assert project.start(f"data.train_files={other.place}/prompts").notes == []


def test_validation_by_other_files(project: Project) -> None:
    """Another file is a change, unless another setting names it."""
    project.train()
    project.rows("later.parquet", 8)
    [note] = project.start(f"data.val_files={project.place}/later.parquet").notes
    assert note.startswith("data.val_files names other files (") and "do not compare" in note
    project.rows("val.parquet", 7)
    assert "- data.val_files: val.parquet has" in project.refused()


def test_a_run_of_an_earlier_version_goes_on_with_a_note(project: Project) -> None:
    project.train(fingerprinted=False)
    change(project, "model")
    begin = project.start()
    assert begin.kept is None and len(begin.notes) == 1
    assert "without fingerprints" in begin.notes[0] and "kept from now on" in begin.notes[0]
    assert begin.fingerprints(project.config()).model.keys() == {"model.path"}


def test_the_fingerprints_of_a_lost_run_are_in_its_checkpoint(project: Project, tmp_path: Path) -> None:
    project.settings = (f"trainer.storage_path={tmp_path}/store", "trainer.experiment_name=mine")
    project.train()
    (tmp_path / "store").mkdir()
    project.run.rename(tmp_path / "store" / "mine")
    assert project.start().notes == []
    change(project, "code")
    assert "helpers.py has" in project.refused()


def test_a_run_without_a_checkpoint_begins_again_with_other_files(project: Project) -> None:
    """Nothing of it would be continued; so a reward that failed may be mended."""
    project.run.mkdir(parents=True)
    save_yaml(project.config(), project.run / "config.yaml")
    assert project.start().notes == [], "it was killed before it kept fingerprints"
    fingerprints(project.config()).save(project.run)
    assert project.start().notes == []
    said = change(project, "code")
    begin = project.start()
    [note] = begin.notes
    assert note.startswith("the run has no checkpoint and begins again, with other files: ") and said in note
    assert begin.fingerprints(project.config()).accepted == []


def test_a_run_that_began_with_a_policy_begins_again_without(project: Project) -> None:
    first = Project(project.place.parent / "first")
    first.train()
    resumed = f"trainer.resume={first.run}"
    project.run.mkdir(parents=True)
    save_yaml(project.config(resumed), project.run / "config.yaml")
    [note] = project.start().notes
    assert note.startswith("the run has no checkpoint and begins again with model.path=") and resumed in note
    [taken] = project.start(resumed).notes
    assert taken.startswith("a new run with the policy")
    project.train()
    assert project.start().notes == []


# a new run from a policy


def test_what_a_policy_gives(project: Project) -> None:
    project.train()
    new = Project(project.place.parent / "new", f"trainer.resume={project.run}", "trainer.experiment_name=new")
    begin = new.start()
    assert not begin.exists and begin.own is None and begin.policy is not None and begin.policy.iteration == 4
    [note] = begin.notes
    for part in (f"policy of iteration 4 in {project.run}/checkpoints", "weights of the actor;", "from the start"):
        assert part in note
    # Other prompts and code are what such a run is for.
    change(new, "prompts")
    change(new, "code")
    assert new.start().notes == [note]
    assert begin.kept is None


@pytest.mark.parametrize("there", [True, False])
def test_the_critic_of_a_policy(project: Project, there: bool) -> None:
    project.train(scheduler_steps={"actor": 4, "critic": 4} if there else {"actor": 4})
    begin = project.place.parent / "new"
    new = Project(begin, f"trainer.resume={project.run}", "algorithm=ppo", "trainer.experiment_name=new")
    [note] = [note for note in new.start().notes if "policy of iteration" in note]
    assert ("the actor and the critic;" in note) == there
    assert (f"the critic begins as {begin}/model, since that run had none" in note) == (not there)


@pytest.mark.parametrize(
    ("settings", "base"),
    [
        ([], None),
        (["actor.use_kl_loss=true"], "model.path="),
        (["algorithm.use_kl_in_reward=true"], "model.path="),
        (["actor.use_kl_loss=true", "scoring.reference.path=other"], "scoring.reference.path=other"),
        (["actor.use_kl_loss=true", "model.lora.rank=4"], "the model without adapters"),
    ],
)
def test_which_model_the_kl_is_against(project: Project, settings: list[str], base: str | None) -> None:
    project.settings = tuple(settings)
    project.train()
    new = Project(project.place.parent / "new", f"trainer.resume={project.run}", *settings)
    notes = [note for note in new.start().notes if note.startswith("the KL is against")]
    assert [base in note for note in notes] == ([] if base is None else [True])


def test_a_policy_of_another_model_is_refused(project: Project) -> None:
    project.train()
    new = Project(project.place.parent / "new", f"trainer.resume={project.run}")
    change(new, "model")
    assert "has weights of another model: model.path: model.safetensors has" in new.refused()
    assert new.start("trainer.accept_changed=[model]").policy is not None


def test_a_run_that_was_begun_from_a_policy_goes_on_by_itself(project: Project) -> None:
    source = project.train()
    new = Project(project.place.parent / "new", f"trainer.resume={project.run}")
    new.train(iteration=2)
    for path in (source / PROGRESS, source):
        path.rename(path.with_name("gone"))
    begin = new.start()
    assert begin.own is not None and begin.own.iteration == 2 and begin.policy is None
    [note] = begin.notes
    assert f"trainer.resume={project.run} is ignored" in note and "after iteration 2" in note


def test_damaged_fingerprints_are_named(project: Project) -> None:
    project.train()
    (project.run / FILE).write_text("{")
    with pytest.raises(ValueError, match=f"{project.run}/{FILE} is damaged"):
        project.start()
