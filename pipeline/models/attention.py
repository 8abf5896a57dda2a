"""Attention over packed rows: contexts lie end to end in one sequence, and each attends only to itself.

    input_ids   prompt a a a b b | prompt c c        a and b share their prompt
    contexts    prompt a a a,  prompt b b,  prompt c c

Outside of attention a model works on single tokens, so rows are not padded, and a shared prompt is computed once. For
attention the queries, keys and values of each context are gathered, and causal attention runs on them:

- Contexts of similar length attend in one call, padded on the right to the longest; no token attends to the padding.
  (One call per context would be slow for many short contexts; one call for all lengths would waste work.)
- If responses share a prompt of at least `LONG_PROMPT` tokens, each response has queries only for its own tokens, and
  a mask that lets them see the prompt and earlier response tokens. CPUs also compute what the mask hides, so long
  responses are computed there in sections, each with the keys up to its end.
- On CPUs attention is computed in float32, also if the model computes in bfloat16.
- On GPUs, in bfloat16 or float16, one call of flash attention's kernel for rows of any length serves all contexts, if
  a trial shows that the kernel gives the right numbers.

The layout of the contexts is an argument of the decoder, and `transformers` passes it on to `attend`.
"""

import functools
import logging
from collections.abc import Mapping
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
"""Name under which `transformers` knows this attention."""
LONG_PROMPT = 16
"""Shortest shared prompt, in tokens, that gets queries only once. For shorter ones fewer, larger calls are faster."""
MASKED_QUERIES = 256
"""Most queries (tokens) in one call with a mask on a CPU."""


@dataclass(frozen=True)
class Block:
    """C contexts of similar length that attend in one call, with Q queries and K keys each."""

    contexts: int
    """Number of contexts C."""
    queries: Tensor
    """[C * Q] int64, positions of the queries in the packed sequence, context after context. Shorter contexts are
    padded by repeating their last position."""
    keys: Tensor
    """[C * K] int64, positions of the keys, padded in the same way. Equal to `queries` if all tokens have queries; else
    only the last Q of the K tokens of each context do."""
    mask: Tensor | None
    """[Q, K] bool, true if the query may attend to the key; None for plain causal attention."""


@dataclass(frozen=True)
class Layout:
    """Positions of C contexts in a packed sequence of T tokens, in the forms that attention needs.

    The own tokens of a context are its response and, for the first context of a shared prompt, the prompt.
    """

    blocks: list[Block]
    """The contexts, grouped by similar length."""
    answers: Tensor
    """[T] int64, index of each position's output in the concatenated outputs of `blocks`."""
    keys: Tensor | None
    """[sum of context lengths] int64, positions of all tokens of each context, context after context, for flash
    attention; None if that is 0, 1, ..., T - 1, as without shared prompts."""
    query_ends: Tensor
    """[C + 1] int32, cumulative number of own tokens of the contexts, from 0."""
    key_ends: Tensor
    """[C + 1] int32, cumulative number of all tokens of the contexts, shared prompts included, from 0."""
    longest: tuple[int, int]
    """Largest number of own tokens of a context, and largest number of all its tokens."""
    share: Share | None = None
    """This rank's share of the positions with sequence parallelism; None if each rank has all positions."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on `device`."""

        def moved(part: Any) -> Any:
            tensors = {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}
            return replace(part, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})

        share = None if self.share is None else moved(self.share)
        return replace(moved(self), blocks=[moved(block) for block in self.blocks], share=share)


def layout(contexts: np.ndarray, total: int) -> Layout:
    """Compute the layout of C contexts in a packed sequence; every token must belong to a context.

    Args:
        contexts: [C, 4] int64: first position of the prompt, number of prompt tokens, first position of the response,
            number of response tokens. Contexts that share a prompt are neighbours; all but the first of these need at
            least one response token.
        total: number of tokens T of the sequence.
    """
    prompts, prompt_counts, responses, counts = contexts.T
    shares = np.diff(prompts, prepend=-1) == 0
    lengths = prompt_counts + counts
    silent = np.where(shares & (prompt_counts >= LONG_PROMPT), prompt_counts, 0)
    """[C] number of tokens at the beginning of each context that have no query in the block of this context."""
    asking = lengths - silent

    def positions(members: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return positions in the packed sequence of tokens of contexts.

        Args:
            members: numbers of contexts.
            places: numbers of tokens within the context, from 0; broadcast with `members`.
        """
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
        query: [1, heads, T, D], the packed sequence; with sequence parallelism (`packing.share`) T / S positions.
        key, value: [1, key heads, T or T / S, D].
        attention_mask: only without `packing`.
        scaling: factor of the attention scores; None for 1 / sqrt(D).
        packing: layout of the contexts; None for the sdpa attention of `transformers`, over rows that are not packed.
            With a share this is a collective.
        options: further arguments of the sdpa attention of `transformers`.

    Returns:
        [1, T or T / S, heads, D], and None in place of the attention weights.
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
    """[T, heads, D], attention of each context to itself.

    Args:
        rows: queries [T, heads, D], keys [T, key heads, D], values [T, key heads, D].
        packing: layout of the contexts.
        scaling: factor of the attention scores; None for 1 / sqrt(D).
    """
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
    """[C, heads, Q, D], causal attention in C contexts of K tokens each; queries belong to the last Q tokens.

    Args:
        query: [C, heads, Q, D].
        key, value: [C, key heads, K, D].
        mask: [Q, K] bool if K > Q; None if Q = K.
        scaling: factor of the attention scores; None for 1 / sqrt(D).
    """
    dtype = query.dtype
    if dtype == torch.bfloat16 and query.device.type == "cpu":
        # In bfloat16 torch's backward pass takes three times as long for short contexts.
        query, key, value = query.float(), key.float(), value.float()
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
    return torch.cat(outputs, 2).to(dtype)


def _varlen(rows: tuple[Tensor, ...], packing: Layout, scaling: float | None) -> Tensor:
    """[T, heads, D], as `_over_contexts`, by flash attention's kernel for rows of any length.

    The queries of a context are its own tokens. They are the last of the context's keys, as the kernel's causal mask
    requires.
    """
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
    """Return whether flash attention's kernel for rows of any length gives the right numbers on GPU number `device`."""
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
    """Make the attention mask of a forward pass, for `transformers`: None unless the caller has given a mask.

    Packed rows and rows padded on the right need no mask.
    """
    from transformers.masking_utils import sdpa_mask

    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **options)


def register() -> None:
    """Register `attend` in `transformers` as the attention implementation `PACKED`."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(PACKED, attend)
    AttentionMaskInterface.register(PACKED, _mask)


def decode(
    decoder: Any,
    input_ids: Tensor,
    positions: Tensor | None = None,
    packing: Layout | None = None,
    given: Mapping[str, Any] | None = None,
) -> Tensor:
    """[B, T, H] last hidden states of the decoder, [1, T / S, H] with sequence parallelism. Arguments are as in
    `hidden_states`."""
    if packing is not None and (share := packing.share) is not None:
        assert positions is not None
        input_ids, positions = share.cut(input_ids), share.cut(positions)
    more = {} if packing is None else {"position_ids": positions, "packing": packing}
    hidden: Tensor = decoder(**(given or {"input_ids": input_ids}), use_cache=False, **more).last_hidden_state
    return hidden


def hidden_states(
    decoder: Any,
    input_ids: Tensor,
    index: Tensor,
    positions: Tensor | None = None,
    packing: Layout | None = None,
    given: Mapping[str, Any] | None = None,
) -> Tensor:
    """[N, H] last hidden states of the decoder at the positions `index`.

    With sequence parallelism (`packing.share`) the result is [n, H], the n of these positions that this rank has.

    Args:
        decoder: decoder of a causal language model.
        input_ids: [1, T] packed; else [B, T] padded on the right, so that no token attends to padding.
        index: [N] int64, indices into the flattened `input_ids`.
        positions: [1, T] int64, positions in each context, if packed.
        packing: layout of the contexts, if packed.
        given: arguments of the decoder that take the place of `input_ids`, such as embeddings with images; with
            sequence parallelism of this rank's positions.
    """
    return at(decode(decoder, input_ids, positions, packing, given), index, packing)


def at(hidden: Tensor, index: Tensor, packing: Layout | None) -> Tensor:
    """[N, H] hidden states at the positions `index`; [n, H] with sequence parallelism. Arguments are as in
    `hidden_states`, `hidden` as from `decode`."""
    if packing is not None and (share := packing.share) is not None:
        index = index.index_select(0, share.own) - share.group.rank() * hidden.shape[1]
    return hidden.flatten(0, 1).index_select(0, index)
