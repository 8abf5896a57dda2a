"""Sharding over real gloo process groups: ranks change neither loss nor gradients nor what is saved."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from pipeline.config.learner import FSDPConfig, OptimConfig
from pipeline.config.model import ModelConfig
from pipeline.models.fsdp import clip_grad_norm, full_state_dict, save_hf, shard, transformer_blocks
from pipeline.models.policy import Policy, load_policy
from pipeline.train.optim import build_optimizer


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def tiny(tie: bool) -> Qwen2ForCausalLM:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tie,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def train(rank: int, world: int, folder: str, options: dict[str, Any]) -> None:
    """One rank: two optimiser steps on its share of four rows; rank 0 leaves losses, norms and weights behind."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    policy = load_policy(ModelConfig(path=f"{folder}/initial", enable_gradient_checkpointing=options["checkpointing"]))
    shard(policy, FSDPConfig(reshard_after_forward=options["reshard"]), "cpu")
    optimizer = build_optimizer(policy, OptimConfig(lr=1e-2))
    ids = torch.randint(1, 40, (4, 7), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(6)
    result: dict[str, Any] = {"loss": [], "norm": []}
    for _ in range(2):
        total = torch.zeros(())
        for row in range(rank, 4, world):  # one row per micro-batch
            log_probs, _ = policy(ids[row : row + 1], positions, ids[row, 1:], chunk_tokens=4)
            loss = -log_probs.sum() / 24
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        result["loss"].append(float(total))
        result["norm"].append(clip_grad_norm(policy.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    state = full_state_dict(policy)
    assert bool(state) == (rank == 0)
    save_hf(policy, NoTokenizer(), f"{folder}/saved")
    if rank == 0:
        torch.save({**result, "state": state}, f"{folder}/result.pt")
    dist.destroy_process_group()


def run(folder: Path, world: int, tie: bool, reshard: bool = True, checkpointing: bool = False) -> dict[str, Any]:
    folder.mkdir()
    tiny(tie).save_pretrained(folder / "initial")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = {"reshard": reshard, "checkpointing": checkpointing}
    context = mp.spawn(train, args=(world, str(folder), options), nprocs=world, join=False)
    deadline = time.monotonic() + 120
    while not context.join(timeout=1):
        assert time.monotonic() < deadline, f"{world} ranks did not finish within 120 s"
    return torch.load(folder / "result.pt", weights_only=True)


@pytest.mark.parametrize("tie", [True, False])
def test_one_and_two_ranks_agree(tmp_path: Path, tie: bool) -> None:
    one = run(tmp_path / "1", 1, tie)
    two = run(tmp_path / "2", 2, tie, reshard=not tie, checkpointing=tie)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert one["norm"] == pytest.approx(two["norm"], rel=1e-5)
    assert one["loss"][1] < one["loss"][0]
    for name, tensor in one["state"].items():
        torch.testing.assert_close(tensor, two["state"][name], atol=1e-5, rtol=1e-4)

    # The same without FSDP at all: the sum convention is the plain gradient.
    policy = Policy(tiny(tie))
    ids = torch.randint(1, 40, (4, 7), generator=torch.Generator().manual_seed(5))
    loss = policy.lm(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(two["loss"][0], rel=1e-5)
    assert clip_grad_norm(policy.parameters(), 1e9) == pytest.approx(two["norm"][0], rel=1e-5)

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "2" / "saved")
    assert saved.config.tie_word_embeddings == tie
    assert {n for n, _ in saved.named_parameters()} == {Policy.hf_name(n) for n in two["state"]}
    for name, tensor in two["state"].items():
        torch.testing.assert_close(dict(saved.named_parameters())[Policy.hf_name(name)].detach(), tensor)
    assert sorted(p.name for p in (tmp_path / "2").iterdir()) == ["initial", "result.pt", "saved", "store"]


def test_blocks_are_the_decoder_layers() -> None:
    policy = Policy(tiny(True))
    assert transformer_blocks(policy) == list(policy.lm.model.layers)
    for module in policy.modules():
        if hasattr(module, "_no_split_modules"):
            module._no_split_modules = None
    assert transformer_blocks(policy) == list(policy.lm.model.layers)
    assert transformer_blocks(torch.nn.Linear(1, 1)) == []


def test_clip_scales_to_the_bound_and_leaves_nonfinite_alone() -> None:
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_grad_norm([first, second], 1.0) == pytest.approx(5.0)
    torch.testing.assert_close(second.grad, torch.tensor([0.8]), atol=1e-5, rtol=0)
    assert clip_grad_norm(iter([first, second]), 2.0) == pytest.approx(1.0, rel=1e-5)
    torch.testing.assert_close(second.grad, torch.tensor([0.8]), atol=1e-5, rtol=0)
    second.grad = torch.tensor([float("nan")])
    assert str(clip_grad_norm([first, second], 1.0)) == "nan"
    assert first.grad[0] == pytest.approx(0.6, rel=1e-4)


def test_save_replaces_and_a_failed_save_leaves_the_old_folder(tmp_path: Path) -> None:
    policy, folder = Policy(tiny(True)), tmp_path / "model"
    save_hf(policy, NoTokenizer(), folder)
    (folder / "stale.txt").write_text("old")
    save_hf(policy, NoTokenizer(), folder)
    assert not (folder / "stale.txt").exists()

    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no space left on device")

    before = sorted(folder.iterdir())
    with pytest.raises(RuntimeError, match="no space left on device"):
        save_hf(policy, Broken(), folder)
    assert sorted(folder.iterdir()) == before and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_shard_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        shard(torch.nn.Linear(1, 1), FSDPConfig(), "cpu")
