"""Sharding over real gloo process groups: ranks change neither loss nor gradients nor what is saved."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DogeConfig, DogeForCausalLM, Qwen2Config, Qwen2ForCausalLM

from pipeline.config.learner import FSDPConfig, OptimConfig
from pipeline.config.model import ModelConfig
from pipeline.models.fsdp import clip_grad_norm, full_state_dict, save_hf, shard, transformer_blocks
from pipeline.models.policy import Policy, load_policy
from pipeline.train.optim import build_optimizer
from tests.train.updates import spawn, worlds


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


def train(rank: int, folder: str) -> None:
    """Tied and untied models on one rank and on two."""
    for world in worlds(rank, folder):
        for tie in (True, False):
            train_one(Path(folder) / f"{tie}", world, tie)


def train_one(folder: Path, world: int, tie: bool) -> None:
    """Two optimiser steps on this rank's share of four rows; rank 0 leaves losses, norms and weights behind."""
    rank = dist.get_rank()
    checkpointing, reshard = (tie, not tie) if world == 2 else (False, True)
    policy = load_policy(ModelConfig(path=str(folder / "initial"), enable_gradient_checkpointing=checkpointing))
    shard(policy, FSDPConfig(reshard_after_forward=reshard), "cpu")
    optimizer = build_optimizer(policy, OptimConfig(lr=1e-2))
    ids = torch.randint(1, 40, (4, 7), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(6)
    result: dict[str, Any] = {"loss": [], "norm": [], "embedding is sharded": []}

    def watch(*_: Any) -> None:
        result["embedding is sharded"].append(isinstance(policy.lm.get_input_embeddings().weight, DTensor))

    policy.decoder.layers[0].register_forward_pre_hook(watch)
    policy.decoder.layers[0].register_full_backward_hook(watch)
    for _ in range(2):
        total = torch.zeros(())
        for row in range(rank, 4, world):  # one row per micro-batch
            log_probs, *_ = policy(ids[row : row + 1], positions, ids[row, 1:], chunk_tokens=4)
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
    save_hf(policy, NoTokenizer(), folder / f"saved{world}")
    if rank == 0:
        torch.save({**result, "state": state}, folder / f"{world}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    for tie in (True, False):
        tiny(tie).save_pretrained(folder / f"{tie}" / "initial")
    spawn(train, str(folder))
    return folder


@pytest.mark.parametrize("tie", [True, False])
def test_one_and_two_ranks_agree(results: Path, tie: bool) -> None:
    folder = results / f"{tie}"
    one, two = (torch.load(folder / f"{world}.pt", weights_only=True) for world in (1, 2))
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert one["norm"] == pytest.approx(two["norm"], rel=1e-5)
    assert one["loss"][1] < one["loss"][0]
    for name, tensor in one["state"].items():
        torch.testing.assert_close(tensor, two["state"][name], atol=1e-5, rtol=1e-4)

    # The same without FSDP: gradients are plain sums.
    policy = Policy(tiny(tie))
    ids = torch.randint(1, 40, (4, 7), generator=torch.Generator().manual_seed(5))
    loss = policy.lm(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(two["loss"][0], rel=1e-5)
    assert clip_grad_norm(policy.parameters(), 1e9) == pytest.approx(two["norm"][0], rel=1e-5)

    saved = AutoModelForCausalLM.from_pretrained(folder / "saved2")
    assert saved.config.tie_word_embeddings == tie
    assert {n for n, _ in saved.named_parameters()} == {Policy.hf_name(n) for n in two["state"]}
    for name, tensor in two["state"].items():
        torch.testing.assert_close(dict(saved.named_parameters())[Policy.hf_name(name)].detach(), tensor)
    assert sorted(p.name for p in folder.iterdir()) == ["1.pt", "2.pt", "initial", "saved1", "saved2"]


def test_an_untied_embedding_is_gathered_for_its_own_forward_pass_alone(results: Path) -> None:
    tied, untied = (torch.load(results / f"{tie}" / "2.pt", weights_only=True) for tie in (True, False))
    assert len(untied["embedding is sharded"]) == 2 * 4 and all(untied["embedding is sharded"])
    assert not any(tied["embedding is sharded"])


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


def test_a_save_replaces_an_older_one_and_keeps_the_files_of_others(tmp_path: Path) -> None:
    policy, folder = Policy(tiny(True)), tmp_path / "model"
    save_hf(policy, NoTokenizer(), folder)
    (folder / "model-00001-of-00002.safetensors").write_text("of an older save")
    (folder / "notes.txt").write_text("mine")
    save_hf(policy, NoTokenizer(), folder, replace=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors", "notes.txt", "tokenizer.json")
    ]
    assert (folder / "notes.txt").read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_was_filled_meanwhile_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RuntimeError, match="Directory not empty"):
        save_hf(Policy(tiny(True)), NoTokenizer(), folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"] and list(tmp_path.iterdir()) == [folder]


def test_a_failed_save_leaves_the_old_folder(tmp_path: Path) -> None:
    policy, folder = Policy(tiny(True)), tmp_path / "model"
    save_hf(policy, NoTokenizer(), folder)

    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no space left on device")

    before = sorted(folder.iterdir())
    with pytest.raises(RuntimeError, match="no space left on device"):
        save_hf(policy, Broken(), folder, replace=True)
    assert sorted(folder.iterdir()) == before and [p.name for p in tmp_path.iterdir()] == ["model"]


def test_shard_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        shard(torch.nn.Linear(1, 1), FSDPConfig(), "cpu")


def test_the_computation_is_in_bfloat16_on_gpus_unless_told() -> None:
    assert FSDPConfig().compute_dtype("float32", gpu=True) == "bfloat16"
    assert FSDPConfig().compute_dtype("float32", gpu=False) == "float32"
    assert FSDPConfig(param_dtype="float32").compute_dtype("bfloat16", gpu=True) == "float32"


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_parameters_are_left_to_the_policy_of_their_offload(
    offload: str, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP itself runs: host memory that is not pinned needs no GPU."""
    policies = []
    real = torch.distributed.fsdp.fully_shard

    def logged(module: Any, **options: Any) -> Any:
        policies.append(options.get("offload_policy"))
        return real(module, **options)

    monkeypatch.setattr("pipeline.models.fsdp.fully_shard", logged)
    policy = partial(torch.distributed.fsdp.CPUOffloadPolicy, pin_memory=False)
    monkeypatch.setattr("pipeline.models.fsdp.CPUOffloadPolicy", policy)
    module = shard(Policy(tiny(tie=True)), FSDPConfig(offload=offload), "cpu")
    assert len(policies) == 3 and all((policy is not None) == (offload == "all") for policy in policies)
    log_probs, *_ = module(torch.arange(12).reshape(2, 6), torch.tensor([1, 8]), torch.tensor([3, 4]))
    log_probs.sum().backward()
    plain = Policy(tiny(tie=True))
    plain(torch.arange(12).reshape(2, 6), torch.tensor([1, 8]), torch.tensor([3, 4]))[0].sum().backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.usefixtures("one_rank")
def test_blocks_with_embeddings_inside_are_sharded() -> None:
    """The experts of Doge are rows of embeddings, a group each inside of the block's group."""
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = DogeConfig(
        **sizes, **heads, is_moe=True, num_experts=16, num_experts_per_tok=2, tie_word_embeddings=False, pad_token_id=0
    )
    ids = torch.arange(1, 13).reshape(2, 6)
    gradients = []
    for sharded in (False, True):
        torch.manual_seed(3)
        model = DogeForCausalLM(config)
        if sharded:
            shard(model, FSDPConfig(), "cpu")
        model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        gradients.append({n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()})
    plain, ours = gradients
    assert any(name.endswith("down_embed.weight") for name in plain) and plain.keys() == ours.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-7)
