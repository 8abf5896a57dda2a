"""`python -m jobs.dpo`: refusals, help, and whole runs on a local Ray."""

import importlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs import dpo as job
from pipeline.config import ConfigError, load
from pipeline.config.preference import DPOConfig
from pipeline.config.schema import keys
from pipeline.storage.owner import of_folder, owned
from tests.folders import configured, copied
from tests.jobs.test_reward_model import write


def config(model: Path, files: Path, out: Path, *more: str) -> DPOConfig:
    start = [f"out={out}", f"model.path={model}", f"data.train_files={files}", "data.train_batch_size=16"]
    return load(DPOConfig, [*start, "optim.lr=2e-3", "trainer.logger=[console]", *more], "dpo")


def test_check_names_every_problem() -> None:
    options = ["loss.type=kto", "loss.beta=0", "data.max_length=9000", "data.truncation=right"]
    with pytest.raises(ConfigError) as caught:
        job.check(load(DPOConfig, options, "dpo"))
    for part in (
        "out is not set",
        "loss.type=kto was removed; take sigmoid or ipo, or write the loss as package.module:function",
        "loss.beta=0 must be above 0",
        "2 x data.max_length=9000 tokens, more than trainer.max_token_len_per_gpu=16384",
        "data.truncation=right must be one of error, left, drop",
    ):
        assert part in str(caught.value)


def test_command_line_refusals(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path / "a.parquet", range(4))
    start = [f"out={tmp_path / 'out'}", f"model.path={tiny_model}", f"data.train_files={files}"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    cases = {
        "is a BertForMaskedLM by its config.json; give a causal": [f"model.path={other}", "data.train_batch_size=2"],
        "did you mean loss.beta?": ["loss.betta=1"],
        "loss.type 'dpo' is unknown. Did you mean": ["loss.type=dpo", "data.train_batch_size=2"],
        "a.parquet has no column 'better', but prompt, chosen, rejected; name it": ["data.chosen_key=better"],
        "the key data.margin_key no longer exists: only jobs.reward_model reads margins": ["data.margin_key=lead"],
        "the key loss.rpo_alpha no longer exists: it was removed; write a loss of your own": ["loss.rpo_alpha=1"],
        "holds 4 rows, less than one data.train_batch_size=8": ["data.train_batch_size=8"],
        "loss.type=kto was removed": ["loss.type=kto", "data.train_batch_size=2"],
        "model.path": ["data.train_batch_size=2", "model.path=./missing"],
        f"{other} is not empty and holds no config.yaml, so it is not a run; choose another out": [f"out={other}"],
        f"out: {tiny_model} is {tiny_model}, which is read": [f"out={tiny_model}"],
        f"lies in {tiny_model}, which is read": [f"out={tiny_model}/tuned"],
    }
    for sentence, options in cases.items():
        assert job.main([*start, *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("python -m jobs.dpo: ") and sentence in error.replace(f"{Path.cwd()}/", ""), error
    assert not (tmp_path / "out").exists()
    assert [path.name for path in other.iterdir()] == ["config.json"]
    with owned([of_folder(tmp_path / "out")], print):
        assert job.main([*start, "data.train_batch_size=2"]) == 2
    assert f"the folder {tmp_path / 'out'} is in use by process" in capsys.readouterr().err


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert job.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "python -m jobs.dpo out=" in text and "  loss.type=sigmoid\n" in text
    assert all(f"  {name}=" in text for name in keys(DPOConfig))


def rewards(start: Path, model: Path, rows: list[dict[str, Any]], beta: float) -> torch.Tensor:
    """[R, 2] rewards of both sides of the rows, by `transformers` alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (model, start))
    found = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        for side in ("chosen", "rejected"):
            text = tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
            ids = torch.tensor(ids[:end])
            with torch.no_grad():
                sums = [
                    lm(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                    .gather(-1, ids[len(prompt) :, None]).sum()
                    for lm in (policy, reference)
                ]  # fmt: skip
            found.append(beta * (sums[0] - sums[1]))
    return torch.stack(found).reshape(-1, 2)


@pytest.mark.ray
@pytest.mark.long
def test_two_workers_learn_a_preference_over_epochs(tmp_path: Path, tiny_model: Path, ray_session: None) -> None:
    # 40 rows in batches of 16: batches cross the ends of epochs, and one epoch is no whole number of them.
    train, val = write(tmp_path / "train.parquet", range(40)), write(tmp_path / "val.parquet", range(200, 231))
    out = tmp_path / "out"
    more = ["trainer.num_workers=2", "trainer.total_training_steps=12", "trainer.max_token_len_per_gpu=300"]
    metrics = job.run(config(tiny_model, train, out, f"data.val_files={val}", *more, "data.max_length=150"))
    assert metrics["step"] == 12 and metrics["dropped"] == 0
    assert metrics["val_rewards/accuracies"] > 0.9 and metrics["val_loss"] < 0.6
    # What is reported is what the saved model gives by `transformers` alone.
    found = rewards(tiny_model, out, pq.read_table(val).to_pylist(), beta=0.1)
    lead = found[:, 0] - found[:, 1]
    for name, want in {
        "loss": -torch.nn.functional.logsigmoid(lead).mean(),
        "rewards/chosen": found[:, 0].mean(),
        "rewards/rejected": found[:, 1].mean(),
        "rewards/margins": lead.mean(),
        "rewards/accuracies": (lead > 0).float().mean(),
    }.items():
        assert metrics[f"val_{name}"] == pytest.approx(want.item(), rel=1e-3, abs=1e-5), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "train.parquet", "val.parquet"]


def test_a_model_that_cannot_be_trained_is_refused_before_the_start(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write(tmp_path / "pairs.parquet", range(16))
    few = configured(copied(tiny_model, tmp_path / "few"), quantization_config={"quant_method": "fp8"})
    narrow = configured(copied(tiny_model, tmp_path / "narrow"), vocab_size=100)
    short = configured(copied(tiny_model, tmp_path / "short"), max_position_embeddings=64)
    cases = {
        few: "model.path={} has quantised weights: fp8",
        narrow: "the embedding of model.path={} has 100 rows",
        short: "is more than the 64 tokens of model.path={} (max_position_embeddings)",
    }
    for command in ("sft", "dpo", "reward_model"):
        main = importlib.import_module(f"jobs.{command}").main
        for folder, part in cases.items():
            start = [f"out={tmp_path / 'out'}", f"model.path={folder}", f"data.train_files={files}"]
            if command == "sft":
                start.append("data.messages_key=chosen")
            assert main([*start, "data.train_batch_size=16"]) == 2
            assert part.format(folder) in capsys.readouterr().err, command
