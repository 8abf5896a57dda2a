"""Folders of published models without weights: true sizes, and safetensors files of which only the header exists."""

import functools
import json
import math
import struct
from pathlib import Path
from typing import Any

from jobs.tiny import build_tokenizer, countdown_texts

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
QWEN2 = {"model_type": "qwen2", "vocab_size": 152064}


def _sizes(
    family: dict[str, Any], hidden: int, layers: int, heads: int, feed_forward: int, **more: Any
) -> dict[str, Any]:
    return {
        **family,
        "max_position_embeddings": 32768,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": feed_forward,
        "tie_word_embeddings": False,
        **more,
    }


MODELS = {
    "Qwen2.5-0.5B": _sizes(
        QWEN2, 896, 24, 14, 4864, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "Qwen2.5-1.5B": _sizes(
        QWEN2, 1536, 28, 12, 8960, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True
    ),
    "Qwen2.5-7B": _sizes(QWEN2, 3584, 28, 28, 18944, num_key_value_heads=4),
    "Qwen3-8B": _sizes(QWEN3, 4096, 36, 32, 12288),
    "Qwen3-14B": _sizes(QWEN3, 5120, 40, 40, 17408),
    "Qwen3-32B": _sizes(QWEN3, 5120, 64, 64, 25600),
    "Qwen2.5-72B": _sizes(QWEN2, 8192, 80, 64, 29568, num_key_value_heads=8),
    "Qwen3-30B-A3B": _sizes(
        QWEN3 | {"model_type": "qwen3_moe"},
        *(2048, 48, 32, 6144),
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
}
"""Entries of `config.json`, as they are published."""


def write_shape(name: str, folder: Path) -> Path:
    """Write the folder of a model of `MODELS`, with a small tokenizer; its weights take no space."""
    folder.mkdir(parents=True, exist_ok=True)
    config = MODELS[name]
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer("qwen3" in config["model_type"]).save_pretrained(folder)
    header, end = {}, 0
    for tensor, shape in _tensors(config):
        start, end = end, end + 2 * math.prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


@functools.cache
def _tokenizer(thinks: bool) -> Any:
    tokenizer = build_tokenizer(countdown_texts(128, seed=0), vocab_size=300)
    if thinks:
        # As the template of Qwen3.
        tokenizer.chat_template += "{% if enable_thinking is false %}<think></think>{% endif %}"
    return tokenizer


def _tensors(config: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Names and shapes in the files of Qwen2.5, Qwen3 and Qwen3-MoE."""
    width, heads, old = config["hidden_size"], config["num_attention_heads"], config["model_type"] == "qwen2"
    head = config.get("head_dim", width // heads)
    queries, keys = heads * head, config["num_key_value_heads"] * head
    found = [("model.embed_tokens.weight", [config["vocab_size"], width]), ("model.norm.weight", [width])]
    if not config["tie_word_embeddings"]:
        found.append(("lm_head.weight", [config["vocab_size"], width]))
    layer = [
        (f"self_attn.{name}_proj.weight", [size, width])
        for name, size in zip("qkv", (queries, keys, keys), strict=True)
    ]
    layer += [("self_attn.o_proj.weight", [width, queries])]
    if old:
        layer += [
            (f"self_attn.{name}_proj.bias", [size]) for name, size in zip("qkv", (queries, keys, keys), strict=True)
        ]
    else:
        layer += [(f"self_attn.{name}_norm.weight", [head]) for name in "qk"]
    layer += [(f"{name}_layernorm.weight", [width]) for name in ("input", "post_attention")]
    experts, inner = config.get("num_experts", 0), config.get("moe_intermediate_size", config["intermediate_size"])
    for block in [f"mlp.experts.{number}" for number in range(experts)] or ["mlp"]:
        layer += [(f"{block}.{name}_proj.weight", [inner, width]) for name in ("gate", "up")]
        layer += [(f"{block}.down_proj.weight", [width, inner])]
    if experts:
        layer.append(("mlp.gate.weight", [experts, width]))
    numbers = range(config["num_hidden_layers"])
    return found + [(f"model.layers.{number}.{name}", shape) for number in numbers for name, shape in layer]
