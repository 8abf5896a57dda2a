"""The Bradley-Terry loss against a plain formula, and the train worker on one rank."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
import ray.train
import ray.train.torch
import torch
from transformers import AutoConfig, AutoTokenizer

from pipeline.config.supervised import PreferenceConfig
from pipeline.models.micro_batches import split_micro_batches
from pipeline.supervised.loop import Settings
from pipeline.supervised.preference import MEASURED, PreferenceLoop, bradley_terry, collate
from pipeline.supervised.preference_data import SCHEMA
from tests.models.test_reward_model import build, ragged, theirs

CHOSEN, REJECTED, MARGIN = [2.0, 0.5, -1.0], [1.0, 0.5, 3.0], [0.0, 0.25, 1.0]


def table(chosen: list[list[int]], rejected: list[list[int]], margin: list[float] | None = None) -> pa.Table:
    return pa.table([chosen, rejected, margin or [0.0] * len(chosen)], schema=SCHEMA)


def pairs(count: int = 7) -> pa.Table:
    lengths = [1 + (3 * i) % 8 for i in range(2 * count)]
    rows = ragged(lengths, seed=3)
    return table(rows[:count], rows[count:], [i / 4 for i in range(count)])


def test_loss_and_metrics_are_those_of_the_formula() -> None:
    rewards = [torch.tensor(side, requires_grad=True) for side in (CHOSEN, REJECTED)]
    sums = bradley_terry(*rewards, torch.tensor(MARGIN))
    both = list(zip(CHOSEN, REJECTED, MARGIN, strict=True))
    loss = sum(math.log(1 + math.exp(-(c - r - m))) for c, r, m in both)
    assert dict(zip(MEASURED, sums.tolist(), strict=True)) == pytest.approx(
        {"loss": loss, "accuracy": 1.5, "margin": -3.0, "chosen_reward": 1.5, "rejected_reward": 4.5}
    )
    sums[0].backward()
    slopes = [-1 / (1 + math.exp(c - r - m)) for c, r, m in both]
    assert rewards[0].grad.tolist() == pytest.approx(slopes)
    assert rewards[1].grad.tolist() == pytest.approx([-slope for slope in slopes])


def test_far_apart_rewards_stay_finite() -> None:
    far = torch.tensor([1e4], requires_grad=True)
    sums = bradley_terry(-far, far, torch.zeros(1))
    sums[0].backward()
    assert sums[0] == 2e4 and far.grad == 2


def test_collate_keeps_both_sides_of_a_pair_together() -> None:
    rows = table([[5, 6, 7], [], [8]], [[1, 2], [], [3, 4]], [0.5, 1.0, 2.0])
    ids, lengths, margin = collate(rows, [2, 0, 1])
    assert ids.tolist() == [[8, 0, 0], [5, 6, 7], [3, 4, 0], [1, 2, 0]]
    assert lengths.tolist() == [1, 3, 2, 2] and margin.tolist() == [2.0, 0.5]
    for index in ([], [1]):
        ids, lengths, margin = collate(rows, index)
        assert ids.tolist() == [[0], [0]] and lengths.tolist() == [1, 1] and margin.shape == (0,)


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """A reward model with random weights, and the tiny model's tokenizer."""
    build("qwen3").lm.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def worker(folder: Path, tables: list[pa.Table], **changes: Any) -> tuple[PreferenceLoop, list[dict[str, float]]]:
    """The only rank of a run over `tables`, one per step, and what it posts."""
    config = PreferenceConfig(out=str(folder.parent / "out"))
    config.model.path, config.data.train_batch_size, config.optim.lr = str(folder), len(tables[0]), 1e-2
    for name, value in changes.items():
        section = next(part for part in (config.data, config.trainer) if hasattr(part, name))
        setattr(section, name, value)
    posted: list[dict[str, float]] = []
    progress = SimpleNamespace(post=SimpleNamespace(remote=posted.append))
    shard = SimpleNamespace(iter_batches=lambda **_: iter(tables))
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    with (
        patch.object(ray.train, "get_context", return_value=context),
        patch.object(ray.train, "get_dataset_shard", return_value=shard),
        patch.object(ray.train.torch, "get_device", return_value=torch.device("cpu")),
    ):
        return PreferenceLoop(Settings(PreferenceLoop, config, len(tables), [], progress)), posted


def plain(rows: pa.Table) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss and its gradients, one conversation at a time, by the model itself."""
    model = build("qwen3").lm
    rewards = [theirs(model, [ids for ids in rows[side].to_pylist() if ids]) for side in ("chosen_ids", "rejected_ids")]
    margin = torch.tensor([m for m, ids in zip(rows["margin"].to_pylist(), rows[0].to_pylist(), strict=True) if ids])
    loss = torch.log1p(torch.exp(-(rewards[0] - rewards[1] - margin))).mean()
    loss.backward()
    return loss.detach(), {f"lm.{name}": p.grad for name, p in model.named_parameters()}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("budget", [16, 40, 4096])
def test_micro_batches_change_neither_loss_nor_gradients(folder: Path, budget: int) -> None:
    rows = pairs()
    loop, _ = worker(folder, [rows], max_token_len_per_gpu=budget, grad_clip=1e9)
    assert len(split_micro_batches(loop.lengths(rows), budget)) == {16: 7, 40: 3, 4096: 1}[budget]
    with patch.object(loop.optimizer, "step"):
        metrics = loop.step(rows)
    loss, grads = plain(rows)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5) and metrics["dropped"] == 0
    for name, parameter in loop.model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), grads[name], atol=1e-6, rtol=1e-4, msg=name)
    assert loop.validate(rows)["loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_pairs_left_out_are_counted_and_change_nothing(folder: Path) -> None:
    rows = pairs()
    chosen, rejected, margin = rows.to_pydict().values()
    chosen[1] = rejected[1] = chosen[4] = rejected[4] = []
    some, none = table(chosen, rejected, margin), table([[]] * 7, [[]] * 7)
    loop, _ = worker(folder, [some], grad_clip=1e9)
    with patch.object(loop.optimizer, "step"):
        metrics = loop.step(some)
        loss, grads = plain(some)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5) and metrics["dropped"] == 2
        for name, parameter in loop.model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), grads[name], atol=1e-6, rtol=1e-4, msg=name)
    before = loop.model.lm.score.weight.full_tensor().clone()
    metrics = loop.step(none)
    assert metrics == {"dropped": 9, "grad_norm": 0} and torch.equal(loop.model.lm.score.weight.full_tensor(), before)
    assert loop.validate(none) == {"dropped": 7}


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_saved_where_every_pair_was_left_out(folder: Path) -> None:
    loop, _ = worker(folder, [table([[]], [[]])], max_length=9)
    with patch("ray.get"), pytest.raises(RuntimeError, match="all pairs were left out: none fits .*max_length=9"):
        loop.run()
    assert not (folder.parent / "out").exists()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("ends_with_padding", [False, True])
def test_a_pad_token_is_saved_unless_conversations_end_with_it(folder: Path, ends_with_padding: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    last = tokenizer.pad_token_id if ends_with_padding else tokenizer.eos_token_id
    loop, posted = worker(folder, [table([[5, last], []], [[7, 8, last], []])])
    with patch("ray.get"):
        loop.run()
    assert posted[-1]["step"] == 1 and posted[-1]["dropped"] == 1 and posted[-1]["tokens_per_s"] > 0
    config = AutoConfig.from_pretrained(folder.parent / "out")
    assert config.pad_token_id == (None if ends_with_padding else tokenizer.pad_token_id) and config.num_labels == 1
    assert AutoTokenizer.from_pretrained(folder.parent / "out").chat_template == tokenizer.chat_template


@pytest.mark.usefixtures("one_rank")
def test_a_model_with_too_few_positions_is_refused(folder: Path) -> None:
    build("gpt2").lm.save_pretrained(folder)
    with pytest.raises(ValueError, match="data.max_length=25 is more than the 24 tokens that the model has positions"):
        worker(folder, [pairs()], max_length=25)
    worker(folder, [pairs()], max_length=24)
