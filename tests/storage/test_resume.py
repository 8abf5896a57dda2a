"""Who may write into a run's folder."""

import json

import pytest

from pipeline.config import Config, ConfigError, load_config, save_yaml
from pipeline.config.schema import keys
from pipeline.models.settings import ModelSettings
from pipeline.storage.checkpoints import FOLDER, PROGRESS
from pipeline.storage.filesystem import check_scheme, filesystem_of
from pipeline.storage.fingerprints import Fingerprints
from pipeline.storage.resume import (
    CONFIG_FILE,
    MAY_DIFFER,
    check_run_folder,
    given_policy,
    other_settings,
    own_checkpoint,
    reached,
    recover,
)
from tests.storage.test_checkpoints import written


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    save_yaml(load_config(["rollout.n=4"]), folder / "config.yaml")
    return folder


def test_new_and_empty_folders_are_free(tmp_path):
    assert not check_run_folder(tmp_path / "new", Config())
    assert not check_run_folder(tmp_path, Config(), resume="never")


def test_the_file_of_its_owner_is_no_foreign_file(tmp_path):
    (tmp_path / "owner.json").write_text("")
    (tmp_path / "owner.json.1a2b3c4d.tmp").write_text("")
    assert not check_run_folder(tmp_path, Config(), resume="never")


def test_the_same_settings_continue(run):
    assert check_run_folder(run, load_config(["rollout.n=4"]))


@pytest.mark.parametrize(
    "change",
    [
        "trainer.total_training_steps=99",
        "trainer.deadlines.chunk=5",
        "rollout.num_cpus=2",
        "scoring.value.num_workers=2",
        "scoring.reference.max_token_len=99",
        "scoring.reference.placement=train_workers",
        "scoring.reference.offload=true",
    ],
)
def test_settings_of_length_and_layout_may_change(run, change):
    assert check_run_folder(run, load_config(["rollout.n=4", change]))


def test_other_settings_are_named_with_both_remedies(run):
    with pytest.raises(ConfigError) as error:
        check_run_folder(run, load_config(["rollout.n=8", "actor.optim.lr=0.5"]))
    sentence = str(error.value)
    assert "rollout.n (4 there, 8 now)" in sentence and "actor.optim.lr (1e-06 there, 0.5 now)" in sentence
    assert "trainer.experiment_name" in sentence and f"delete {run}" in sentence


@pytest.mark.parametrize("change", ["scoring.reference.path=other", "scoring.value.dtype=bfloat16", "critic.warmup=1"])
def test_settings_that_change_numbers_may_not(run, change):
    with pytest.raises(ConfigError, match=change.split("=")[0]):
        check_run_folder(run, load_config(["rollout.n=4", change]))


def test_another_mesh_continues(run):
    mesh = ["trainer.num_workers=4", "actor.parallel.replicate=2", "actor.parallel.tensor=2"]
    assert check_run_folder(run, load_config(["rollout.n=4", *mesh]))


def test_never_refuses_any_run(run, named):
    with pytest.raises(ConfigError) as refused:
        check_run_folder(run, load_config(["rollout.n=4"]), resume="never")
    named(refused.value, "trainer.resume=never")


def test_folder_that_is_no_run(tmp_path):
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="is not a run"):
        check_run_folder(tmp_path, Config())
    with pytest.raises(ConfigError, match="is a file"):
        check_run_folder(tmp_path / "thesis.txt", Config())


def test_run_of_another_version(run):
    (run / "config.yaml").write_text("old: {key: 1}\n")
    with pytest.raises(ConfigError, match="cannot be continued by this version"):
        check_run_folder(run, Config())


def test_the_list_names_existing_keys():
    names = keys(Config)
    for entry in MAY_DIFFER:
        assert entry in names or any(name.startswith(entry) for name in names if entry.endswith("."))


# checkpoints elsewhere


def settings(tmp_path, *more):
    return load_config([f"trainer.storage_path=file://{tmp_path}/far", "trainer.experiment_name=run", *more])


def saved(tmp_path, *more):
    """A checkpoint of a run with these settings in the storage."""
    folder = written(tmp_path / "far" / "run", 6)
    save_yaml(settings(tmp_path, *more), folder / "config.yaml")


def test_a_run_whose_folder_was_lost_goes_on_from_the_storage(tmp_path):
    assert own_checkpoint(tmp_path / "run", settings(tmp_path)) is None
    saved(tmp_path, "trainer.total_epochs=3")
    found = own_checkpoint(tmp_path / "run", settings(tmp_path))
    assert found.iteration == 6 and found.place == f"file://{tmp_path}/far/run/checkpoints/iteration_000006"


def test_the_mlflow_run_of_a_lost_folder_is_continued(tmp_path):
    config, run_dir = settings(tmp_path), tmp_path / "run"
    run_dir.mkdir()
    assert not recover(run_dir, None)
    folder = tmp_path / "far" / "run" / FOLDER / "iteration_000006"
    saved(tmp_path)
    assert not recover(run_dir, own_checkpoint(run_dir, config))
    progress = json.loads((folder / PROGRESS).read_text())
    (folder / PROGRESS).write_text(json.dumps(progress | {"mlflow_run_id": "cafe"}))
    assert recover(run_dir, own_checkpoint(run_dir, config))
    assert (run_dir / "mlflow_run_id").read_text() == "cafe\n"


# a new run from a policy


def test_a_policy_with_other_adapters_is_refused(tmp_path, named):
    saved(tmp_path, "model.lora.rank=4")
    run = f"trainer.resume=file://{tmp_path}/far/run"
    with pytest.raises(ConfigError) as refused:
        given_policy(load_config([run]))
    named(refused.value, "model.lora.rank 0 4")
    with pytest.raises(ConfigError) as refused:
        given_policy(load_config([run, "trainer.accept_changed=[model]"]))
    named(refused.value, "model.lora.rank")
    # A slash behind the run's name is no other folder of a store.
    found = given_policy(load_config([f"{run}/", "model.lora.rank=4"]))
    assert found.place == f"file://{tmp_path}/far/run/checkpoints/iteration_000006"
    assert given_policy(load_config([f"trainer.resume={found.place}", "model.lora.rank=4"])) == found


def test_the_policy_of_a_run_whose_checkpoints_lie_elsewhere(tmp_path, named):
    saved(tmp_path)
    run, far = tmp_path / "run", f"{tmp_path}/far/run/checkpoints/iteration_000006"
    run.mkdir()
    save_yaml(settings(tmp_path), run / CONFIG_FILE)
    for place in (run, far):
        assert given_policy(load_config([f"trainer.resume={place}"])).place.endswith(far)
    (tmp_path / "far").rename(tmp_path / "gone")
    with pytest.raises(ConfigError) as refused:
        given_policy(load_config([f"trainer.resume={run}"]))
    named(refused.value, "far/run")
    # Checkpoints in its own folder come first.
    (tmp_path / "gone" / "run" / FOLDER).rename(run / FOLDER)
    assert given_policy(load_config([f"trainer.resume={run}"])).place == f"{run}/checkpoints/iteration_000006"


@pytest.mark.parametrize("before", ["ppo", "grpo"])
def test_the_critic_of_a_policy_counts_if_both_runs_have_one(tmp_path, before, named):
    saved(tmp_path, f"algorithm={before}", "critic.path=a")
    run = [f"trainer.resume=file://{tmp_path}/far/run", "critic.path=b"]
    assert given_policy(load_config([*run, "algorithm=grpo"])).iteration == 6
    if before == "grpo":
        assert given_policy(load_config([*run, "algorithm=ppo"])).iteration == 6
        return
    with pytest.raises(ConfigError) as refused:
        given_policy(load_config([*run, "algorithm=ppo"]))
    named(refused.value, "critic.path")


def test_a_folder_without_a_policy_is_refused(tmp_path, named):
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError) as refused:
        given_policy(load_config([f"trainer.resume={tmp_path}/model"]))
    named(refused.value, "trainer.resume /model model.path")
    for value in ("auto", "never"):
        assert given_policy(load_config([f"trainer.resume={value}"])) is None


def test_a_checkpoint_of_another_run_in_the_storage_is_refused(tmp_path, named):
    saved(tmp_path, "rollout.n=4")
    with pytest.raises(ConfigError) as refused:
        own_checkpoint(tmp_path / "run", settings(tmp_path))
    named(refused.value, "rollout.n")
    with pytest.raises(ConfigError) as refused:
        own_checkpoint(tmp_path / "run", settings(tmp_path, "rollout.n=4", "trainer.resume=never"))
    named(refused.value, "trainer.resume=never")


def test_a_run_may_not_move_its_storage(run, tmp_path, named):
    with pytest.raises(ConfigError) as refused:
        check_run_folder(run, load_config(["rollout.n=4", f"trainer.storage_path={tmp_path}"]))
    named(refused.value, "trainer.storage_path")


# places


def in_project(place, *more):
    place.mkdir(exist_ok=True)
    (place / "model").mkdir(exist_ok=True)
    for name in ("train.parquet", "reward.py", "game.py", "tools.py"):
        (place / name).touch()
    return load_config(
        [
            *(f"model.path={place}/model", f"data.train_files=[{place}/train.parquet]"),
            *(f"reward.functions.a.path={place}/reward.py", "reward.functions.b.path=package.module"),
            *(
                f"agent.environment={place}/game.py:Game",
                f"agent.tools=[{place}/tools.py,'mcp: python {place}/game.py']",
            ),
            *(f"data.sampler_kwargs.table={place}/train.parquet", *more),
        ]
    )


def test_a_project_that_was_moved_is_the_same(tmp_path):
    before = in_project(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    after = in_project(tmp_path / "new")
    assert other_settings(before, after, None) == []
    # A copy may have changed since, and says so.
    in_project(tmp_path / "old")
    changed = [key for key, _, _ in other_settings(before, after, None)]
    assert changed == [
        *("data.train_files", "data.sampler_kwargs", "model.path", "agent.environment", "agent.tools"),
        "reward.functions",
    ]


def test_a_link_names_the_same_place(tmp_path):
    real = in_project(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert other_settings(real, in_project(tmp_path / "link"), None) == []


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("model.path=other", "model.path"),
        ("data.train_files=[PLACE/train.parquet,PLACE/train.parquet]", "data.train_files"),
        ("reward.functions.b.path=package.other", "reward.functions"),
        ("reward.functions.a.weight=2", "reward.functions"),
        ("agent.environment=PLACE/game.py:Other", "agent.environment"),
        ("agent.environment=PLACE/tools.py:Game", "agent.environment"),
    ],
)
def test_a_moved_project_with_other_settings_is_another(tmp_path, change, key):
    before = in_project(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    after = in_project(tmp_path / "new", change.replace("PLACE", str(tmp_path / "new")))
    assert [name for name, _, _ in other_settings(before, after, None)] == [key]


def test_where_files_are_compared_their_places_do_not_count(tmp_path):
    """Both places are there, and which files they hold is compared by fingerprints."""
    marks = {"f": "1 bytes 0"}
    names = ("agent.environment", "agent.tools", "reward.functions.a.path", "data.sampler_kwargs.table")
    known = Fingerprints({"model.path": marks}, {"data.train_files": marks}, dict.fromkeys(names, marks))
    before, after = in_project(tmp_path / "a"), in_project(tmp_path / "b")
    assert len(other_settings(before, after, None)) == 6
    assert other_settings(before, after, known) == []
    after.model.path, after.data.train_files = "owner/model", "s3://bucket/rows.parquet"
    assert other_settings(before, after, known) == []
    after.agent.environment, after.data.train_files = f"{tmp_path}/b/tools.py:Game", None
    assert [key for key, _, _ in other_settings(before, after, known)] == ["data.train_files", "agent.environment"]


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_storage_is_moved_with_its_checkpoints(tmp_path, checkpoints):
    def at(place):
        return load_config([f"trainer.storage_path={tmp_path}/{place}/store", "trainer.experiment_name=run"])

    written(tmp_path / "new" / "store" / ("run" if checkpoints else "other"), 2)
    assert [key for key, _, _ in other_settings(at("old"), at("new"), None)] == (
        [] if checkpoints else ["trainer.storage_path"]
    )


def test_reached_looks_into_the_storage(tmp_path):
    saved(tmp_path)
    run_dir = tmp_path / "run"
    assert reached(run_dir, settings(tmp_path)) == 0
    (run_dir / "model").mkdir(parents=True)
    (run_dir / "model" / "config.json").touch()
    assert reached(run_dir, settings(tmp_path)) == 6


@pytest.mark.parametrize(("keep", "iteration"), [(0, 8), (1, 0)])
def test_a_finished_run_that_keeps_no_checkpoint_is_known_by_its_model(tmp_path, keep, iteration):
    config = load_config([f"trainer.max_ckpt_to_keep={keep}"])
    save_yaml(config, tmp_path / "config.yaml")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    ModelSettings.of(config, 8).save(tmp_path / "model")
    assert reached(tmp_path, config) == iteration


def test_any_file_system_of_pyarrow_or_fsspec_will_do(tmp_path, named):
    filesystem, path = filesystem_of("memory://bucket/runs/")
    filesystem.create_dir(f"{path}/a")
    assert filesystem_of("memory://bucket/runs")[0].get_file_info(f"{path}/a").is_file is False
    for place in ("s3://bucket/x", "gs://bucket/x", "memory://x", f"{tmp_path}", f"file://{tmp_path}"):
        check_scheme(place)
    for refuse in (check_scheme, filesystem_of):
        with pytest.raises(ValueError) as refused:
            refuse("nosuch://x")
        named(refused.value, "'nosuch://x'")


@pytest.mark.parametrize("batch", ["data.train_batch_size=1024", "data.train_batch_size=32"])
def test_a_run_keeps_its_number_of_prompts_in_a_chunk(tmp_path, batch):
    save_yaml(load_config([batch, "rollout.chunk_prompts=8"]), tmp_path / "config.yaml")
    now = load_config([batch])
    assert check_run_folder(tmp_path, now) and now.rollout.chunk_prompts == 8
    with pytest.raises(ConfigError, match=r"rollout.chunk_prompts \(8 there, 16 now\)"):
        check_run_folder(tmp_path, load_config([batch, "rollout.chunk_prompts=16"]))
