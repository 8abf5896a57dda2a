"""The command line of a training run: what it refuses, how, and what it prints without starting anything."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.train import _adapters, _sequel, main
from pipeline.config import Config, load_config, save_yaml
from pipeline.config.places import name_from_root
from pipeline.models.settings import ModelSettings
from pipeline.plan.models import read_model
from pipeline.plan.placement import Node
from pipeline.run.inputs import fingerprints
from pipeline.storage.checkpoints import PROGRESS
from pipeline.storage.owner import FILE, Lock, owned
from tests.folders import configured, copied
from tests.models.test_lora import EXPERTS, HEADS, SMALL, family
from tests.storage.test_checkpoints import written

Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reaches Ray here fails the test."""

    def started(config: Config) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("pipeline.run.driver.start_ray", started)


@pytest.fixture
def arguments(tmp_path: Path, tiny_model: Path, prompt_files: Any) -> list[str]:
    """Settings of a run that would start."""
    return [
        f"data.train_files={prompt_files.train}",
        f"data.val_files={prompt_files.val}",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        f"model.path={tiny_model}",
        "rollout.n=4",
        "rollout.chunk_prompts=4",
        "trainer.num_workers=2",
        "trainer.ray_num_cpus=8",
        "trainer.experiment_name=mine",
        f"trainer.default_local_dir={tmp_path / 'runs'}",
    ]


@pytest.fixture
def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Run with further settings; the one sentence on stderr, after checking that nothing else came of it."""

    def run(*settings: str, parts: tuple[str, ...]) -> str:
        code = main([*arguments, *settings])
        printed = capsys.readouterr()
        assert code == 2, printed
        assert printed.out == ""
        sentence = printed.err.strip()
        assert sentence.startswith("error: ") and "Traceback" not in sentence and len(sentence.splitlines()) == 1
        for part in parts:
            assert part in sentence, sentence
        assert not (tmp_path / "runs" / "mine" / "metrics.jsonl").exists()
        return sentence

    return run


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["data.train_batch_size=10"], ("data.train_batch_size=10", "10 = 2 x rollout.chunk_prompts=4 + 2", "8 or 12")),
        (["trainer.num_workers=3"], ("8 / 4 = 2", "trainer.num_workers=3", "12")),
        (["trainer.ray_num_cpus=2"], ("trainer.ray_num_cpus=2", "trainer.num_workers", "= 5 CPUs")),
        (["data.train_bach_size=8"], ("data.train_bach_size", "did you mean data.train_batch_size?")),
        (["trainer.total_epochs=1", "data.train_batch_size=48"], ("40", "48", "trainer.total_training_steps")),
        (["data.train_files=nowhere.parquet"], ("data.train_files", "nowhere.parquet does not exist")),
        (["data.prompt_key=promt"], ("no column 'promt'", "data.prompt_key")),
        (
            ["data.apply_chat_template_kwargs={enable_thinkin: true}"],
            ("does not read 'enable_thinkin'", "model.tokenizer_path"),
        ),
        (["data.max_prompt_length=4"], ("row ", "data.truncation=left|right|middle")),
        (["model.path=./nowhere"], ("model.path", "does not exist")),
        (["reward.custom_reward_function.path=nowhere.py"], ("nowhere.py', which does not exist",)),
        (["reward.source_scale.gsm8k=2"], ("reward.source_scale sets 'gsm8k'", "training rows: 'countdown'")),
        (["data.apply_chat_template_kwargs.thnk=1"], ("apply_chat_template_kwargs.thnk", "does not read 'thnk'")),
        (
            ["trainer.best_metric=val-core/countdown/mean@1", "trainer.test_freq=1", "trainer.save_freq=1"],
            ("trainer.best_metric=val-core/countdown/mean@1 is not a metric", "are: val-core/countdown/acc/mean@1, "),
        ),
        (["model.attn_implementation=sdpaa"], ("model.attn_implementation=sdpaa", "the nearest is 'sdpa'")),
        (["data.max_prompt_length=2040"], ("2040 + 12 = 2052", "the 2048 of the model", "max_position_embeddings")),
    ],
)
def test_settings_that_cannot_be_run(refused: Refused, settings: list[str], parts: tuple[str, ...]) -> None:
    refused(*settings, parts=parts)


def test_a_metric_of_rows_that_are_not_validated_is_refused(
    refused: Refused, tmp_path: Path, prompt_files: Any
) -> None:
    rows = pq.read_table(prompt_files.val)
    sources = pa.array(["countdown", "countdown", *["gsm8k"] * (len(rows) - 2)])
    place = rows.schema.get_field_index("data_source")
    pq.write_table(rows.set_column(place, "data_source", sources), tmp_path / "two.parquet")
    settings = [f"data.val_files={tmp_path / 'two.parquet'}", "data.val_max_samples=2"]
    settings += ["trainer.best_metric=val-core/gsm8k/acc/mean@1", "trainer.test_freq=1", "trainer.save_freq=1"]
    sentence = refused(*settings, parts=("is not a metric of this run's validation", "val-core/countdown/acc/mean@1"))
    assert "val-aux/gsm8k" not in sentence


def test_run_folder_of_another_run(refused: Refused, arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    save_yaml(load_config(arguments), folder / "config.yaml")
    parts = (str(folder), "trainer.seed (1 there, 7 now)", "trainer.experiment_name")
    refused("trainer.seed=7", parts=parts)
    refused("trainer.resume=never", parts=(str(folder), "already holds a run", "trainer.resume=never"))
    (folder / "config.yaml").rename(folder / "notes.txt")
    refused(parts=(str(folder), "is not a run", "trainer.experiment_name"))


@pytest.fixture
def trained(arguments: list[str], tmp_path: Path) -> Path:
    """The folder of a run with a checkpoint of iteration 2."""
    folder = tmp_path / "runs" / "mine"
    saved = written(folder, 2)
    progress = json.loads((saved / PROGRESS).read_text()) | {"cursor": {"offset": 16}, "scheduler_steps": {"actor": 2}}
    (saved / PROGRESS).write_text(json.dumps(progress))
    config = load_config(arguments)
    name_from_root(config)
    for place in (folder, saved):
        save_yaml(config, place / "config.yaml")
    fingerprints(config).save(folder)
    return folder


def test_a_run_whose_prompts_were_replaced(
    trained: Path, arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same rows in another order, under the same name and setting."""
    train = tmp_path / "train.parquet"
    setting = f"data.train_files={train}"
    rows = pq.read_table(arguments[0].partition("=")[2])
    pq.write_table(rows, train)
    config = load_config([*arguments, setting])
    save_yaml(config, trained / "config.yaml")
    fingerprints(config).save(trained)
    assert main(["--dry-run", *arguments, setting]) == 0
    pq.write_table(rows.take(list(range(len(rows)))[::-1]), train)
    for mode in ([], ["--dry-run"]):
        assert main([*mode, *arguments, setting]) == 2
        printed = capsys.readouterr().err
        assert "with other files:\n- data.train_files: train.parquet has" in printed
        assert "trainer.accept_changed=[prompts] continues it" in printed
    assert main(["--dry-run", *arguments, setting, "trainer.accept_changed=[prompts]"]) == 0


def test_kinds_of_files_that_there_are_not(refused: Refused) -> None:
    refused("trainer.accept_changed=[data]", parts=("accept_changed: data is not a kind", "model, prompts, code"))


@pytest.mark.parametrize("steps", [2, 1, 3])
@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "start"])
def test_a_run_with_nothing_left_to_do_says_so(
    trained: Path,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    dry: bool,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    (trained / "model").mkdir()
    (trained / "model" / "config.json").touch()
    command = [*arguments, f"trainer.total_training_steps={steps}", *["--dry-run"] * dry]
    if steps > 2 and not dry:
        with pytest.raises(AssertionError, match="Ray was started"):
            main(command)
    else:
        assert main(command) == 0
    printed = capsys.readouterr().out
    said = f"{trained} has reached iteration 2 of {steps}; nothing is left to do, unless trainer.total_training_steps"
    assert (said in printed) == (steps <= 2)
    assert ("to continue: " in printed and "trainer.total_training_steps=4" in printed) == (steps <= 2 and not dry)


@pytest.mark.parametrize("steps", [2, 3])
def test_a_finished_run_that_kept_no_checkpoint_cannot_be_made_longer(
    trained: Path, arguments: list[str], capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    settings = [*arguments, "trainer.max_ckpt_to_keep=0"]
    config = load_config(settings)
    name_from_root(config)
    save_yaml(config, trained / "config.yaml")
    shutil.rmtree(trained / "checkpoints")
    (trained / "model").mkdir()
    (trained / "model" / "config.json").touch()
    ModelSettings.of(config, 2).save(trained / "model")
    assert main([*settings, f"trainer.total_training_steps={steps}"]) == (0 if steps == 2 else 2)
    printed = capsys.readouterr()
    why = "it kept no checkpoint (trainer.max_ckpt_to_keep=0), so it cannot continue; begin a new run with model.path="
    said = f"iteration 2 of 2; nothing is left to do, {why}" if steps == 2 else f"finished at iteration 2; {why}"
    assert f"{said}{trained}/model" in printed.out + printed.err
    assert "is raised" not in printed.out and "to continue: " not in printed.out
    # So say the last lines of the run itself; one that was stopped keeps its checkpoint.
    assert _sequel(config, trained, ["train", "x=1"], 2).startswith(f"not possible, {why}")
    assert _sequel(config, trained, ["train", "x=1"], None).endswith("train x=1")


@pytest.mark.parametrize("given", ["runs/mine", "runs/mine/checkpoints/iteration_000002/", "~/runs/mine"])
def test_a_run_from_a_policy_in_a_relative_place(
    trained: Path,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    settings = [*arguments, f"trainer.resume={given}", "trainer.experiment_name=second"]
    config = load_config(settings)
    name_from_root(config)
    assert config.trainer.resume.rstrip("/") == str(tmp_path / given.removeprefix("~/").rstrip("/"))
    assert main(["--dry-run", *settings]) == 0
    printed = capsys.readouterr().out
    place = trained / "checkpoints" / "iteration_000002"
    assert f"a new run with the policy of iteration 2 in {place}: it takes the weights of the actor" in printed
    assert "goes on at" not in printed


@pytest.mark.parametrize("value", ["auto", "never", "s3://bucket/run"])
def test_values_of_resume_that_name_no_local_place(value: str) -> None:
    config = load_config([f"trainer.resume={value}"])
    name_from_root(config)
    assert config.trainer.resume == value


@pytest.mark.parametrize("kind", ["linear", "constant"])
@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "start"])
def test_a_longer_run_says_where_its_rate_goes_on(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dry: bool,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    folder = tmp_path / "runs" / "mine"
    settings = [*arguments, f"actor.optim.lr_scheduler_type={kind}", "trainer.val_before_train=false"]
    progress = json.loads((written(folder, 2) / PROGRESS).read_text())
    config = load_config([*settings, "trainer.total_training_steps=2"])
    rate = config.actor.optim.lr if kind == "constant" else 0.0
    steps = {"scheduler_steps": {"actor": 2}, "learning_rates": {"actor": rate}}
    (folder / "checkpoints" / "iteration_000002" / PROGRESS).write_text(json.dumps(progress | steps))
    save_yaml(config, folder / "config.yaml")
    longer = [*settings, "trainer.total_training_steps=4"]
    if dry:
        assert main(["--dry-run", *longer]) == 0
    else:
        with pytest.raises(AssertionError, match="Ray was started"):
            main(longer)
    line = "which is 0.33 of its peak, and stood at 0: its linear schedule now has 4 optimiser steps, with 2 done"
    assert (line in capsys.readouterr().out) == (kind == "linear")


def test_dry_run_prints_the_plan_and_starts_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    # Options may stand between settings.
    assert main([*arguments[:3], "--dry-run", *arguments[3:]]) == 0
    printed = capsys.readouterr()
    for part in ("8 prompts x 4 samples = 32 rows in 2 chunks of 4 prompts", "iterations", "rollout", "CPU"):
        assert part in " ".join(printed.out.split())
    assert not (tmp_path / "runs").exists()
    ends = "answers end with <|im_end|> (2)"
    for part in (f"{tmp_path}/runs/mine", ends, "first prompt", "reward of a made-up response"):
        assert part in printed.out
    assert "suggested" not in printed.out


def test_asserts_that_cannot_be_judged_are_counted(
    refused: Refused,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the prompts that are made at the start as well."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("jobs.train.CHECKED_PROMPTS", 8)
    truths = [["assert f(1) == 2"]] * 40 + [["assert isinstance(f(1), int)"]] * 2 + [["assert f(lambda: 1) == 2"]]
    message = [{"role": "user", "content": "Write f."}]
    rows = [{"data_source": "taco", "prompt": message, "reward_model": {"ground_truth": truth}} for truth in truths]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "code.parquet")
    settings = [f"data.train_files={tmp_path / 'code.parquet'}", "data.val_files=null", "trainer.test_freq=-1"]
    counted = "3 of 43 rows' assertions cannot be judged: `isinstance` (2), a lambda (1)"
    refused(*settings, parts=(counted, "code.parquet, row 40", "data.max_bad_rows=3"))
    settings += ["data.max_bad_rows=3", "reward.sandbox.isolation=none"]
    assert main([*arguments, *settings, "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"note {counted}; they are set aside (data.max_bad_rows=3)" in printed


def test_dry_run_names_what_nothing_reads(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    rows = pq.read_table(arguments[0].partition("=")[2]).to_pylist()
    for row in rows:
        row |= {"prompt": [message | {"name": "Ann"} for message in row["prompt"]], "system": "Short."}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "named.parquet")
    assert main(["--dry-run", *arguments, f"data.train_files={tmp_path / 'named.parquet'}"]) == 0
    printed = capsys.readouterr().out
    assert "named.parquet has columns that are not read: system" in printed
    assert "the model's chat template leaves out `name` of messages of role user" in printed


GAME = """
from pipeline.agent import Environment, Observation

class Game(Environment):
    def reset(self, row, seed):
        return f"Reach {row['ground_truth']['target']}."

    def step(self, message):
        return Observation("higher", reward=0.5)

class Sure(Game):
    def step(self, message):
        return str(int(message.text))
"""


def test_dry_run_opens_the_first_episodes(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is the one that an engine makes of the row and of what the environment begins with."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(GAME)
    room = "data.max_response_length=64"
    assert main(["--dry-run", *arguments, room, "agent.environment=game.py:Game", "agent.max_turns=5"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in (
        "episodes 5 answers at most; continuations proven for role user",
        "user Numbers: ",
        "user Reach ",
        "reply to 'The answer is 42.' 'higher', reward 0.5; the episode goes on",
    ):
        assert part in printed, printed
    assert printed.count("first prompt") == 1 and "reward of a made-up response" not in printed


def test_an_environment_that_fails_on_every_row_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    parts = ("fails for each of the first 4 prompts", "'The answer is 42.': ValueError", "(game.py, line 13)")
    refused(f"agent.environment={tmp_path}/game.py:Sure", parts=parts)
    refused(f"agent.environment={tmp_path}/game.py:Gone", parts=("agent.environment", "has no Gone"))


def test_dry_run_prints_the_plan_where_gpus_are_missing(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    gpus = ["trainer.use_gpu=true", "trainer.gpus_per_worker=1", "trainer.num_workers=2"]
    monkeypatch.setattr("pipeline.plan.placement.local_node", lambda cpus: Node({"CPU": 8.0, "GPU": 0.0}))
    monkeypatch.setattr("jobs.train.check_versions", lambda: None)
    assert main(["--dry-run", *arguments, *gpus]) == 2
    printed = capsys.readouterr().out
    assert "2 x 1 CPU + 1 GPU" in printed
    assert "this machine cannot run it: the run needs" in printed and "2 GPUs and this machine has 0" in printed
    # The run is meant for other machines, with as many GPUs as are named.
    assert main(["--dry-run", "--gpus", "2", *arguments, *gpus]) == 0
    assert "cannot run it" not in capsys.readouterr().out
    assert main(["--dry-run", "--gpus", "1", *arguments, *gpus]) == 2
    assert "1 GPUs cannot run it: the run needs 2 GPUs; lower" in capsys.readouterr().out


def test_dry_run_compares_memory_with_the_machine(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("pipeline.plan.placement.local_node", lambda cpus: Node({"CPU": 8.0, "GPU": 0.0}))
    assert main(["--dry-run", *arguments]) == 0
    assert "this machine cannot run it" not in capsys.readouterr().out
    monkeypatch.setattr("pipeline.plan.host.machine_memory", lambda: 2**30)
    assert main(["--dry-run", *arguments]) == 2
    printed = capsys.readouterr().out
    assert "this machine cannot run it: the run needs about" in printed and "this machine has 1.0 GiB" in printed


def test_dry_run_suggests_settings(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are asked for, and if the plan does not fit."""
    monkeypatch.setenv("COLUMNS", "400")
    # A machine with a GPU suggests its own kind.
    monkeypatch.setattr("pipeline.plan.gpus.local_gpu", lambda: None)
    assert main(["--dry-run", "--gpus", "2xL4", *arguments]) == 0
    text = capsys.readouterr().out
    assert "suggested for 2 x L4" in text and "trainer.use_gpu=true" in text and "rollout.sleep=true" in text
    gpus = ["trainer.use_gpu=true", "rollout.num_gpus=1", "rollout.num_engines=2"]
    assert main(["--dry-run", *arguments, *gpus]) == 2
    text = capsys.readouterr().out
    assert "does not fit" not in text and "suggested" not in text
    large = ["actor.ppo_max_token_len_per_gpu=15000000", "rollout.n=200000"]
    assert main(["--dry-run", *arguments, *gpus, *large]) == 2
    text = capsys.readouterr().out
    assert "does not fit" in text and "a train worker needs" in text
    assert "suggested for 4 x H100" in text and "model.enable_gradient_checkpointing=true" in text


def test_gpus_that_nothing_can_be_suggested_for(refused: Refused) -> None:
    refused("--gpus", "8", parts=("--gpus suggests settings and starts nothing; add --dry-run",))
    refused("--dry-run", "--gpus", "8xT4", parts=("--gpus 8xT4 names an unknown kind of GPU; known are A100",))


def test_help_of_the_command() -> None:
    """In a process of its own: neither Ray nor torch is needed for it, so it comes at once."""
    code = (
        "import sys; from jobs.train import main\n"
        "try: main(['--help'])\n"
        "finally: print('loaded:', [name for name in ('ray', 'torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for part in ("--dry-run", "--config-dir", "experiment=countdown_cpu", "docs configuration", "loaded: []"):
        assert part in done.stdout


@pytest.mark.parametrize("place", ["runs", "store"])
def test_a_run_that_another_process_owns_is_refused_before_its_prompts_are_read(
    refused: Refused, arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    storage = f"trainer.storage_path={tmp_path / 'store'}"
    with owned([Lock(f"{tmp_path / place}/mine/{FILE}", "it")], print):
        refused(
            storage, "data.prompt_key=promt", parts=(f"{place}/mine is in use by process", "since", "wait for its end")
        )
        assert main([*arguments, storage, "--dry-run"]) == 0, "a plan needs no lock"
        capsys.readouterr()
    refused(storage, "data.prompt_key=promt", parts=("no column",))
    assert not list(tmp_path.glob("runs")) and not list(tmp_path.glob("store")), "a refused run leaves no folder"


def test_disks_without_room_for_a_checkpoint_are_named(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def none(place: str, needed: int, remedy: str) -> str:
        asked.append((place, needed))
        return f"{place} is too small; {remedy}"

    monkeypatch.setattr("pipeline.storage.room.lacking", none)
    assert main(["--dry-run", *arguments, "trainer.env_vars={TMPDIR: /small}", "trainer.storage_path=stored"]) == 0
    printed = capsys.readouterr().out
    assert "no room: /small is too small; make room, or name another folder (trainer.env_vars.TMPDIR)" in printed
    assert f"no room: {os.getcwd()}/stored/mine is too small; make room, or name another place" in printed
    # Weights and two averages in float32.
    (_, needed), _ = asked
    config = load_config(arguments)
    assert needed == pytest.approx(3 * 4 * read_model(config.model.path).parameters, rel=0.01)  # type: ignore[union-attr]
    assert {size for _, size in asked} == {needed}


@pytest.mark.parametrize("taken", ["model", "trajectories", "best.json"])
def test_what_the_run_cannot_write_is_named_before_anything_starts(
    arguments: list[str], refused: Refused, tmp_path: Path, taken: str
) -> None:
    config = load_config(arguments)
    name_from_root(config)
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    save_yaml(config, run_dir / "config.yaml")
    (run_dir / taken).mkdir() if "." in taken else (run_dir / taken).write_text("of another kind")
    refused(*arguments, parts=(f"{run_dir}/{taken}", "free space, allow writing, or choose another"))


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_folder_with_other_files_is_refused_before_the_start(
    more: tuple[str, ...], arguments: list[str], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = configured(copied(tiny_model, tmp_path / "few"), quantization_config={"quant_method": "awq", "bits": 4})
    narrow = configured(copied(tiny_model, tmp_path / "narrow"), vocab_size=100)
    for folder, part in ((quantised, "quantised weights: awq in 4 bits"), (narrow, "has 100 rows (vocab_size")):
        assert main([*arguments, f"model.path={folder}", *more]) == 2
        assert part in " ".join(capsys.readouterr().err.split())


def test_what_is_not_read_stands_in_the_plan(
    arguments: list[str], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(tiny_model, tmp_path / "two")
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    assert main([*arguments, f"model.path={folder}", "--dry-run"]) == 0
    assert "(adapter_model.safetensors), not loaded" in " ".join(re.sub("[│ ]+", " ", capsys.readouterr().out).split())


def test_adapters_that_cover_less_than_the_targets_say_are_a_note(tmp_path: Path) -> None:
    config = family(tmp_path / "moe", "Qwen3Moe", **SMALL, **HEADS, **EXPERTS)
    config.critic.enable, config.critic.path = True, str(tmp_path / "dense")
    family(tmp_path / "dense", "Qwen3", **SMALL, **HEADS)
    (note, experts), (line, dense) = _adapters(config)
    assert (note, line) == ("note", "adapters")
    assert experts.startswith("adapters are on 8 linear layers with ") and "mlp.experts.gate_up_proj (" in experts
    assert dense == "adapters are on 14 linear layers with 100.0% of the weights inside"
    config.model.lora.rank = 0
    assert _adapters(config) == []


def test_settings_are_checked_once_and_planned_once(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    for module, name in (("pipeline.plan.checks", "check"), ("pipeline.plan.plan", "plan")):
        function = getattr(importlib.import_module(module), name)

        def counted(*args: Any, name: str = name, function: Callable[..., Any] = function) -> Any:
            made.append(name)
            return function(*args)

        monkeypatch.setattr(f"{module}.{name}", counted)
    assert main(["--dry-run", *arguments]) == 0
    assert made == ["check", "plan"]
