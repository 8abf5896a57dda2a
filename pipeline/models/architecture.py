"""Facts about a model by its `config.json`: whether it can take packed rows, its longest row, and routers that can
replay. Does not load torch."""

from collections.abc import Mapping
from typing import Any


def why_padded(config: Any) -> str | None:
    """Return why a decoder cannot attend over packed rows, by its `transformers` configuration; None if it may."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        return f"its layers are not all of full attention ({', '.join(sorted(kinds)) or 'sliding_window'})"
    return None


ROUTERS = {
    "MixtralTopKRouter": "mixtral",
    "OlmoeTopKRouter": "olmoe",
    "Qwen3MoeTopKRouter": "qwen3_moe",
}
"""Classes of routers whose experts can be noted and replayed (`routes.py`), with the `model_type` of their family."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of `config.json` for the number of experts per layer; it depends on the model family which one is there."""

LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
"""Names under which model families store the number of positions in `config.json`."""

LONG_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary embedding with which `max_position_embeddings` already includes the scaling factor."""


def most_positions(config: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the length of the longest row that a model takes, and a clause on the entries that set it.

    The length is in tokens. The result is None if `config.json` has no such entry. The rules are the same as in vLLM
    and `transformers`: the scaling factor multiplies the length for `linear` and `dynamic` rotary embeddings. For YaRN
    it does so only if `max_position_embeddings` is still the original length, as in many model cards.
    """
    lengths = [(config[name], name) for name in LENGTHS if _is_size(config.get(name))]
    if _is_size(config.get("model_max_length")):
        lengths = [(config["model_max_length"], "model_max_length")]
    if not lengths:
        return None
    length, named = min(lengths)
    for rope in ropes(config):
        kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor")
        if not isinstance(factor, int | float) or "gemma3" in str(config.get("model_type")):
            continue
        original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", length))
        if kind == "yarn" and _is_size(original) and original * factor > length:
            return int(original * factor), f"{named}, with the factor {factor:g} of its YaRN"
        if kind not in LONG_ALREADY:
            return int(length * factor), f"{named} x the factor {factor:g} of its positions"
    return length, named


def longer_positions(config: Mapping[str, Any]) -> dict[str, int]:
    """Return changes to `config.json` with which vLLM takes rows as long as `most_positions`; {} if none are needed.

    The changes raise `max_position_embeddings` of a model with YaRN. They do not change the original length, to which
    the factor of YaRN is applied.
    """
    most, own = most_positions(config), config.get("max_position_embeddings")
    if most is None or not isinstance(own, int) or own >= most[0]:
        return {}
    stretched = any(rope.get("rope_type", rope.get("type")) == "yarn" for rope in ropes(config))
    return {"max_position_embeddings": most[0]} if stretched else {}


def ropes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the settings of a model's rotary embeddings in `config.json`: one for all layers, or one per kind of
    layer."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        return []
    nested = [part for part in found.values() if isinstance(part, Mapping)]
    return nested or [found]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
