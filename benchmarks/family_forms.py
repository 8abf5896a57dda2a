"""The forms of model families that `benchmarks.families` tries: configurations of `transformers`, as small as they go.

A form is a family with one choice of rope, window and experts. Windows have `WINDOW` tokens and ropes are made for
`ORIGINAL` positions, so that rows of some tens of tokens are longer than both.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

WINDOW = 16
ORIGINAL = 32
"""Positions that a stretched rope was made for."""
LENGTH = 128
"""Positions that it is stretched to."""
HEAD = 32
"""Dimensions of a head, the fewest of vLLM's attention on CPUs."""

COMMON: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
HEADS = {"head_dim": HEAD}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512, "n_inner": 96, "initializer_range": 0.1}
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW}
LINEAR_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", FULL],
}


def rope(kind: str, length: int = LENGTH, **options: Any) -> dict[str, Any]:
    """Configure a rope stretched from `ORIGINAL` positions to `length`."""
    parameters = {
        "rope_type": kind,
        "rope_theta": 10_000.0,
        "factor": length / ORIGINAL,
        "original_max_position_embeddings": ORIGINAL,
        **options,
    }
    return {"max_position_embeddings": length, "rope_parameters": parameters}


def by_length(dims: int, **more: Any) -> dict[str, Any]:
    """Configure a rope of `dims` rotated dimensions with factors for short rows and others for long ones."""
    factors: dict[str, Any] = {
        "short_factor": [1.0 + 0.01 * i for i in range(dims // 2)],
        "long_factor": [1.5 + i for i in range(dims // 2)],
    }
    return rope("longrope", **factors, **more) | {"original_max_position_embeddings": ORIGINAL}


LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", HEADS),
    "llama-bias": ("llama", HEADS | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("llama", HEADS | rope("linear")),
    "llama-dynamic": ("llama", HEADS | rope("dynamic") | {"max_position_embeddings": ORIGINAL}),
    "llama-yarn": ("llama", HEADS | rope("yarn")),
    "llama-3": ("llama", HEADS | LLAMA3),
    "llama-3-tied": ("llama", HEADS | LLAMA3 | {"tie_word_embeddings": True}),
    "llama-4": (
        "llama4_text",
        HEADS
        | {
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 512,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", rope("yarn")),
    "qwen2-moe": (
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    "qwen3": ("qwen3", HEADS),
    "qwen3-yarn": ("qwen3", HEADS | rope("yarn")),
    "qwen3-moe": ("qwen3_moe", HEADS | EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 1}),
    "qwen3-next": (
        "qwen3_next",
        HEADS | EXPERTS | LINEAR_HEADS | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    "qwen3.5": ("qwen3_5_text", HEADS | LINEAR_HEADS),
    "qwen3.5-moe": ("qwen3_5_moe_text", HEADS | EXPERTS | LINEAR_HEADS | {"shared_expert_intermediate_size": 32}),
    "gemma": ("gemma", HEADS),
    "gemma-2": (
        "gemma2",
        # Scores of some tens, as large models have them, show the cap.
        HEADS | MIXED | {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    ),
    "gemma-2-no-cap": (
        "gemma2",
        HEADS | MIXED | {"query_pre_attn_scalar": 32, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma-3": ("gemma3_text", HEADS | MIXED | {"query_pre_attn_scalar": 32}),
    "gemma-3n": (
        "gemma3n_text",
        HEADS
        | MIXED
        | {
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 320,
            "laurel_rank": 16,
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0, 0.0],
            "intermediate_size": [96, 96],
        },
    ),
    "gemma-4": (
        "gemma4_text",
        HEADS | MIXED | {"global_head_dim": HEAD, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320},
    ),
    "vaultgemma": ("vaultgemma", HEADS | MIXED | {"query_pre_attn_scalar": 32}),
    "phi-2": ("phi", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "phi-3": ("phi3", {}),
    "phi-3-window": ("phi3", {"sliding_window": WINDOW}),
    "phi-3-longrope": ("phi3", by_length(HEAD)),
    "phi-4": ("phi3", {"num_key_value_heads": 1}),
    "phi-4-mini": ("phi3", by_length(24) | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "phi-3.5-moe": (
        "phimoe",
        LOCAL_EXPERTS
        | by_length(HEAD, short_mscale=1.0, long_mscale=1.1)
        | {"attention_bias": True, "lm_head_bias": True},
    ),
    "mistral": ("mistral", HEADS | {"sliding_window": None}),
    "mistral-window": ("mistral", HEADS | {"sliding_window": WINDOW}),
    "ministral": ("ministral", HEADS | MIXED),
    "ministral-3": (
        "ministral3",
        HEADS | rope("yarn", beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
    ),
    "mixtral": ("mixtral", HEADS | LOCAL_EXPERTS | {"sliding_window": None}),
    "mixtral-window": ("mixtral", HEADS | LOCAL_EXPERTS | {"sliding_window": WINDOW}),
    "olmo": ("olmo", {}),
    "olmo-clip": ("olmo", {"clip_qkv": 0.5}),
    "olmo-2": ("olmo2", {}),
    "olmo-3": ("olmo3", MIXED),
    "olmo-3-yarn": ("olmo3", MIXED | rope("yarn")),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "flex-olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "olmo-hybrid": ("olmo_hybrid", LINEAR_HEADS),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "granite-moe": ("granitemoe", LOCAL_EXPERTS | {"logits_scaling": 2.0, "attention_multiplier": 0.2}),
    "granite-moe-shared": (
        "granitemoeshared",
        LOCAL_EXPERTS | {"shared_intermediate_size": 32, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    ),
    "granite-4-hybrid": (
        "granitemoehybrid",
        LOCAL_EXPERTS
        | {
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "attention_multiplier": 0.2,
        },
    ),
    "granite-window": ("granite_swa", {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "gpt-neox-serial": ("gpt_neox", {"rotary_pct": 1.0, "use_parallel_residual": False}),
    "gpt-2": ("gpt2", GPT),
    "gpt-j": ("gptj", GPT | {"rotary_dim": 16}),
    "gpt-bigcode": ("gpt_bigcode", GPT | {"multi_query": True}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.1}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 2}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1}),
    "falcon-7b": ("falcon", {"multi_query": True}),
    "falcon-alibi": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 2, "n_layers": 2}),
    "starcoder-2": ("starcoder2", {"sliding_window": None}),
    "starcoder-2-window": ("starcoder2", {"sliding_window": WINDOW}),
    "smollm-3": ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere-2": ("cohere2", HEADS | MIXED | {"logit_scale": 0.5}),
    "glm-4-9b": ("glm", HEADS | {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm-4": ("glm4", HEADS | {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm-4.5": ("glm4_moe", HEADS | ROUTED | {"partial_rotary_factor": 0.5, "use_qk_norm": True}),
    "glm-4.7-flash": ("glm4_moe_lite", ROUTED | LATENT | {"num_key_value_heads": 2, "q_lora_rank": 32}),
    "seed-oss": ("seed_oss", HEADS | {"attention_dropout": 0.1, "residual_dropout": 0.1}),
    "deepseek-v2": ("deepseek_v2", ROUTED | LATENT | {"num_key_value_heads": 2}),
    "deepseek-v3": ("deepseek_v3", ROUTED | LATENT | {"num_key_value_heads": 2, "q_lora_rank": 32}),
    "dots.1": ("dots1", HEADS | ROUTED),
    "gpt-oss": ("gpt_oss", HEADS | LOCAL_EXPERTS | MIXED),
    "minicpm-3": (
        "minicpm3",
        LATENT | {"num_key_value_heads": 2, "q_lora_rank": 32, "scale_emb": 2, "dim_model_base": 32},
    ),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25}),
    "nemotron": ("nemotron", HEADS | {"partial_rotary_factor": 0.5}),
    "nemotron-h": (
        "nemotron_h",
        HEADS
        | {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
        },
    ),
    "exaone-4": ("exaone4", HEADS | MIXED),
    "exaone-moe": ("exaone_moe", HEADS | MIXED | EXPERTS | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "ernie-4.5": ("ernie4_5", HEADS),
    "ernie-4.5-moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "hunyuan-dense": ("hunyuan_v1_dense", HEADS),
    "hunyuan-moe": ("hunyuan_v1_moe", HEADS | {"num_experts": 4, "moe_topk": 2}),
    "hy-v3": ("hy_v3", HEADS | EXPERTS | {"first_k_dense_replace": 1, "expert_hidden_dim": 32}),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", FULL], "block_auto_adjust_ff_dim": False, "block_dim": 64, "conv_dim": 64},
    ),
    "lfm2-moe": ("lfm2_moe", EXPERTS | {"layer_types": ["conv", FULL], "num_dense_layers": 1}),
    "falcon-h1": ("falcon_h1", HEADS | MAMBA),
    "bamba": (
        "bamba",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    ),
    "jamba": (
        "jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba-2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2}),
    "falcon-mamba": ("falcon_mamba", {"state_size": 8}),
    "zamba-2": (
        "zamba2",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 16,
            "n_mamba_heads": 4,
            "mamba_headdim": 32,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
            "num_key_value_heads": 2,
            "attention_head_dim": 64,
        },
    ),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", HEADS),
    "afmoe": (
        "afmoe",
        HEADS | MIXED | EXPERTS | {"num_dense_layers": 1, "num_shared_experts": 1, "score_func": "sigmoid"},
    ),
    "minimax-m2": ("minimax_m2", HEADS | LOCAL_EXPERTS | {"rotary_dim": 16}),
    "mimo-v2-flash": ("mimo_v2_flash", HEADS | MIXED | ROUTED),
    "solar-open": ("solar_open", HEADS | ROUTED),
    "jais-2": ("jais2", HEADS),
    "hyperclovax": ("hyperclovax", HEADS),
    "helium": ("helium", HEADS),
    "nanochat": ("nanochat", HEADS),
    "dbrx": (
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 2,
            "n_layers": 2,
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 1, "rope_theta": 10_000.0, "clip_qkv": 0.5},
        },
    ),
    "laguna": ("laguna", HEADS | MIXED | EXPERTS),
    "mellum": ("mellum", HEADS | MIXED | EXPERTS),
    "cwm": ("cwm", HEADS | MIXED | LLAMA3 | {"bos_token_id": 1}),
}


def build(name: str, tokenizer: Any) -> Any:
    """Build a model of the form `name` for the tokens of `tokenizer`; its weights are random, and all matter."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind, changes = FORMS[name]
    family = CONFIG_MAPPING[kind]
    known = {field.name for field in fields(family)} | family.attribute_map.keys()
    # Numbers that a family does not have may mislead the engine.
    common = {key: value for key, value in COMMON.items() if key in known}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = family(**{**common, "vocab_size": len(tokenizer), **ids, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    move(model, seed=1, size=0.05)
    return model


@torch.no_grad()
def move(model: torch.nn.Module, seed: int, size: float) -> None:
    """Change all weights, and the biases that are buffers, by random numbers: none is 0 or 1 afterwards."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict(keep_vars=True).items():
        # Other buffers, such as an activation's, are constants.
        if isinstance(tensor, torch.nn.Parameter) or name.endswith("bias"):
            local = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
            local += size * torch.randn(local.shape, generator=generator)
