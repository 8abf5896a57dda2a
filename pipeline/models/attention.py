"""Attention over packed rows: contexts end to end in one sequence, without padding, and without a mask.

    input_ids   prompt a a a b b | prompt c c        a and b share their prompt
    contexts    prompt a a a,  prompt b b,  prompt c c

Everything but attention works on single tokens, so no token passes twice and none is padding. Attention gathers the
queries, keys and values of each context, and runs under a plain causal mask:

- Contexts of similar length attend in one call, padded on the right to the longest; no token sees the padding. Many
  short ones would be a slow loop, and a long one with short ones would waste work.
- If responses share a prompt that is not very short, only the responses have queries, with the mask of a causal
  attention that begins after the prompt. CPUs compute what a mask hides, so long responses are computed there part by
  part, each part with the tokens up to its end.
- On GPUs, in bfloat16 or float16, all contexts are one call of flash attention's kernel for rows of any length, if the
  kernel gives the same numbers there.

A model takes the layout as an argument of its decoder, which `transformers` hands down to the function of `attend`.
"""

import functools
import logging
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.models.batch import ranges
from pipeline.models.sequence_parallel import Share

logger = logging.getLogger(__name__)

PACKED = "packed"
"""Name of this attention in `transformers`."""
LONG_PROMPT = 16
"""Tokens of a shared prompt from which only responses have queries; below, fewer calls are faster."""
MASKED_QUERIES = 256
"""Most queries in a masked call on a CPU."""


@dataclass(frozen=True)
class Block:
    """C contexts of similar length that attend in one call."""

    contexts: int
    queries: Tensor
    """[C * Q] int64, positions in the packed sequence; the padding is the context's last one."""
    keys: Tensor
    """[C * K] int64; `queries` itself if whole contexts have queries, else the last Q of each K have them."""
    mask: Tensor | None
    """[Q, K] bool, None for plain causal attention."""


@dataclass(frozen=True)
class Layout:
    """Places of the contexts in a packed sequence of T tokens."""

    blocks: list[Block]
    answers: Tensor
    """[T] int64, index of each position's output in the outputs of the blocks, one block after the other."""
    keys: Tensor | None
    """[sum of lengths] int64, positions of the contexts' tokens, context after context; None if they are already in
    order, as without shared prompts."""
    query_ends: Tensor
    """[C + 1] int32, cumulative lengths of the contexts' own tokens; a shared prompt belongs to its first context."""
    key_ends: Tensor
    """[C + 1] int32, cumulative lengths of the contexts in `keys`, prompts included."""
    longest: tuple[int, int]
    """Most own tokens and most tokens (shared prompt included) of a context."""
    share: Share | None = None
    """Positions of this rank; None if it has all."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on `device`."""

        def moved(part: Any) -> Any:
            tensors = {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}
            return replace(part, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})

        share = None if self.share is None else moved(self.share)
        return replace(moved(self), blocks=[moved(block) for block in self.blocks], share=share)


def layout(contexts: np.ndarray, total: int) -> Layout:
    """Compute the layout of C contexts in a packed sequence of `total` tokens; every token belongs to a context.

    Args:
        contexts: [C, 4] int64: start of the prompt, its tokens, start of the response, and its tokens; at least one
            token in a context that is not the first of its prompt. Contexts of the same prompt are neighbours.
        total: tokens of the sequence.
    """
    prompts, prompt_counts, responses, counts = contexts.T
    shares = np.diff(prompts, prepend=-1) == 0
    lengths = prompt_counts + counts
    silent = np.where(shares & (prompt_counts >= LONG_PROMPT), prompt_counts, 0)
    """Tokens at the beginning of each context without a query in its block."""
    asking = lengths - silent

    def positions(members: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the places of these tokens of these contexts in the sequence."""
        behind = places - prompt_counts[members]
        return np.where(behind < 0, prompts[members] + places, responses[members] + behind)

    blocks: list[Block] = []
    answers = np.zeros(total, dtype=np.int64)
    order = np.lexsort((-asking, silent))
    start = done = 0
    while start < len(order):
        most, skipped = int(asking[order[start]]), int(silent[order[start]])
        near = (silent[order] == skipped) & (asking[order] >= most - max(16, most // 16))
        near[:start] = False
        members = order[near][:, None]
        start += len(members)
        places = np.arange(skipped + most)
        keys = positions(members, np.minimum(places, lengths[members] - 1))
        queries, real = keys[:, skipped:], places[skipped:] < lengths[members]
        answers[queries[real]] = done + np.flatnonzero(real)
        done += queries.size
        index = torch.from_numpy(keys.reshape(-1))
        asks = torch.from_numpy(queries.reshape(-1)) if skipped else index
        mask = torch.ones(most, skipped + most, dtype=torch.bool).tril(skipped) if skipped else None
        blocks.append(Block(len(members), asks, index, mask))
    members = np.repeat(np.arange(len(lengths)), lengths)
    return Layout(
        blocks,
        torch.from_numpy(answers),
        torch.from_numpy(positions(members, ranges(np.zeros_like(lengths), lengths))) if shares.any() else None,
        _ends(counts + np.where(shares, 0, prompt_counts)),
        _ends(lengths),
        (int((lengths - np.where(shares, prompt_counts, 0)).max()), int(lengths.max())),
    )


def _ends(counts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Layout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention through the interface of `transformers`.

    Args:
        module: the attention layer.
        query: [1, heads, T, D], the packed sequence; with a share T / S positions of it.
        key, value: [1, key heads, T, D], with as many positions.
        attention_mask: only without `packing`.
        scaling: factor of the scores; None for one over the root of D.
        packing: places of the contexts; None for `transformers`' own attention over rows. With a share a collective.
        options: further arguments of `transformers`' own attention.

    Returns:
        [1, T, heads, D], with a share T / S positions of it; and None in place of the attention's weights.
    """
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return output, None
    rows = tuple(states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, D]
    share = packing.share
    if share is None:
        return _over_contexts(rows, packing, scaling)[None], None
    return share.by_positions(_over_contexts(share.by_heads(*rows), packing, scaling))[None], None


def _over_contexts(rows: tuple[Tensor, ...], packing: Layout, scaling: float | None) -> Tensor:
    """[T, heads, D] of queries [T, heads, D], keys and values [T, key heads, D]."""
    query, key, _ = rows
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and has_varlen(query.device.index, query.dtype):
        return _varlen(rows, packing, scaling)
    outputs = []
    for block in packing.blocks:
        queries, keys, values = (
            part.index_select(0, where).unflatten(0, (block.contexts, -1)).transpose(1, 2)
            for part, where in zip(rows, (block.queries, block.keys, block.keys), strict=True)
        )  # [C, heads, L, D]
        outputs.append(_causal(queries, keys, values, block.mask, scaling).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packing.answers)


def _causal(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """[C, heads, Q, D] of queries [C, heads, Q, D], the last of the keys and values [C, key heads, K, D]."""
    count, behind = query.shape[2], key.shape[2] - query.shape[2]
    step = MASKED_QUERIES if mask is not None and query.device.type == "cpu" else count
    outputs = []
    for start in range(0, count, step):
        end = min(start + step, count)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, : behind + end],
                value[:, :, : behind + end],
                attn_mask=None if mask is None else mask[start:end, : behind + end],
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, 2)


def _varlen(rows: tuple[Tensor, ...], packing: Layout, scaling: float | None) -> Tensor:
    """[T, heads, D] by flash attention; a context's own tokens are the last of its keys, and see those before them."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = rows
    if packing.keys is not None:
        key, value = key.index_select(0, packing.keys), value.index_select(0, packing.keys)
    output = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        packing.query_ends,
        packing.key_ends,
        packing.longest[0],
        packing.longest[1],
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output


@functools.cache
def has_varlen(device: int, dtype: torch.dtype) -> bool:
    """Return whether flash attention's kernel for rows of any length gives the right numbers on this GPU."""
    where, generator = torch.device("cuda", device), torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 64, generator=generator) for heads in (4, 2, 2))
    # A prompt of three tokens with two responses, and a single context.
    made = layout(np.array([[0, 3, 3, 2], [0, 3, 5, 2], [7, 1, 8, 1]]), 9)
    expected = attend(None, query, key, value, None, packing=made)[0]
    try:
        rows = tuple(part[0].transpose(0, 1).to(where, dtype) for part in (query, key, value))
        found = _varlen(rows, made.to(where), None).float().cpu()
    except (ImportError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        logger.info("rows attend in groups of similar length, since flash attention fails here: %s", error)
        return False
    return bool((found - expected[0]).abs().max() < 0.05)


def _mask(attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Return no mask for packed rows, which need none, nor for rows padded on the right, which bring none."""
    from transformers.masking_utils import sdpa_mask

    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **options)


def register() -> None:
    """Make this attention known to `transformers` as `PACKED`."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(PACKED, attend)
    AttentionMaskInterface.register(PACKED, _mask)


def hidden_states(
    decoder: Any, input_ids: Tensor, index: Tensor, positions: Tensor | None = None, packing: Layout | None = None
) -> Tensor:
    """Hidden states [N, H] at the flat positions `index` [N] of `input_ids` [B, T]; with a share, this rank's [n, H].

    Args:
        decoder: decoder of a causal language model.
        input_ids: [1, T] packed; else [B, T] padded on the right, so that no token sees padding.
        index: int64.
        positions: [1, T] int64, positions in each context, if packed.
        packing: places of the contexts, if packed.
    """
    if packing is not None and (share := packing.share) is not None:
        assert positions is not None
        input_ids, positions = share.cut(input_ids), share.cut(positions)
        index = index.index_select(0, share.own) - share.group.rank() * input_ids.shape[1]
    more = {} if packing is None else {"position_ids": positions, "packing": packing}
    hidden: Tensor = decoder(input_ids=input_ids, use_cache=False, **more).last_hidden_state  # [B, T, H]
    return hidden.flatten(0, 1).index_select(0, index)
