"""`python -m jobs.reward_model`: refusals, help, and whole runs on a local Ray."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from jobs import reward_model as job
from jobs.prepare import hh_rlhf
from pipeline.config import ConfigError, load
from pipeline.config.model import ModelConfig
from pipeline.config.schema import keys
from pipeline.config.supervised import PreferenceConfig
from pipeline.models.reward_model import load_reward_model


def pair(i: int) -> dict[str, Any]:
    """Prefers sums to differences, whatever the numbers are and which of the answers is longer."""
    sides = [f"<answer> {i} {sign} {i + 1}{' ' * (i % 3 * place)} </answer>" for place, sign in enumerate("+-")]
    prompt = [{"role": "user", "content": f"Numbers: {i} {i + 1}."}]
    return {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": sides[0]}],
        "rejected": [{"role": "assistant", "content": sides[1]}],
    }


def write(path: Path, numbers: range) -> Path:
    pq.write_table(pa.Table.from_pylist([pair(i) for i in numbers], schema=hh_rlhf.PAIRS), path, row_group_size=50)
    return path


def config(model: Path, files: Path, out: Path, *more: str) -> PreferenceConfig:
    start = [f"out={out}", f"model.path={model}", f"data.train_files={files}", "data.train_batch_size=16"]
    return load(PreferenceConfig, [*start, "optim.lr=2e-3", "trainer.logger=[console]", *more], "reward_model")


def test_check_names_every_problem() -> None:
    options = ["data.train_batch_size=10", "trainer.num_workers=3", "data.max_length=9000", "data.truncation=right"]
    with pytest.raises(ConfigError) as caught:
        job.check(load(PreferenceConfig, options, "reward_model"))
    for part in (
        "out is not set",
        "10 / 3 leaves 1 rows",
        "2 x data.max_length=9000 tokens, more than trainer.max_token_len_per_gpu=16384",
        "data.truncation=right must be one of error, left, drop",
    ):
        assert part in str(caught.value)


def test_command_line_refusals(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path / "a.parquet", range(4))
    start = [f"out={tmp_path / 'out'}", f"model.path={tiny_model}", f"data.train_files={files}"]
    cases = {
        "did you mean data.chosen_key?": ["data.chosen=x"],
        "a.parquet has no column 'better', but prompt, chosen, rejected; name it": ["data.chosen_key=better"],
        "holds 4 rows, less than one data.train_batch_size=8": ["data.train_batch_size=8"],
        "data.val_files: nowhere": ["data.val_files=nowhere.parquet"],
        "model.path": ["data.train_batch_size=2", "model.path=./missing"],
    }
    for sentence, options in cases.items():
        assert job.main([*start, *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("python -m jobs.reward_model: ") and sentence in error.replace(f"{Path.cwd()}/", "")
    assert not (tmp_path / "out").exists()


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert job.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "python -m jobs.reward_model out=" in text and "  data.truncation=error\n" in text
    assert all(f"  {name}=" in text for name in keys(PreferenceConfig))


@pytest.mark.ray
@pytest.mark.long
def test_two_workers_learn_a_preference(tmp_path: Path, tiny_model: Path, ray_session: None) -> None:
    train, val = write(tmp_path / "train.parquet", range(200)), write(tmp_path / "val.parquet", range(200, 231))
    out = tmp_path / "out"
    more = ["trainer.num_workers=2", "trainer.total_training_steps=12", "trainer.max_token_len_per_gpu=300"]
    metrics = job.run(config(tiny_model, train, out, f"data.val_files={val}", *more, "data.max_length=150"))
    assert metrics["step"] == 12 and metrics["dropped"] == 0
    assert metrics["val_accuracy"] > 0.9 and metrics["val_loss"] < 0.5

    # What is reported is what the saved model gives, to us and to `transformers` alone.
    theirs, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(out).eval(),
        AutoTokenizer.from_pretrained(out),
    )
    ours, rewards = load_reward_model(ModelConfig(path=str(out))).eval(), []
    with torch.no_grad():
        for row in pq.read_table(val).to_pylist():
            for side in ("chosen", "rejected"):
                ids = tokenizer.apply_chat_template([*row["prompt"], *row[side]], return_tensors="pt")["input_ids"]
                rewards.append(ours(ids, torch.tensor([ids.shape[1]])))
                torch.testing.assert_close(rewards[-1], theirs(input_ids=ids).logits[0])
    chosen, rejected = torch.cat(rewards).reshape(-1, 2).T
    lead = chosen - rejected
    for name, want in {
        "loss": -torch.nn.functional.logsigmoid(lead).mean(),
        "accuracy": (lead > 0).float().mean(),
        "margin": lead.mean(),
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
    }.items():
        assert metrics[f"val_{name}"] == pytest.approx(want.item(), rel=1e-3, abs=1e-5), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "train.parquet", "val.parquet"]
