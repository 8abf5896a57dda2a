"""`python -m jobs.evaluate`: what it refuses and shows before anything starts, and a run's own validation again."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from jobs.evaluate import main
from pipeline.evaluate.folder import FILES
from pipeline.storage.owner import of_folder, owned
from pipeline.track.trajectories import read_trajectories
from tests.runs import Training, score

Refused = Callable[..., str]

LONG = 12
"""Prompts of an evaluation that takes a while."""


@pytest.fixture
def arguments(tiny_model: Path, prompt_files: Any, tmp_path: Path) -> list[str]:
    """An evaluation that could be started."""
    return [
        f"model.path={tiny_model}",
        f"data.val_files={prompt_files.val}",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        "rollout.chunk_prompts=2",
        "trainer.ray_num_cpus=8",
        "--out",
        str(tmp_path / "out"),
    ]


@pytest.fixture
def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Evaluate with further settings; the one sentence on stderr, after checking that nothing else came of it."""

    def run(*settings: str, parts: tuple[str, ...]) -> str:
        code = main([*arguments, *settings])
        printed = capsys.readouterr()
        assert code == 2, printed
        assert printed.out == ""
        sentence = printed.err.strip()
        assert sentence.startswith("error: ") and "Traceback" not in sentence and len(sentence.splitlines()) == 1
        for part in parts:
            assert part in sentence, sentence
        assert not (tmp_path / "out" / "responses").exists()
        return sentence

    return run


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["data.val_files=null"], ("data.val_files is not set", "data.val_files=FILES")),
        (["model.path=models/nowhere"], ("model.path=models/nowhere", "does not exist")),
        (["rollout.val_kwargs.n=2"], ("rollout.val_kwargs.n=2", "temperature=0")),
        (["--k", "1,2"], ("--k 1,2", "rollout.val_kwargs.n=1")),
        (["trainer.ray_num_cpus=1"], ("rollout.num_engines", "trainer.ray_num_cpus=1")),
        (["--run", "nowhere"], ("nowhere", "holds no config.yaml")),
    ],
)
def test_what_cannot_be_evaluated(refused: Refused, settings: list[str], parts: tuple[str, ...]) -> None:
    refused(*settings, parts=parts)


def test_rewards_that_cannot_be_given(refused: Refused, prompt_files: Any, tmp_path: Path) -> None:
    rows = pq.read_table(prompt_files.val).to_pylist()
    rows[3]["data_source"] = "riddles"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "other.parquet")
    parts = ("'riddles'", "countdown", "reward.custom_reward_function.path")
    refused(f"data.val_files={tmp_path / 'other.parquet'}", parts=parts)
    (tmp_path / "reward.py").write_text("def compute_score(**row):\n    raise KeyError('gold')\n")
    key = "reward.custom_reward_function.path"
    refused(f"{key}={tmp_path / 'reward.py'}", parts=("KeyError", "'countdown'", "made-up response"))


def test_episodes_that_all_fail(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(
        "from pipeline.agent import Environment\n\n\nclass Game(Environment):\n    def reset(self, row, seed):\n"
        "        return row['nothing']\n"
    )
    parts = ("fails for each of the first 4 prompts", "KeyError: 'nothing' (game.py, line 6)")
    refused(f"agent.environment={tmp_path}/game.py:Game", parts=parts)


def test_a_folder_of_another_evaluation(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    other = {"prompt_files": [], "settings": {}, "files": dict.fromkeys(FILES, {})}
    (tmp_path / "out" / "evaluation.json").write_text(json.dumps(other))
    refused(parts=(str(tmp_path / "out"), "already holds another evaluation", "model.path", "choose another --out"))


def test_a_folder_that_another_process_fills(refused: Refused, tmp_path: Path) -> None:
    with owned([of_folder(tmp_path / "out")], print):
        refused(parts=(f"the folder {tmp_path / 'out'} is in use by process",))
    assert not list(tmp_path.iterdir())


def test_dry_run_prints_what_would_be_done_and_writes_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    more = ["rollout.val_kwargs.n=6", "rollout.val_kwargs.temperature=0.7"]
    assert main([*arguments[:2], "--dry-run", *arguments[2:], *more]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for part in ("7 of ", "6 to each prompt, temperature 0.7", "1, 2, 4, 6", "4 of 2 prompts, 0 of them done"):
        assert part in printed, printed
    assert str(tmp_path / "out") in printed and not (tmp_path / "out").exists()
    monkeypatch.chdir(tmp_path)
    assert main([*arguments[:-2], "--dry-run"]) == 0
    assert "evaluations/model/val-" in capsys.readouterr().out and not (tmp_path / "evaluations").exists()


def with_engine(test: Any) -> Any:
    for mark in (pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)):
        test = mark(test)
    return pytest.mark.usefixtures("stream_context")(test)


def read(out: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted((out / "responses").glob("*.parquet"))])


@with_engine
def test_agrees_with_the_last_validation_of_the_run(
    training: Training, capsys: pytest.CaptureFixture[str], prompt_files: Any
) -> None:
    trained, last = training.continued, training.last + 1
    assert main(["--run", str(trained.folder)]) == 0
    printed = capsys.readouterr().out
    (out,) = (trained.folder / "evaluations").iterdir()
    ours, theirs = read(out), read_trajectories(str(trained.folder), last, "val").sort_by("offset")
    assert ours["uid"].to_pylist() == theirs["uid"].to_pylist() and len(ours) == prompt_files.val_rows
    for column in ("prompt_ids", "response_ids", "response", "score", "reward_parts", "finish_reason"):
        assert ours[column].to_pylist() == theirs[column].to_pylist(), column
    result = json.loads((out / "metrics.json").read_text())
    validated = trained.records[last]["val-core/countdown/reward/mean@1"]
    assert 0 < validated < 1
    assert result["all"]["mean"] == result["sources"]["countdown"]["pass@1"] == pytest.approx(validated, abs=1e-9)
    assert (result["complete"], result["iteration"], result["left_out"]) == (True, last, 0)
    assert result["tokens_per_s"] > 0
    with (out / "table.csv").open() as file:
        assert [row["mean"] for row in csv.DictReader(file)] == [str(result["all"]["mean"])]
    for part in ("countdown", f"{validated:.4f}", "trained on val: finished", "mlflow ui"):
        assert part in printed, printed

    model = AutoModelForCausalLM.from_pretrained(trained.folder / "model")
    assert score(model, ours) < 1e-4, "the engine has the weights of the folder"

    before = [path.stat().st_mtime_ns for path in sorted((out / "responses").iterdir())]
    with patch("pipeline.evaluate.run.generate") as started:
        assert main(["--run", str(trained.folder), "--k", "1"]) == 0
    started.assert_not_called()
    assert "finished" in capsys.readouterr().out
    assert [path.stat().st_mtime_ns for path in sorted((out / "responses").iterdir())] == before


@with_engine
@pytest.mark.long
def test_samples_are_those_of_training_prompts_that_are_validated(
    training: Training, prompt_files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several responses, another file, failing rewards: 8 of 40 prompts cannot be scored."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, extra_info, **row):\n"
        "    if extra_info['index'] % 5 == 0:\n"
        "        raise ArithmeticError('no score')\n"
        "    return {'score': 0.5, 'acc': len(solution_str) % 2, 'pred': len(solution_str) % 3}\n"
    )
    changes = [
        f"data.val_files={prompt_files.train}",
        "rollout.val_kwargs.n=4",
        "rollout.val_kwargs.temperature=1",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.logger=[console]",
    ]
    command = ["--run", str(training.continued.folder), "--out", str(tmp_path / "out"), *changes]
    code = main([*command, "--k", "1,3"])
    printed = capsys.readouterr()
    assert code == 1 and "the reward failed for 20.0% of the responses" in printed.err, printed
    assert "ArithmeticError: no score" in printed.err
    rows, result = read(tmp_path / "out").to_pylist(), json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert len(rows) == 160 and len({tuple(row["response_ids"]) for row in rows}) > 40
    assert [row["sample"] for row in rows[:5]] == [0, 1, 2, 3, 0]
    source = result["sources"]["countdown"]
    assert source["judged_by"] == "acc" and source["error_rate"] == 0.2 and source["score/mean"] == 0.5
    right = [json.loads(row["reward_parts"])["acc"] for row in rows if row["reward_error"] is None]
    assert source["mean"] == pytest.approx(sum(right) / 128) and source["mean"] < source["pass@3"] < 1
    assert {"maj@1", "maj@3"} <= source.keys() and "pass@2" not in source
    assert not (tmp_path / "out" / "mlflow_run_id").exists()
    code = main([*command, "rollout.val_kwargs.n=3"])
    assert code == 2 and "rollout.val_kwargs.n (4 there, 3 now)" in capsys.readouterr().err


def long(prompt_files: Any) -> list[str]:
    return [
        f"data.val_files={prompt_files.train}",
        "data.max_response_length=1024",
        "rollout.ignore_eos=true",
        f"data.val_max_samples={LONG}",
        "rollout.val_kwargs.n=4",
        "rollout.val_kwargs.temperature=1",
        "rollout.chunk_prompts=1",
        "rollout.max_num_seqs=4",
        "rollout.chunks_in_flight=1",
        "rollout.enforce_eager=true",
        "rollout.dtype=float32",
        "trainer.logger=[console]",
    ]


@with_engine
@pytest.mark.long
def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    arguments: list[str], prompt_files: Any, tmp_path: Path, ray_session: None
) -> None:
    command = [sys.executable, "-m", "jobs.evaluate", *arguments, *long(prompt_files)]
    folder, deadline = tmp_path / "out" / "responses", time.monotonic() + 240
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            while not list(folder.glob("*.parquet")):
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline, "no part within the deadline"
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            printed, _ = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, printed
    assert "model on train: interrupted" in printed and "to continue" in printed and "Traceback" not in printed, printed
    done = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert 0 < len(done) < LONG
    result = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (result["complete"], result["all"]["prompts"]) == (False, len(done))

    assert main([*arguments, *long(prompt_files)]) == 0
    assert {name: (folder / name).stat().st_mtime_ns for name in done} == done
    rows = read(tmp_path / "out")
    assert rows["uid"].to_pylist() == [f"val-{i}" for i in range(LONG) for _ in range(4)]
    assert set(rows["finish_reason"].to_pylist()) == {"length"}
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["complete"]
