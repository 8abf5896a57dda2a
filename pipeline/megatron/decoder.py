"""A decoder of Megatron's layers, with the project's attention over packed rows. It needs no TransformerEngine.

Megatron's own attention refuses packed rows and context parallelism, and its own norms refuse sequence parallelism,
unless TransformerEngine is there. So the specification of a layer names other modules: `PackedAttention` and `Norm`.
Its `GPTModel`, which is deprecated, is not used.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor, nn
from torch.nn.functional import pad

from pipeline.models.attention import Layout, attend


@dataclass
class PackedRows(PackedSeqParams):
    """Packed rows, for `PackedAttention`."""

    layout: Layout | None = None
    tokens: int = 0
    """Number of positions of this rank, before its share is filled up to a multiple of the tensor group."""


class PackedAttention(MegatronModule):
    """Attention over packed rows, in place of Megatron's. The arguments are the same."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """[T, 1, heads x D] from queries [T, 1, heads, D], and keys and values [T, 1, key heads, D]."""
        rows: PackedRows = packed_seq_params
        size = len(query)
        query, key, value = (part[: rows.tokens, 0].transpose(0, 1)[None] for part in (query, key, value))
        output = attend(self, query, key, value, None, packing=rows.layout)[0]
        return pad(output[0].flatten(1), (0, 0, 0, size - rows.tokens))[:, None]


class Norm(nn.RMSNorm):
    """RMS norm, also of the positions that sequence parallelism leaves to a rank."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        # Megatron sums its gradient over the tensor group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Decoder(LanguageModule):
    """This rank's stage of a language model, without the computation of log-probs.

    Args:
        config: Megatron's settings.
        hf: configuration of the model of `transformers`.
        first, last: whether this is the first or the last stage.
    """

    def __init__(self, config: Any, hf: Any, first: bool, last: bool) -> None:
        super().__init__(config=config)
        self.pre_process, self.post_process, self.vp_stage = first, last, None
        self.share_embeddings_and_output_weights = bool(hf.tie_word_embeddings)
        self.model_type = ModelType.encoder_or_decoder
        if first:
            self.embedding = LanguageModelEmbedding(config, hf.vocab_size, 0, position_embedding_type="rope")
        self.decoder = TransformerBlock(config, _layers(config), pre_process=first, post_process=last)
        if last:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                hf.vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=first and self.share_embeddings_and_output_weights,
            )
        if first or last:
            self.setup_embeddings_and_output_layer()
        rope = getattr(hf, "rope_parameters", None) or {}
        base = float(rope.get("rope_theta") or getattr(hf, "rope_theta", None) or 10000.0)
        exponents = torch.arange(0, config.kv_channels, 2, dtype=torch.float32) / config.kv_channels
        self.inverse_frequencies = base**-exponents

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the hidden states of the stage before; called by Megatron's schedules."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Pass packed rows through the stage.

        Args:
            ids: [1, T] int64, this rank's positions.
            positions: [1, T] int64, the position of each in its context.
            layout: layout of the contexts.

        Returns:
            hidden states, [T, 1, H] on the last stage; on others a tensor rank's share of T, filled up.
        """
        config, tokens = self.config, ids.shape[1]
        group = parallel_state.get_tensor_model_parallel_world_size()
        more = -tokens % group if config.sequence_parallel else 0
        ids, positions = (pad(values, (0, more)) for values in (ids, positions))
        hidden = self.embedding(ids, None) if self.pre_process else None
        angles = torch.outer(positions[0].float(), self.inverse_frequencies.to(positions.device))
        angles = torch.cat((angles, angles), -1)[:, None, None]
        rows = PackedRows(qkv_format="sbhd", layout=layout, tokens=tokens)
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=rows)
        if not self.post_process:
            return hidden
        if config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[:tokens]

    @property
    def head(self) -> nn.Parameter:
        """[V / tensor ranks, H] weights of the head, on the last stage."""
        if self.share_embeddings_and_output_weights:
            shared: nn.Parameter = self.shared_embedding_or_output_weight()
            return shared
        own: nn.Parameter = self.output_layer.weight
        return own


def _layers(config: Any) -> TransformerBlockSubmodules:
    """Return the specification of this stage's layers."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return TransformerBlockSubmodules([spec] * get_num_layers_to_build(config), layer_norm=Norm)
