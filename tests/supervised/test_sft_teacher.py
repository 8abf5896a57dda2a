"""Distillation on the answers of files."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from jobs import sft
from pipeline.config import load
from pipeline.config.supervised import SFTConfig
from pipeline.losses import distill_loss
from pipeline.models.mesh import make_mesh
from pipeline.models.policy import load_policy
from pipeline.supervised.sft import SFTLoop
from pipeline.supervised.sft_data import SCHEMA
from pipeline.track.history import read_history
from tests.scoring.test_reference import other_model

TOP = 6
ROWS = pa.Table.from_pylist(
    [
        {"input_ids": [5, 9, 30, 41, 7], "loss_mask": [0, 0, 1, 1, 1]},
        {"input_ids": [8, 12, 99], "loss_mask": [0, 1, 1]},
    ],
    schema=SCHEMA,
)


def loop_of(model: Path, teacher: Path, **settings: Any) -> SFTLoop:
    """A loop without Ray."""
    words = [f"model.path={model}", f"teacher.path={teacher}", f"teacher.distill_top_k={TOP}"]
    made = object.__new__(SFTLoop)
    made.config = load(SFTConfig, [*words, *(f"teacher.{key}={value}" for key, value in settings.items())], "sft")
    made.device, made.packed = torch.device("cpu"), True
    made.mesh = make_mesh(made.device)
    made.model = made.load()
    return made


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("weight", "beta"), [(1.0, 0.0), (0.3, 0.5)])
def test_the_loss_is_that_of_whole_logits(tiny_model: Path, tmp_path: Path, weight: float, beta: float) -> None:
    teacher = other_model(tmp_path / "teacher", 320)
    made = loop_of(tiny_model, teacher, weight=weight, distill_beta=beta)
    loss = made.sums(ROWS, [0, 1])
    loss.sum().backward()

    policy, frozen = load_policy(made.config.model), AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    wanted = torch.zeros(())
    for row in ROWS.to_pylist():
        ids = torch.tensor([row["input_ids"]])
        learnt = [place for place, on in enumerate(row["loss_mask"]) if on]
        own, theirs = (
            torch.log_softmax(logits[0, [place - 1 for place in learnt]].float(), -1)
            for logits in (policy.lm(ids).logits, frozen(ids).logits.detach())
        )
        top = theirs.topk(TOP, -1)
        nll = -own.gather(-1, ids[0, learnt][:, None]).sum()
        divergence = distill_loss(own.gather(-1, top.indices), top.values, beta).sum()
        wanted = wanted + weight * divergence + (1 - weight) * nll
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    theirs_by_name = dict(policy.named_parameters())
    for name, parameter in made.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, theirs_by_name[name].grad, atol=1e-5, rtol=1e-4)


def test_settings_without_a_teacher_and_another_vocabulary(tiny_model: Path, tmp_path: Path) -> None:
    def refusal(*words: str) -> str:
        config = load(SFTConfig, [f"model.path={tiny_model}", f"out={tmp_path}/out", *words], "sft")
        with pytest.raises(ValueError) as found:
            sft.check(config)
        return str(found.value)

    assert "teacher.weight=0.5 without a teacher; set teacher.path" in refusal("teacher.weight=0.5")
    other = other_model(tmp_path / "teacher", 77)
    assert "has a vocabulary of 77 tokens and model.path=" in refusal(f"teacher.path={other}")


@pytest.mark.ray
def test_a_run_learns_from_a_teacher(tiny_model: Path, tmp_path: Path, ray_session: None) -> None:
    """The divergence from the teacher falls; the answers by themselves are random."""
    teacher = other_model(tmp_path / "teacher", 320)
    for file in tiny_model.glob("*token*"):
        (teacher / file.name).write_bytes(file.read_bytes())
    answer = {"role": "assistant", "content": "A b."}
    rows = [[{"role": "user", "content": f"{number}?"}, answer] for number in range(8)]
    pq.write_table(pa.table({"messages": rows}), tmp_path / "rows.parquet")
    words = (
        *(f"out={tmp_path}/out", f"model.path={tiny_model}", f"teacher.path={teacher}", "trainer.num_workers=2"),
        *(f"data.train_files={tmp_path}/rows.parquet", "data.train_batch_size=8", "trainer.total_training_steps=8"),
        *("optim.lr=3e-3", "trainer.logger=[]"),
    )
    last = sft.run(load(SFTConfig, list(words), "sft"))
    losses = [record["loss"] for record in read_history(tmp_path / "out" / "metrics.jsonl")]
    assert len(losses) == 8 and 0 <= last["loss"] == losses[-1] < 0.8 * losses[0]
