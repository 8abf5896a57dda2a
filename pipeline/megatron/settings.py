"""Megatron's settings for a model of `transformers`, and what of a model it cannot compute. Does not load Megatron.

Four families are known: Llama, Qwen2, Qwen3 and Qwen3-MoE. Every entry of `config.json` must be known too, since one
that is left out in silence may change numbers.
"""

from collections.abc import Iterator, Mapping
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` that Megatron's decoder is built for."""
VERSION = "0.19.2"
"""Version of megatron-core with which this package was proven."""
MISSING = (
    f"actor.strategy=megatron needs the package megatron-core {VERSION}; install the extra slipstream-rl[megatron] "
    "with Python 3.12 or later, or run `make megatron-env`; see `slipstream docs gpus`"
)

SIZES = {
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling"),
    *(
        "norm_topk_prob",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "tie_word_embeddings",
        "attention_bias",
    ),
}
"""Entries that are converted."""
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "pretraining_tp": (1,),
}
"""Entries for which only these values can be computed."""
WITHOUT_EFFECT = {
    *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "max_window_layers", "layer_types"),
    *("attention_dropout", "router_aux_loss_coef", "output_router_logits", "_name_or_path", "tokenizer_class"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict"),
    *("id2label", "label2id", "problem_type", "is_llama_config", "rope_interleaved", "unsloth_fixed", "auto_map"),
}
"""Entries that do not change the numbers of a forward pass."""


def unknown(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one clause for each thing in `config.json` that Megatron's decoder cannot compute."""
    family = config.get("model_type")
    if family not in FAMILIES:
        yield f"its model_type is {family}, and known are {', '.join(FAMILIES)}"
        return
    for name, value in sorted(config.items()):
        if name in SIZES or name in WITHOUT_EFFECT:
            continue
        if name == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        if name not in ONLY:
            yield f"its config.json has the entry {name}={value}, which is not known"
        elif value not in ONLY[name]:
            yield f"its config.json has {name}={value}, and only {ONLY[name][0]} can be computed"
    if config.get("layer_types") and set(config["layer_types"]) != {"full_attention"}:
        yield "its layers are not all of full attention (layer_types)"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        yield f"its positions are scaled (rope_type={kind})"
    elif more := sorted(rope.keys() - {"rope_type", "type", "rope_theta"}):
        yield f"its positions have the entry {more[0]}, which is not known"
    if family == "qwen3_moe" and config.get("norm_topk_prob") is not True:
        # The class of transformers does not divide by the sum unless config.json sets it.
        yield "its experts' weights do not add up to 1 (norm_topk_prob)"
    if config.get("attention_bias") and family != "qwen2":
        yield "its attention has biases in all projections (attention_bias)"


def experts_of(hf: Any) -> int:
    """Return the number of experts of a layer, by the configuration of `transformers`; 0 without experts."""
    return int(hf.num_experts) if hf.model_type == "qwen3_moe" else 0


def transformer_config(hf: Any, dtype: Any, recompute: bool, groups: Mapping[str, int]) -> Any:
    """Return Megatron's `TransformerConfig`.

    Args:
        hf: configuration of a model in which `unknown` finds nothing.
        dtype: type of weights and computation.
        recompute: whether activations are computed again in the backward pass.
        groups: sizes of Megatron's groups by their names in its configuration.
    """
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    more: dict[str, Any] = dict(groups)
    if experts := experts_of(hf):
        more |= {
            "num_moe_experts": experts,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_grouped_gemm": False,
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": False,
            "moe_router_dtype": "fp32",
        }
    if recompute:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type.startswith("qwen3"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        # Weights are read from the checkpoint at once.
        perform_initialization=False,
        use_cpu_initialization=True,
        # The fused kernels are of packages that are not needed here.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **more,
    )
