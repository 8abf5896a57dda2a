"""Prompt sharing: contexts with the same prompt pass through the model after one copy of it.

    apart       prompt a1 a2      prompt b1 b2 b3
    together    prompt a1 a2 b1 b2 b3

A response sees the prompt and itself (`attention.py`), and its positions continue from the prompt's end. Log-probs and
gradients are the same as for separate contexts, up to rounding. Everything but attention computes the prompt once, and
attention never costs more than for separate contexts.
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
"""Relative difference of hidden states that is taken for rounding in float32, and in shorter types."""
LONGEST_TRIED = 512
"""Tokens of a row that is tried before training."""


@dataclass(frozen=True)
class Passes:
    """The passes of rows through a model."""

    packed: bool
    """True if rows stand end to end, without padding."""
    shared: bool
    """True if contexts share their prompt."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Sentences on the choices made for the model."""

    @classmethod
    def of(cls, module: Any, share_prompts: str, sequence: int = 1) -> "Passes":
        """Choose the passes of rows through `module`, which is not sharded yet, and prepare it for them.

        Args:
            module: the model; only one with a `decoder` can pack rows.
            share_prompts: `model.share_prompts`.
            sequence: `actor.parallel.sequence`.

        Raises ValueError if the model cannot pack rows, and the setting is `always` or ranks divide the positions; or
        if a row's numbers depend on the other rows of a pass.
        """
        decoder = getattr(module, "decoder", None)
        reason = "it is not a decoder" if decoder is None else enable(decoder)
        name = type(module if decoder is None else decoder).__name__
        if sequence > 1 and reason:
            raise ValueError(f"actor.parallel.sequence={sequence} divides packed rows, but {name} cannot: {reason}")
        notes = notes_of(module if decoder is None else decoder)
        if reason is None:
            return cls(True, share_prompts != "never", tuple(notes))
        if share_prompts == "always":
            raise ValueError(f"model.share_prompts=always, but {name} cannot: {reason}")
        if decoder is not None:
            if problem := _why_not_padded(decoder):
                raise ValueError(f"{name} cannot be trained: {problem}")
            notes = [*notes, f"rows are padded, and samples do not share their prompt in {name}: {reason}"]
        return cls(False, False, tuple(notes))

    def taking(self, way: Way, module: Any) -> "Passes":
        """Return the passes that `way` describes, and set the attention of `module` to it."""
        module.decoder.config.get_text_config()._attn_implementation = way.attention
        return replace(self, packed=way.packed, shared=way.shared)


def pack_rows(
    rows: TokenBatch, index: Sequence[int], max_tokens: int, shared: bool, whole: bool
) -> tuple[list[list[int]], list[int] | None]:
    """Group all contexts of the rows `index` into packs; returns them, and `units` of packs that must stay together.

    Args:
        rows, max_tokens, shared: as in `share_prefixes`.
        index: rows.
        whole: keep the contexts of a row together. A row of several contexts then shares no prompt.
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
    """Group the contexts `index` into packs, in that order; contexts of a pack share one copy of their prompt.

    Args:
        rows: rows with any prompts; only neighbours in `index` share.
        index: contexts.
        max_tokens: most tokens of a pack; a single context may be longer.
        shared: whether contexts share prompts; else each context is a pack.
    """
    if not shared:
        return [[context] for context in index]
    offsets = rows.prompt_offsets
    packs: list[list[int]] = []
    length, pack_prompt = 0, np.empty(0)
    for context in index:
        prompt = rows.prompt_ids[offsets[context] : offsets[context + 1]]
        response = int(rows.response_offsets[context + 1] - rows.response_offsets[context])
        if packs and length + response <= max_tokens and np.array_equal(prompt, pack_prompt):
            packs[-1].append(context)
            length += response
        else:
            packs.append([context])
            length, pack_prompt = len(prompt) + response, prompt
    return packs


@torch.no_grad()
def enable(decoder: Any) -> str | None:
    """Let a decoder, which FSDP does not shard yet, attend over packed rows; returns why it cannot, or None if it can.

    The configuration is checked first. Then a trial follows: two responses after one prompt, and another context, must
    have the hidden states that each has in a pass of its own. If ranks have slices of the weights, a small decoder is
    tried (`whole`).
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
    """Return why a decoder cannot take rows that are padded on the right; None if it gives a row the same numbers as in
    a pass of its own.

    The longer row in the trial passes each length at which the configuration changes something, if that is short.
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
    """Hidden states [N, H] float32 of the rows' response tokens."""
    batch = pack(rows, packs, packed=packed).to(device)
    return hidden_states(decoder, batch.input_ids, batch.logit_index, batch.positions, batch.packing).float()


def _differ(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two computations in `dtype` differ by more than rounding."""
    tolerance = ROUNDING if dtype == torch.float32 else COARSE_ROUNDING
    return bool((ours - theirs).abs().max() > tolerance * theirs.abs().max())
