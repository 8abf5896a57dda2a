"""Weights as an engine gets them are those of the folder that `transformers` saves: same names, shapes and numbers."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.weights.checkpoint_names import as_in_checkpoint, skeleton
from pipeline.weights.load import parameters
from pipeline.weights.publish import named, pack
from tests.forks import forking

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
    shards = [pack(named(model), 0, torch.float32, 4000, lambda buffer: buffer)]
    published = [name for name, _ in parameters(shards, lambda refs: refs)]
    assert any(name.endswith("experts.gate_up_proj") for name in published), "replicas get these"
    lm = skeleton(str(tmp_path), trust_remote_code=False)
    assert all(parameter.is_meta for parameter in lm.parameters())
    found = list(as_in_checkpoint(lm, parameters(shards, lambda refs: refs)))
    assert sorted(name for name, _ in found) == sorted(saved)
    assert all(torch.equal(tensor, saved[name]) and tensor.dtype == saved[name].dtype for name, tensor in found)


def beside_an_engine(folder: str) -> tuple[int, bool]:
    """What a skeleton has if vLLM computes the model by the class of `transformers`; whether it would be compiled."""
    from types import SimpleNamespace

    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeModel
    from vllm.compilation.decorators import _support_torch_compile
    from vllm.config import CompilationConfig, CompilationMode

    from pipeline.weights.checkpoint_names import skeleton_beside

    _support_torch_compile(Qwen2MoeModel, {"input_ids": 0})
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    model = SimpleNamespace(model=folder, trust_remote_code=False)
    lm = skeleton_beside(SimpleNamespace(compilation_config=compilation, model_config=model))
    assert compilation.mode == CompilationMode.VLLM_COMPILE, "the engine's own"
    return len(list(lm.parameters())), not lm.model.do_not_compile


@pytest.mark.vllm
def test_a_family_that_vllm_computes_by_transformers_has_a_skeleton_too(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2_moe", **SIZES, **KINDS["qwen2_moe"]))
    model.save_pretrained(tmp_path)
    with ProcessPoolExecutor(1, forking("vllm.config")) as pool:
        found = pool.submit(beside_an_engine, str(tmp_path)).result(200)
    assert found == (len(list(model.parameters())), False)
