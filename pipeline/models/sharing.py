"""Prompt sharing: responses to the same prompt pass through the model after a single copy of the prompt.

    apart       prompt a1 a2      prompt b1 b2 b3
    together    prompt a1 a2 b1 b2 b3

The tokens of a response attend to the prompt and to their own response (`attention.py`), and their positions continue
from the prompt's end. Log-probs and gradients are the same as for separate contexts, up to rounding. Everything but
attention computes the prompt once, and attention never costs more than for separate contexts.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.greeting import Way, borders
from pipeline.models.architecture import why_padded
from pipeline.models.attention import PACKED, hidden_states, register
from pipeline.models.batch import TokenBatch, ranges
from pipeline.models.notes import notes_of
from pipeline.models.one_layer import whole
from pipeline.models.packing import pack

ROUNDING, COARSE_ROUNDING = 1e-4, 0.02
"""Relative differences of hidden states up to which two computations are equal but for rounding: the first in float32,
the second in shorter types."""
LONGEST_TRIED = 512
"""Longest limit in a model's configuration, in tokens, that the trial of padded rows exceeds with a row."""


@dataclass(frozen=True)
class Passes:
    """The form in which rows pass through a model: packed or padded, with or without shared prompts."""

    packed: bool
    """True if rows lie end to end in one sequence, without padding; False if they are padded on the right."""
    shared: bool
    """True if responses to the same prompt share one copy of it."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Sentences for the user on choices that were made while the model was loaded and here."""

    @classmethod
    def of(cls, module: Any, share_prompts: str, sequence: int = 1) -> "Passes":
        """Choose the form in which rows pass through `module`: packed if its decoder can, else padded.

        A decoder that can pack gets the attention `PACKED`.

        Args:
            module: the model, not sharded yet. Only a model with a `decoder` can pack rows.
            share_prompts: `model.share_prompts`.
            sequence: `actor.parallel.sequence`.

        Raises ValueError if the model cannot pack rows, and `share_prompts` is `always` or `sequence` is above 1. Also
        if it cannot pack rows, and in a padded pass the hidden states of a row depend on the other rows.
        """
        decoder = getattr(module, "decoder", None)
        reason = "it is not a decoder" if decoder is None else enable(decoder)
        name = type(module if decoder is None else decoder).__name__
        if sequence > 1 and reason:
            raise ValueError(f"actor.parallel.sequence={sequence} divides packed rows, but {name} cannot: {reason}")
        notes = notes_of(module if decoder is None else decoder)
        if reason is None:
            return cls(True, share_prompts != "never", tuple(notes))
        if getattr(module, "image_reader", None) is not None:
            raise ValueError(f"model.vision needs packed rows, but {name} cannot: {reason}")
        if share_prompts == "always":
            raise ValueError(f"model.share_prompts=always, but {name} cannot: {reason}")
        if decoder is not None:
            if problem := _why_not_padded(decoder):
                raise ValueError(f"{name} cannot be trained: {problem}")
            notes = [*notes, f"rows are padded, and samples do not share their prompt in {name}: {reason}"]
        return cls(False, False, tuple(notes))

    def taking(self, way: Way, module: Any) -> "Passes":
        """Return these passes with the form of rows of `way`, and set the attention of `module` to the one of `way`."""
        module.decoder.config.get_text_config()._attn_implementation = way.attention
        return replace(self, packed=way.packed, shared=way.shared)


def pack_rows(
    rows: TokenBatch, index: Sequence[int], max_tokens: int, shared: bool, whole: bool
) -> tuple[list[list[int]], list[int] | None]:
    """Group all contexts of the rows `index` into packs.

    Args:
        rows, max_tokens, shared: as in `share_prefixes`.
        index: numbers of rows.
        whole: whether all contexts of a row must be in one pass. A row of several contexts then shares no prompt.

    Returns:
        the packs, each a list of context numbers; and `units` for `split_micro_batches`, the number of packs in each
        unit that must be in one pass, or None if each pack is independent.
    """
    if rows.are_contexts:
        return share_prefixes(rows, index, max_tokens, shared), None
    chosen = np.asarray(index, dtype=np.int64)
    first = rows.context_offsets[chosen]
    counts = rows.context_offsets[chosen + 1] - first
    if not whole:
        contexts, place = ranges(first, counts), ranges(np.zeros_like(counts), counts)
        # The first contexts of neighbouring rows, which may have the same prompt, become neighbours.
        contexts = contexts[np.argsort(place, kind="stable")]
        return share_prefixes(rows, contexts.tolist(), max_tokens, shared), None
    single = counts == 1
    packs = share_prefixes(rows, first[single].tolist(), max_tokens, shared)
    units = [1] * len(packs) + counts[~single].tolist()
    return packs + [[context] for context in ranges(first[~single], counts[~single]).tolist()], units


def share_prefixes(rows: TokenBatch, index: Sequence[int], max_tokens: int, shared: bool) -> list[list[int]]:
    """Group the contexts `index`, in that order, into packs that each have one copy of their prompt.

    Args:
        rows: the rows.
        index: numbers of contexts. Only neighbours with equal prompts, equal images in them, and equal experts of their
            tokens, share a pack.
        max_tokens: most tokens of a pack; a pack of a single context may be longer.
        shared: whether contexts share prompts; else each context is a pack.

    Returns:
        the packs, each a list of context numbers.
    """
    if not shared:
        return [[context] for context in index]
    offsets = rows.prompt_offsets
    packs: list[list[int]] = []
    length, pack_prompt = 0, np.empty(0)
    for context in index:
        prompt = rows.prompt_ids[offsets[context] : offsets[context + 1]]
        response = int(rows.response_offsets[context + 1] - rows.response_offsets[context])
        if (
            packs
            and length + response <= max_tokens
            and np.array_equal(prompt, pack_prompt)
            # Placeholders of different images are the same tokens.
            and (rows.images is None or rows.images[context] == rows.images[packs[-1][0]])
            and _same_experts(rows, context, packs[-1][0])
        ):
            packs[-1].append(context)
            length += response
        else:
            packs.append([context])
            length, pack_prompt = len(prompt) + response, prompt
    return packs


def _same_experts(rows: TokenBatch, context: int, other: int) -> bool:
    """Return whether the tokens of two contexts' prompts, which are equal, had the same experts in the engine."""
    if rows.routes is None:
        return True
    count = int(rows.prompt_offsets[context + 1] - rows.prompt_offsets[context])
    first, second = (rows.routes[start : start + count] for start in rows.token_offsets[[context, other]])
    return np.array_equal(first, second)


@torch.no_grad()
def enable(decoder: Any) -> str | None:
    """Let a decoder attend over packed rows, if it can. Returns None, or the reason why it cannot.

    The configuration is checked first. Then a trial follows: two responses after one prompt, and another context, must
    get the same hidden states in one packed pass as in a separate pass each. If this rank has only slices of the
    weights, the trial runs on a small decoder of the same class (`one_layer.whole`).

    Args:
        decoder: decoder of a `transformers` model, not sharded by FSDP yet.
    """
    config = own = decoder.config.get_text_config()
    if config._attn_implementation == PACKED:
        return None
    if config._attn_implementation != "sdpa":
        return f"only attention 'sdpa' can be replaced by that over packed rows, not {config._attn_implementation!r}"
    if reason := why_padded(config):
        return reason
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return "it takes no position_ids"
    decoder = whole(decoder)
    config = decoder.config.get_text_config()
    device = decoder.get_input_embeddings().weight.device
    prompts, responses = np.array([0, 1, 2, 0, 1, 2, 3]), np.array([4, 5, 6, 7, 1, 2, 5])
    ends = np.array([0, 3, 6, 7]), np.array([0, 2, 5, 7])
    rows = TokenBatch(prompts % config.vocab_size, ends[0], responses % config.vocab_size, ends[1], np.arange(4))
    register()
    try:
        expected = torch.cat([_hidden(decoder, rows, [[row]], False, device) for row in range(3)])
        config._attn_implementation = PACKED
        together = _hidden(decoder, rows, [[0, 1], [2]], True, device)
        if not _differ(together, expected, decoder.dtype):
            own._attn_implementation = PACKED
            return None
        reason = "it gives other numbers with packed rows"
    except Exception as error:  # noqa: BLE001 (a model's own code may raise anything)
        reason = f"it failed with packed rows: {error}"
    config._attn_implementation = "sdpa"
    return reason


@torch.no_grad()
def _why_not_padded(decoder: Any) -> str | None:
    """Return why a decoder cannot take rows that are padded on the right, or None if it can.

    It can if a short row next to a longer row in one pass gets the same hidden states as in a separate pass. The longer
    row exceeds each length at which the model's attention or positions change (`greeting.borders`), up to
    `LONGEST_TRIED`.
    """
    decoder = whole(decoder)
    config = decoder.config.get_text_config()
    device = decoder.get_input_embeddings().weight.device
    longest = max([length for length, _ in borders(config.to_dict()) if length <= LONGEST_TRIED], default=0) + 8
    lengths = np.array([6, longest])
    tokens = np.arange(1, lengths.sum() + 1) % config.vocab_size
    ends = np.concatenate([[0], np.cumsum(lengths)])
    rows = TokenBatch(tokens[:2], np.array([0, 1, 2]), tokens[2:], ends - np.array([0, 1, 2]), np.arange(3))
    try:
        alone = _hidden(decoder, rows, [[0]], False, device)
        beside = _hidden(decoder, rows, [[0], [1]], False, device)[: len(alone)]
    except Exception:  # noqa: BLE001 (it fails again, and is reported, when it trains)
        return None
    if not _differ(beside, alone, decoder.dtype):
        return None
    apart = float((beside - alone).abs().max() / alone.abs().max())
    return (
        f"the numbers of a row of {lengths[0]} tokens change by {apart:.1e} next to one of {longest} tokens in the "
        "same pass, so the log-probs of a row would depend on its neighbours"
    )


def _hidden(decoder: Any, rows: TokenBatch, packs: list[list[int]], packed: bool, device: torch.device) -> Tensor:
    """[N, H] float32, last hidden states of the decoder at the positions that predict the N response tokens.

    Args:
        decoder: the decoder.
        rows: the rows.
        packs: numbers of the contexts in each pack; all packs are in one pass.
        packed: whether packs lie end to end; else they are padded.
        device: device of the pass.
    """
    batch = pack(rows, packs, packed=packed).to(device)
    return hidden_states(decoder, batch.input_ids, batch.logit_index, batch.positions, batch.packing).float()


def _differ(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two results of a computation in `dtype` differ by more than rounding explains."""
    tolerance = ROUNDING if dtype == torch.float32 else COARSE_ROUNDING
    return bool((ours - theirs).abs().max() > tolerance * theirs.abs().max())
