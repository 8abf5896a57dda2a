"""The command line of a training run: what it refuses, how, and what it prints without starting anything."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from jobs.train import main
from pipeline.config import Config, load_config, save_yaml

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


@pytest.fixture
def prompts(prompt_files: Any, tmp_path: Path) -> Callable[..., str]:
    """A copy of the training prompts, changed by a function of the list of rows."""

    def write(change: Callable[[list[dict[str, Any]]], Any], name: str = "changed.parquet") -> str:
        rows = pq.read_table(prompt_files.train).to_pylist()
        change(rows)
        schema = pq.read_schema(prompt_files.train) if len(rows[0]) == 5 else None
        pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / name)
        return str(tmp_path / name)

    return write


def test_missing_and_unreadable_parquet(refused: Refused, tmp_path: Path, prompt_files: Any) -> None:
    near = Path(prompt_files.train).with_name("trian.parquet")
    refused(f"data.train_files={near}", parts=("data.train_files", str(near), "does not exist", "'train.parquet'"))
    refused(f"data.val_files={near}", parts=("data.val_files", str(near), "does not exist"))
    (tmp_path / "text.parquet").write_text("no parquet at all")
    refused(f"data.train_files={tmp_path / 'text.parquet'}", parts=("text.parquet cannot be read as parquet",))
    (tmp_path / "nothing.parquet").touch()
    refused(f"data.train_files={tmp_path / 'nothing.parquet'}", parts=("nothing.parquet", "0 bytes"))


def test_parquet_without_rows(refused: Refused, tmp_path: Path, prompt_files: Any) -> None:
    path = tmp_path / "empty.parquet"
    pq.write_table(pq.read_table(prompt_files.train).slice(0, 0), path)
    refused(f"data.train_files={path}", parts=("data.train_files", str(path), "has no rows"))


def test_missing_column(refused: Refused, tmp_path: Path, prompt_files: Any) -> None:
    path = tmp_path / "columns.parquet"
    pq.write_table(pq.read_table(prompt_files.train).drop_columns(["reward_model"]), path)
    refused(f"data.train_files={path}", parts=(str(path), "no column 'reward_model'", "ground_truth"))
    refused("data.prompt_key=promt", parts=("no column 'promt'", "the nearest is 'prompt'", "data.prompt_key"))


def test_prompts_that_are_no_chat_messages(refused: Refused, prompts: Callable[..., str], tmp_path: Path) -> None:
    def plain(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["prompt"] = "plain text"
            row["more"] = 0

    path = prompts(plain)
    refused(f"data.train_files={path}", parts=(path, "'prompt'", "data.prompt_key", "chat messages", "Wrap"))

    # Types are right and one row is not: only reading it can tell.
    path = prompts(lambda rows: rows[0].update(prompt=None))
    refused(f"data.train_files={path}", "data.shuffle=false", parts=(path, "row 0", "the prompt is null", "content"))
    path = prompts(lambda rows: rows[3].update(prompt=[{"role": "user", "content": None}]))
    refused(f"data.val_files={path}", parts=(path, "row 3", "`content` of message 0", "text is needed"))


def test_model_folder_without_tokenizer(refused: Refused, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder, ignore=lambda _, names: [name for name in names if "token" in name])
    refused(f"model.path={folder}", parts=("model.path", str(folder), "holds no tokenizer", "model.tokenizer_path"))
    refused(f"model.path={tmp_path / 'nowhere'}", parts=("model.path", "nowhere", "there is no folder"))


def test_failing_chat_template(refused: Refused, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ raise_exception('only systems may speak') }}"
    tokenizer.save_pretrained(folder)
    refused(f"model.path={folder}", parts=("row ", "only systems may speak"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    refused(f"model.path={folder}", parts=(str(folder), "no chat template", "model.tokenizer_path"))


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["data.train_batch_size=10"], ("data.train_batch_size=10", "10 = 2 x rollout.chunk_prompts=4 + 2", "8 or 12")),
        (["trainer.num_workers=3"], ("8 / 4 = 2", "trainer.num_workers=3", "12")),
        (["actor.ppo_mini_batch_size=16"], ("actor.ppo_mini_batch_size=16", "8 = 0 x 16 + 8")),
        (["trainer.ray_num_cpus=2"], ("trainer.ray_num_cpus=2", "trainer.num_workers", "= 5 CPUs")),
        (["rollout.temperature=hot"], ("rollout.temperature=hot", "a number")),
        (["data.train_bach_size=8"], ("data.train_bach_size", "did you mean data.train_batch_size?")),
        (["actor.lr=1"], ("actor.lr", "did you mean actor.optim.lr?")),
        (["trainer.total_epochs=1", "data.train_batch_size=48"], ("40", "48", "trainer.total_training_steps")),
        (["data.max_prompt_length=2040"], ("2040 + 12 = 2052", "the 2048 of the model", "max_position_embeddings")),
    ],
)
def test_settings_that_cannot_be_run(refused: Refused, settings: list[str], parts: tuple[str, ...]) -> None:
    refused(*settings, parts=parts)


def test_data_source_without_rule(refused: Refused, prompts: Callable[..., str]) -> None:
    path = prompts(lambda rows: rows[17].update(data_source="riddles"))
    refused(f"data.train_files={path}", parts=("'riddles'", "countdown", "reward.custom_reward_function.path"))


def test_reward_function_that_cannot_be_used(refused: Refused, tmp_path: Path) -> None:
    key = "reward.custom_reward_function.path"
    refused(f"{key}={tmp_path / 'reward.py'}", parts=(key, "no Python file"))
    (tmp_path / "reward.py").write_text("def score(solution_str):\n    return 1.0\n")
    refused(f"{key}={tmp_path / 'reward.py'}", parts=("compute_score", "it has: score"))


def test_overlong_prompts(refused: Refused) -> None:
    refused("data.max_prompt_length=4", parts=("row ", "data.max_prompt_length=4", "data.truncation=left|right|middle"))


def test_run_folder_of_another_run(refused: Refused, arguments: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    save_yaml(load_config(arguments), folder / "config.yaml")
    parts = (str(folder), "trainer.seed (1 there, 7 now)", "trainer.experiment_name")
    refused("trainer.seed=7", parts=parts)
    refused("trainer.resume=never", parts=(str(folder), "already holds a run", "trainer.resume=never"))
    (folder / "config.yaml").rename(folder / "notes.txt")
    refused(parts=(str(folder), "is not a run", "trainer.experiment_name"))


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_run_folder_that_cannot_be_written(refused: Refused, tmp_path: Path, dry_run: list[str]) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text("a file in the way")
    refused(*dry_run, parts=(str(tmp_path / "runs" / "mine"), "is a file", "trainer.experiment_name"))
    place = tmp_path / "file"
    place.write_text("another one")
    refused(
        *dry_run, f"trainer.default_local_dir={place}", parts=("trainer.default_local_dir", str(place), "is a file")
    )
    refused(*dry_run, f"trainer.default_local_dir={place}/deeper", parts=("trainer.default_local_dir", str(place)))


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
    for part in (f"{tmp_path}/runs/mine", "first prompt", "reward of a made-up response"):
        assert part in printed.out


def test_dry_run_prints_the_plan_where_gpus_are_missing(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    gpus = ["trainer.use_gpu=true", "trainer.gpus_per_worker=1", "trainer.num_workers=2"]
    monkeypatch.setattr("pipeline.plan.placement.local_node", lambda cpus: {"CPU": 8.0, "GPU": 0.0})
    monkeypatch.setattr("jobs.train.check_versions", lambda: None)
    assert main(["--dry-run", *arguments, *gpus]) == 0
    printed = capsys.readouterr().out
    assert "2 x 1 CPU + 1 GPU" in printed
    assert "this machine cannot run it: the run needs" in printed and "2 GPUs and this machine has 0" in printed


def test_a_wrong_file_is_refused_before_transformers_is_imported(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    code = (
        "import sys; from jobs.train import main\n"
        f"code = main({[*arguments, f'data.train_files={tmp_path}/broken.parquet']!r})\n"
        "print(code, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert "broken.parquet" in done.stderr


def test_help_of_the_command() -> None:
    """In a process of its own: neither Ray nor torch is needed for it, so it comes at once."""
    code = (
        "import sys; from jobs.train import main\n"
        "try: main(['--help'])\n"
        "finally: print('loaded:', [name for name in ('ray', 'torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for part in ("--dry-run", "--config-dir", "experiment=countdown_cpu", "docs/configuration.md", "loaded: []"):
        assert part in done.stdout
