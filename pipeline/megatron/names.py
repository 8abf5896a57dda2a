"""The parameters of Megatron as blocks of the tensors of a checkpoint, both ways, without any collective.

    linear_qkv    rows group by group: queries of the group, its key, its value    q_proj, k_proj, v_proj
    linear_fc1    gate above up, in the part of each tensor rank                    gate_proj, up_proj

A tensor rank's part of a parameter is one block of neighbouring rows or columns of each of these tensors.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from pipeline.megatron.settings import experts_of

LAYER = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
    "input_layernorm": ("input_layernorm",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
    "mlp.router": ("mlp.gate",),
}
ENDS = {
    "embedding.word_embeddings": ("model.embed_tokens",),
    "decoder.final_layernorm": ("model.norm",),
    "output_layer": ("lm_head",),
}
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)")
EXPERT_PARTS = {"fc1": ("gate_proj", "up_proj"), "fc2": ("down_proj",)}


@dataclass(frozen=True)
class TensorBlock:
    """A block of a tensor of the checkpoint."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The block, as an index of the whole tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.extent, strict=True))


@dataclass(frozen=True)
class Held:
    """A parameter of this rank, and its blocks."""

    name: str
    parameter: nn.Parameter
    blocks: tuple[TensorBlock, ...]
    """Blocks in the order in which the parameter has them."""
    owned: bool
    """True if this rank is the first of the ranks with the same part; the others neither publish nor save it."""
    copied: bool
    """True for the embedding as the head of the last stage, if the first stage has it too."""
    groups: int
    """Number of groups of heads in this part, for `linear_qkv`."""
    expert: int | None
    """Number of the expert; None outside of experts."""

    def divided(self, value: Tensor) -> list[Tensor]:
        """Return the blocks of `value`, which has the parameter's shape."""
        if "linear_qkv" in self.name:
            sizes = [block.extent[0] // self.groups for block in self.blocks]
            return [part.flatten(0, 1) for part in value.unflatten(0, (self.groups, -1)).split(sizes, 1)]
        return list(value.chunk(len(self.blocks)))

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Return a tensor of the parameter's shape from its blocks: the reverse of `divided`."""
        if "linear_qkv" in self.name:
            return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], 1).flatten(0, 1)
        return torch.cat(parts)


def _names(name: str, first_layer: int, first_expert: int) -> list[str]:
    """Return the names in a checkpoint of the parameter `name`. Raises KeyError for one that is not known."""
    base, kind = name.rsplit(".", 1)
    if base in ENDS:
        return [f"{part}.{kind}" for part in ENDS[base]]
    _, _, layer, rest = base.split(".", 3)
    prefix = f"model.layers.{int(layer) + first_layer}"
    if found := EXPERT.fullmatch(rest):
        expert = f"{prefix}.mlp.experts.{int(found[1]) + first_expert}"
        return [f"{expert}.{part}.{kind}" for part in EXPERT_PARTS[found[2]]]
    return [f"{prefix}.{part}.{kind}" for part in LAYER[rest]]


def held(model: Any, hf: Any) -> Iterator[Held]:
    """Yield the parameters of this rank's stage.

    Args:
        model: the `Decoder`.
        hf: configuration of the model.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    local = experts_of(hf) // parallel_state.get_expert_model_parallel_world_size()
    first_expert = local * parallel_state.get_expert_model_parallel_rank()
    first_layer = model.decoder.layers[0].layer_number - 1
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for name, parameter in model.named_parameters():
        local_expert = re.search(r"\.local_experts\.(\d+)\.", name)
        expert = None if local_expert is None else int(local_expert[1]) + first_expert
        cut = ranks > 1 and getattr(parameter, "tensor_model_parallel", False) and expert is None
        dim = parameter.partition_dim if cut else 0
        groups = hf.num_key_value_heads // (ranks if cut else 1)
        names = _names(name, first_layer, first_expert)
        copied = names == ["lm_head.weight"] and bool(hf.tie_word_embeddings)
        if copied:
            names = ["model.embed_tokens.weight"]
        if "linear_qkv" in name:
            queries = hf.num_attention_heads // hf.num_key_value_heads
            unit = len(parameter) // (groups * (queries + 2))
            rows = [groups * queries * unit, groups * unit, groups * unit]
        else:
            rows = [len(parameter) // len(names)] * len(names)
        blocks = []
        for key, count in zip(names, rows, strict=True):
            extent = (count, *parameter.shape[1:])
            shape, start = list(extent), [0] * len(extent)
            if cut:
                shape[dim], start[dim] = extent[dim] * ranks, extent[dim] * rank
            blocks.append(TensorBlock(key, tuple(shape), tuple(start), extent))
        same = replicas if expert is None else parallel_state.get_expert_data_parallel_group()
        owned = same.rank() == 0 and (cut or expert is not None or rank == 0) and not copied
        yield Held(name, parameter, tuple(blocks), owned, copied, groups, expert)


def stacked(found: list[Held]) -> dict[str, list[Held]]:
    """Return the parameters of experts by the name of the tensor of all experts of a layer in `transformers`: gate
    above up, and down, as Megatron has them."""
    result: dict[str, list[Held]] = {}
    for one in found:
        if one.expert is not None:
            layer = one.blocks[0].name.partition(".mlp.experts.")[0]
            kind = "gate_up_proj" if len(one.blocks) == 2 else "down_proj"
            result.setdefault(f"{layer}.mlp.experts.{kind}", []).append(one)
    return {name: sorted(experts, key=lambda one: one.expert or 0) for name, experts in result.items()}
