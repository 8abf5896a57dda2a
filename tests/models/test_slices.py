"""Sharded loading: every rank reads its own rows, and the model is the same as one that was loaded whole."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    core_model_loading,
)

from pipeline.config.learner import FSDPConfig
from pipeline.config.model import ModelConfig
from pipeline.models import save
from pipeline.models.attention import PACKED
from pipeline.models.fsdp import full_state_dict, save_hf, shard
from pipeline.models.mesh import Mesh, make_mesh
from pipeline.models.policy import Policy, load_policy
from pipeline.models.reward_model import RewardModel, load_reward_model
from pipeline.models.sharing import enable
from pipeline.models.slices import reading_slices
from pipeline.models.value import ValueModel, load_value_model
from tests.models.test_fsdp import NoTokenizer
from tests.train.updates import spawn, worlds

SIZES: dict[str, Any] = {
    "vocab_size": 151,  # odd: ranks get unequal slices of the embedding
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def save_models(folder: Path) -> None:
    torch.manual_seed(1)
    for tie in (True, False):
        Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tie)).save_pretrained(folder / f"tied={tie}")
    experts = Qwen3MoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24)
    Qwen3MoeForCausalLM(experts).save_pretrained(folder / "experts")
    wrong = folder / "wrong"
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(wrong)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"vocab_size": 140}))
    classifier = folder / "classifier"
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(classifier)
    weights = load_file(classifier / "model.safetensors")
    save_file(weights | {"score.weight": torch.zeros(3, 32)}, classifier / "model.safetensors", {"format": "pt"})


def load(kind: str, folder: Path, mesh: Any) -> nn.Module:
    model: Any
    if kind == "critic":
        model = load_value_model(ModelConfig(path=str(folder / "tied=False")), mesh=mesh)
        nn.init.ones_(model.head.weight)
        return model
    if kind == "reward":
        model = load_reward_model(ModelConfig(path=str(folder / "tied=True")), new_head=True, mesh=mesh)
        nn.init.ones_(model.lm.score.weight)
        return model
    return load_policy(ModelConfig(path=str(folder / kind)), mesh=mesh)


KINDS = ("tied=True", "tied=False", "experts", "critic", "reward")


def outputs(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(10)[None] * 13 % 151
    if isinstance(model, RewardModel):
        return model(ids, torch.tensor([9]))
    if isinstance(model, ValueModel):
        return model(ids, torch.arange(9))
    assert isinstance(model, Policy)
    return model(ids, torch.arange(9), ids[0, 1:])[0]


def compare(rank: int, folder: str) -> None:
    for world in worlds(rank, folder):
        if world == 1:
            continue
        mesh, place = make_mesh("cpu"), Path(folder)
        for kind in KINDS:
            whole = shard(load(kind, place, None), FSDPConfig(), "cpu")
            read: list[int] = []
            model = counting(read, lambda kind=kind, place=place, mesh=mesh: load(kind, place, mesh))
            # Vectors are read whole.
            matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1 and len(parameter) > 1]
            assert all(isinstance(parameter, DTensor) for parameter in matrices)
            assert max(read) <= max(parameter.to_local().numel() for parameter in matrices), kind
            vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
            assert sum(read) <= sum(parameter.to_local().numel() for parameter in matrices) + 151 * 32 + vectors
            model = shard(model, FSDPConfig(), "cpu", mesh)
            theirs, ours = outputs(whole), outputs(model)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
            for side in (theirs, ours):
                side.sum().backward()
            for (name, one), (_, two) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
                assert one.placements == two.placements and one.device_mesh.size() == two.device_mesh.size()
                torch.testing.assert_close(one.to_local(), two.to_local(), rtol=0, atol=0, msg=name)
                torch.testing.assert_close(one.grad.to_local(), two.grad.to_local(), rtol=0, atol=0, msg=name)
            assert full_state_dict(model).keys() == full_state_dict(whole).keys()
            if isinstance(model, Policy):
                saves(model, place / kind)
        refusals(place, mesh)


def saves(model: Policy, source: Path) -> None:
    """Files are written one after the other, and hold the weights as the checkpoint called them."""
    largest: list[int] = []
    with patch.object(save, "FILE_BYTES", 12_000):
        save_hf(model, NoTokenizer(), source / "again")
    save_hf(model, NoTokenizer(), source / "half", torch.bfloat16)
    if dist.get_rank() > 0:
        return
    wanted = load_file(source / "model.safetensors")
    index = json.loads((source / "again" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    files = sorted((source / "again").glob("*.safetensors"))
    assert len(files) > 2 and {file.name for file in files} == set(index["weight_map"].values())
    for file in files:
        held = load_file(file)
        largest.append(sum(tensor.nbytes for tensor in held.values()) if len(held) > 1 else 0)
        for name, tensor in held.items():
            assert index["weight_map"][name] == file.name
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0)
    assert max(largest) <= 12_000
    half = load_file(source / "half" / "model.safetensors")
    assert half.keys() == wanted.keys() and {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert json.loads((source / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((source / "again" / "config.json").read_text())["dtype"] == "float32"


def counting(read: list[int], load: Any) -> Any:
    """The model, with the sizes of all tensors that were read from files in `read`."""
    spawn_job = core_model_loading.spawn_materialize

    def job(pool: Any, *args: Any, **options: Any) -> Any:
        made = spawn_job(None, *args, **options)

        def run() -> Any:
            tensor = made()
            read.append(0 if tensor is None else tensor.numel())
            return tensor

        return run

    core_model_loading.spawn_materialize = job
    try:
        return load()
    finally:
        core_model_loading.spawn_materialize = spawn_job


def refusals(folder: Path, mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"holds lm_head.weight of shape \[151, 32\], but config.json says \[140"):
        load("wrong", folder, mesh)
    with pytest.raises(ValueError, match="is a classifier, not a reward model"):
        load_reward_model(ModelConfig(path=str(folder / "classifier")), mesh=mesh)
    # Whether rows can be packed is tried on a decoder of one layer.
    model = load_policy(ModelConfig(path=str(folder / "tied=True")), mesh=mesh)
    assert enable(model.decoder) is None and model.decoder.config._attn_implementation == PACKED
    model.decoder.config._attn_implementation = "sdpa"
    forward = type(model.decoder).forward
    try:
        type(model.decoder).forward = lambda self, *args, position_ids=None, **more: forward(self, *args, **more)
        assert enable(model.decoder) == "it gives other numbers with packed rows"
    finally:
        type(model.decoder).forward = forward


def test_slices_are_the_whole_model(tmp_path: Path) -> None:
    save_models(tmp_path)
    spawn(compare, str(tmp_path))
    assert not dist.is_initialized()


def test_a_loader_of_another_form_reads_whole_weights(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(model: Any, files: list[str]) -> None:
        raise AssertionError("it is not called here")

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(other))
    flat: Any = None
    with reading_slices(Mesh(flat, flat)):
        assert PreTrainedModel._load_pretrained_model is other
    assert "every rank reads whole weights" in caplog.text
    tensor: Any = object()
    with (
        pytest.raises(ValueError, match="in a way that actor.parallel.tensor does not know"),
        reading_slices(Mesh(flat, flat, tensor)),
    ):
        pass
