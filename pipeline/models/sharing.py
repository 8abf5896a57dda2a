"""Prompt sharing: contexts with the same prompt pass through the model behind one copy of it.

    alone       prompt a1 a2      prompt b1 b2 b3
    together    prompt a1 a2 b1 b2 b3

A response sees the prompt and itself, and its positions continue from the prompt's end. Log-probs and gradients are
those of the contexts alone, up to rounding. The prompt is computed once, but attention also covers masked positions and
needs a kernel that takes a mask, so a context joins others only if that is clearly cheaper.
"""

import copy
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.models.batch import TokenBatch, ranges

logger = logging.getLogger(__name__)

MAX_COST = 0.8
"""Largest cost of a context in a pack, relative to its cost alone. Below 1 because the costs are rough estimates."""
TOLERANCE = 0.02
"""Relative difference of hidden states that is taken for rounding, also in bfloat16."""


def pack_rows(
    rows: TokenBatch, index: Sequence[int], max_tokens: int, hidden_size: int | None, whole: bool
) -> tuple[list[list[int]], list[int] | None]:
    """Packs of all contexts of the rows `index`, and which of them must stay together: `units` of `micro_batches.py`.

    Args:
        rows, max_tokens, hidden_size: as in `share_prefixes`.
        index: rows.
        whole: keep the contexts of a row together. A row of several contexts then shares no prompt.
    """
    if rows.are_contexts:
        return share_prefixes(rows, index, max_tokens, hidden_size), None
    chosen = np.asarray(index, dtype=np.int64)
    first = rows.context_offsets[chosen]
    counts = rows.context_offsets[chosen + 1] - first
    if not whole:
        contexts, place = ranges(first, counts), ranges(np.zeros_like(counts), counts)
        # The first contexts of neighbouring rows, which may have the same prompt, become neighbours.
        contexts = contexts[np.argsort(place, kind="stable")]
        return share_prefixes(rows, contexts.tolist(), max_tokens, hidden_size), None
    single = counts == 1
    packs = share_prefixes(rows, first[single].tolist(), max_tokens, hidden_size)
    units = [1] * len(packs) + counts[~single].tolist()
    return packs + [[context] for context in ranges(first[~single], counts[~single]).tolist()], units


def share_prefixes(rows: TokenBatch, index: Sequence[int], max_tokens: int, hidden_size: int | None) -> list[list[int]]:
    """Packs of the contexts `index`, in that order; those of a pack share one copy of their prompt.

    The cost of L tokens in one sequence is estimated as L * (6 H + L), which also bounds a pack's length: per layer and
    token about 24 H^2 operations in matrices and 4 L H in attention (half of that if it is causal).

    Args:
        rows: rows with any prompts; only neighbours in `index` share.
        index: contexts.
        max_tokens: most tokens of a pack; a single context may be longer.
        hidden_size: H of the model; None shares nothing (`shared_size`).
    """
    if hidden_size is None:
        return [[context] for context in index]
    offsets = rows.prompt_offsets
    packs: list[list[int]] = []
    length, pack_prompt = 0, np.empty(0)
    for context in index:
        prompt = rows.prompt_ids[offsets[context] : offsets[context + 1]]
        response = int(rows.response_offsets[context + 1] - rows.response_offsets[context])
        alone, joined = len(prompt) + response, length + response
        added_cost = joined * (6 * hidden_size + joined) - length * (6 * hidden_size + length)
        cheaper = added_cost < MAX_COST * alone * (6 * hidden_size + alone / 2)
        if packs and joined <= max_tokens and cheaper and np.array_equal(prompt, pack_prompt):
            packs[-1].append(context)
            length = joined
        else:
            packs.append([context])
            length, pack_prompt = alone, prompt
    return packs


def attention_inputs(positions: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
    """Arguments of a decoder, beside the ids, for packs.

    Args:
        positions: [B, T] int64, positions in each context.
        segment_ids: [B, T] int64, 0 in the prompt, k in the k-th response of the pack, -1 in padding.
    """
    keys, queries = segment_ids[:, None, :], segment_ids[:, :, None]
    causal = torch.ones(segment_ids.shape[1], segment_ids.shape[1], dtype=torch.bool, device=segment_ids.device).tril()
    # Padding sees itself: a softmax over nothing would give NaN.
    visible = ((keys == 0) | (keys == queries)) & causal
    return {"position_ids": positions, "attention_mask": visible[:, None]}


def hidden_states(
    decoder: Any, input_ids: Tensor, logit_index: Tensor, positions: Tensor | None, segment_ids: Tensor | None
) -> Tensor:
    """Hidden states [N, H] of the flat positions `logit_index` [N] of `input_ids` [B, T], right-padded."""
    more = {} if positions is None or segment_ids is None else attention_inputs(positions, segment_ids)
    hidden: Tensor = decoder(input_ids=input_ids, use_cache=False, **more).last_hidden_state  # [B, T, H]
    return hidden.flatten(0, 1).index_select(0, logit_index)


@torch.no_grad()
def obstacle(decoder: Any) -> str | None:
    """Why contexts cannot share a prompt in this decoder, which FSDP does not shard yet; None if they can.

    It looks at the configuration, and then tries: two responses behind one prompt must have the hidden states that each
    has alone. Where ranks have slices of the weights, a decoder of one layer is tried, with random weights.
    """
    config = decoder.config.get_text_config()
    if config._attn_implementation != "sdpa":
        return f"attention {config._attn_implementation!r} takes no mask of this kind, sdpa does"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        return f"its layers are not all of full attention ({', '.join(sorted(kinds)) or 'sliding_window'})"
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return "it takes no position_ids"
    if any(isinstance(parameter, DTensor) for parameter in decoder.parameters()):
        decoder = _one_layer(decoder)
        config = decoder.config.get_text_config()
    device = decoder.get_input_embeddings().weight.device
    ids = torch.arange(7, device=device)[None] % config.vocab_size
    prompt, first, second = ids[:, :3], ids[:, 3:5], ids[:, 5:]
    positions = torch.tensor([[0, 1, 2, 3, 4, 3, 4]], device=device)
    segment_ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2]], device=device)

    def hidden(tokens: Tensor, **more: Tensor) -> Tensor:
        return decoder(input_ids=tokens, use_cache=False, **more).last_hidden_state[0].float()

    try:
        together = hidden(ids, **attention_inputs(positions, segment_ids))
        alone = hidden(torch.cat([prompt, first], 1)), hidden(torch.cat([prompt, second], 1))
    except Exception as error:  # noqa: BLE001 (whatever a model's own code raises)
        return f"it failed with a mask: {error}"
    expected = torch.cat([alone[0], alone[1][3:]])
    if not (together - expected).abs().max() <= TOLERANCE * expected.abs().max():
        return "it gives other numbers with a mask and positions"
    return None


def _one_layer(decoder: Any) -> Any:
    """A decoder of this class and configuration, but with one layer and few tokens; the same on every rank."""
    config = copy.deepcopy(decoder.config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 1, min(text.vocab_size, 64), None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(decoder)._from_config(config, dtype=decoder.dtype).train(decoder.training)


def shared_size(setting: str, module: Any, device: torch.device) -> int | None:
    """The model's hidden size if contexts share their prompt in it, else None.

    Args:
        setting: `model.share_prompts`.
        module: the model, with a `decoder`; FSDP does not shard it yet.
        device: where it will run.

    Raises ValueError if the setting is `always`, and the model cannot share prompts.
    """
    if setting == "never" or (setting == "auto" and device.type != "cpu"):
        return None
    reason = obstacle(module.decoder)
    if reason is None:
        return int(module.decoder.config.get_text_config().hidden_size)
    if setting == "always":
        raise ValueError(f"model.share_prompts=always, but {type(module.decoder).__name__} cannot: {reason}")
    logger.info("samples do not share their prompt in %s: %s", type(module.decoder).__name__, reason)
    return None
