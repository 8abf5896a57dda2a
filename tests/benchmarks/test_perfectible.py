"""The check on prompts that can be learned: its choice of prompts, its runs, and what a second command does."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import perfectible
from benchmarks.perfectible import ROWS, accuracies, chosen, folder_name, new_parser, outcome_of, training
from pipeline.config import load_config
from pipeline.evaluate.summary import COLUMNS
from pipeline.plan.checks import check

SAMPLES = 4


def write_responses(folder: Path, right: list[int], error: str | None = None) -> None:
    """An evaluation whose prompt k has `right[k]` right ones of `SAMPLES` responses."""
    (folder / "responses").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for number, count in enumerate(right):
        for sample in range(SAMPLES):
            acc = int(sample < count)
            own = {"uid": f"val-{number}", "score": 1.0 if acc else 0.1, "reward_parts": json.dumps({"acc": acc})}
            rows.append(
                dict.fromkeys(COLUMNS) | {"data_source": "countdown", "response": "", "reward_error": error} | own
            )
    schema = pa.schema([(name, pa.float64() if name == "score" else pa.string()) for name in COLUMNS])
    for part, some in enumerate((rows[: 2 * SAMPLES], rows[2 * SAMPLES :])):
        pq.write_table(pa.Table.from_pylist(some, schema=schema), folder / "responses" / f"part-{part:06d}.parquet")


def test_a_prompt_is_judged_by_its_right_samples(tmp_path: Path) -> None:
    write_responses(tmp_path, [0, 1, 2, 3, 4])
    solved = accuracies(tmp_path)
    assert solved == {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    assert chosen(solved, 0.2, 0.8, 9, 1) == [1, 2, 3] and chosen(solved, 0.25, 0.75, 9, 1) == [1, 2, 3]
    assert chosen(solved, 0.2, 0.8, 2, 1) == [1, 2] and chosen(solved, 0.2, 0.8, 9, 2) == [1, 2]
    found = outcome_of("grpo", solved, 80, 60.0, 1e-5)
    assert (found.accuracy, found.lost, found.always) == (0.5, 1, 1)
    with pytest.raises(ValueError, match="3 of 5 prompts are solved in 20% to 80% of the samples, but at least 4"):
        chosen(solved, 0.2, 0.8, 9, 4)


def test_bounds_are_included_although_fractions_are_not_exact() -> None:
    assert chosen({0: 8 / 40, 1: 32 / 40, 2: 7 / 40, 3: 33 / 40}, 0.2, 0.8, 9, 1) == [0, 1]
    assert chosen({0: 0.1 + 0.1, 1: 0.1 * 3 - 0.1 * 1}, 0.2, 0.8, 9, 1) == [0, 1]


def test_a_failed_reward_and_a_missing_evaluation_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no responses"):
        accuracies(tmp_path / "none")
    write_responses(tmp_path / "failed", [1, 1, 1], error="no truth")
    with pytest.raises(ValueError, match="the reward failed for a response to prompt val-0"):
        accuracies(tmp_path / "failed")


@pytest.mark.parametrize("experiment", ["countdown_cpu", "sums_cpu"])
@pytest.mark.parametrize("row", [*ROWS, "grpo actor.kl_loss_coef=0.05 rollout.n=32"])
def test_each_row_is_a_sound_run_with_all_prompts_in_a_batch(row: str, experiment: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"number": list(range(64))}), prompts)
    command = ["--out", str(tmp_path), "--iterations", "7", "--experiment", experiment, "--", "rollout.n=16"]
    args = new_parser().parse_args(command)
    config = load_config(training(args, tmp_path / "model", prompts, row, tmp_path / folder_name(row)))
    config.model.path = "org/model"
    check(config)
    assert config.data.train_batch_size == 64 and config.trainer.total_training_steps == 7
    # Settings of the row are laid over the common ones.
    assert config.rollout.n == (32 if " " in row else 16)


def test_episodes_keep_the_settings_of_their_experiment(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"number": list(range(48))}), prompts)
    args = new_parser().parse_args(["--out", str(tmp_path), "--experiment", "higher_lower_cpu", "--chunk", "4"])
    row = "turn_grpo algorithm.turn_gamma=0.5 algorithm.norm_adv_by_std_in_grpo=false"
    config = load_config(training(args, tmp_path / "model", prompts, row, tmp_path / "run"))
    own = load_config(["experiment=higher_lower_cpu"])
    assert config.algorithm == own.algorithm and config.agent == own.agent


def test_names_of_rows_differ() -> None:
    rows = ["grpo", "dapo", "grpo rollout.n=8", "grpo rollout.n=16"]
    assert len({folder_name(row) for row in rows}) == 4 and folder_name("grpo") == "grpo"


def test_a_second_command_runs_only_the_missing_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []

    def call(command: list[str], *_: Any, **__: Any) -> None:
        given = dict(word.split("=", 1) for word in command if "=" in word)
        if command[2] == "jobs.train":
            trained.append(given["algorithm"])
            folder = Path(given["trainer.default_local_dir"]) / given["trainer.experiment_name"]
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").write_text('{"iteration": 3, "elapsed_s": 60.0}\n')
            return
        out = Path(command[command.index("--out") + 1])
        if not out.exists():
            right = [2] * 32 if out.name == "scored" else [4] * 31 + [4 if "dapo" in out.name else 0]
            write_responses(out, right)

    monkeypatch.setattr(perfectible, "call", call)
    prompts = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"number": list(range(40))}), prompts)
    command = ["--out", str(tmp_path / "out"), "--model", str(tmp_path), "--prompts", str(prompts), "--rows"]
    assert perfectible.main([*command, "grpo", "dapo"]) == 0 and trained == ["grpo", "dapo"]
    assert pq.read_table(tmp_path / "out" / "perfectible.parquet")["number"].to_pylist() == list(range(32))
    assert perfectible.main([*command, "grpo", "dapo", "rloo"]) == 0 and trained == ["grpo", "dapo", "rloo"]
    assert "1.000 *" in (tmp_path / "out" / "table.txt").read_text()
    # The prompts are chosen by the settings, so other ones need another folder.
    assert perfectible.main([*command, "grpo", "--least", "0.3"]) == 2
    assert "choose another --out" in capsys.readouterr().err
