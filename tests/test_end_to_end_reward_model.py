"""From preferences to a reward model to a policy that follows it: three commands, everything real but the tiny models.

Preferred is the response with the larger share of digits among its characters, of two that are drawn at random. The
reward model learns from pairs alone, and PPO from its numbers alone.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from jobs.reward_model import main as train_reward_model
from pipeline.track.trajectories import read_trajectories
from tests.runs import TWO, Run, starter, tiny_settings

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

PAIRS, TOKENS, ITERATIONS = 2000, 12, 20
PPO = (
    *("algorithm=ppo", "data.train_batch_size=32", "rollout.n=4", "rollout.chunk_prompts=8", "actor.optim.lr=5e-3"),
    *("critic.optim.lr=1e-2", f"trainer.total_training_steps={ITERATIONS}", "trainer.save_freq=-1"),
    *("trainer.val_before_train=true", "trainer.test_freq=-1"),
)


def digits(text: str) -> float:
    """Share of digits among the characters."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def write_pairs(path: Path, model: Path, count: int, seed: int) -> None:
    rng, tokenizer = np.random.default_rng(seed), AutoTokenizer.from_pretrained(model)
    rows = []
    while len(rows) < count:
        texts = tokenizer.batch_decode(rng.integers(0, len(tokenizer), (2, TOKENS)), skip_special_tokens=True)
        worse, better = sorted(texts, key=digits)
        if digits(better) > digits(worse):
            target = rng.integers(1, 99)
            rows.append(
                {
                    "prompt": [{"role": "user", "content": f"Reach {target}."}],
                    "chosen": [{"role": "assistant", "content": better}],
                    "rejected": [{"role": "assistant", "content": worse}],
                }
            )
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=500)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, ray_session: None) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    write_pairs(folder / "train.parquet", tiny_model, PAIRS, seed=1)
    arguments = [f"out={folder / 'model'}", f"model.path={tiny_model}", f"data.train_files={folder / 'train.parquet'}"]
    arguments += ["data.train_batch_size=50", "trainer.total_epochs=3", "optim.lr=5e-3", *TWO]
    assert train_reward_model(arguments) == 0
    return folder / "model"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, prompt_files: Any, judge: Path) -> Run:
    settings = tiny_settings(tmp_path_factory.mktemp("judged"), tiny_model, prompt_files)
    settings = [setting for setting in settings if not setting.startswith("reward.")]
    return starter(settings)("judged", *PPO, *TWO, f"reward.model.path={judge}")


def test_ppo_raises_the_reward_and_what_was_preferred(run: Run) -> None:
    scores = [run.records[iteration]["critic/score/mean"] for iteration in range(1, ITERATIONS + 1)]
    spread = np.std(read_trajectories(str(run.folder), 1)["score"].to_numpy())
    assert np.mean(scores[-3:]) > np.mean(scores[:3]) + 0.5 * spread, scores
    shares = [
        np.mean([digits(text) for text in read_trajectories(str(run.folder), iteration)["response"].to_pylist()])
        for iteration in (1, ITERATIONS)
    ]
    assert shares[1] > 1.5 * shares[0], shares


def test_every_row_has_the_models_number(run: Run) -> None:
    rows = read_trajectories(str(run.folder), 2)
    assert rows["rm_error"].null_count == rows["reward_error"].null_count == len(rows) == 128
    assert rows["score"].to_pylist() == rows["rm_score"].to_pylist()
    assert [json.loads(parts) for parts in rows["reward_parts"].to_pylist()[:3]] == [
        {"rm_score": number} for number in rows["rm_score"].to_pylist()[:3]
    ]
    assert run.records[2]["reward/error_rate"] == 0.0
    assert run.records[2]["reward/rm_score/mean"] == pytest.approx(run.records[2]["critic/score/mean"], abs=1e-5)


def test_validation_is_scored_too(run: Run) -> None:
    first, last = (run.records[version]["val-core/countdown/reward/mean@1"] for version in (0, ITERATIONS))
    assert last > first
