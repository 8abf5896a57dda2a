"""Weights as an engine gets them are those of the folder that `transformers` saves: same names, shapes and numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.weights.checkpoint_names import as_in_checkpoint, skeleton
from pipeline.weights.load import parameters
from pipeline.weights.publish import pack, parts

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
KINDS: dict[str, dict[str, Any]] = {
    # 2I = H: a transposed tensor would have the same shape.
    "qwen3_moe": EXPERTS | {"num_experts": 3, "mlp_only_layers": [1], "head_dim": 8},
    "qwen2_moe": EXPERTS | {"num_experts": 3, "shared_expert_intermediate_size": 8},
    "mixtral": {"num_local_experts": 3},
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
    "deepseek_v3": EXPERTS
    | DEEPSEEK
    | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "v_head_dim": 8},
    "gpt_oss": {"num_local_experts": 3, "head_dim": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_gets_what_transformers_saves(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **KINDS[kind]))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    shards = [pack(parts(model, 0, torch.float32), 0, 4000, lambda buffer: buffer)]
    published = [name for name, _ in parameters(shards, lambda refs: refs)]
    assert any(name.endswith("experts.gate_up_proj") for name in published), "replicas get these"
    lm = skeleton(str(tmp_path), trust_remote_code=False)
    assert all(parameter.is_meta for parameter in lm.parameters())
    found = list(as_in_checkpoint(lm, parameters(shards, lambda refs: refs)))
    assert sorted(name for name, _ in found) == sorted(saved)
    assert all(torch.equal(tensor, saved[name]) and tensor.dtype == saved[name].dtype for name, tensor in found)
