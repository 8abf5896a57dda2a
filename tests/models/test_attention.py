"""Attention over packed rows: what each context computes is what it computes alone."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.models.attention import MASKED_QUERIES, Layout, attend, layout

HEADS, KEY_HEADS, DIMS = 4, 2, 8
LONG = 128
PACKS = [
    (3, (2, 4, 1)),
    (1, (0,)),
    (LONG, (9, 3, LONG + 5, 20, 90)),
    (40, (200,)),
    (LONG + 1, (2, 60)),
    (LONG, (1, 1)),
    (7, (30, 31, 29)),
    (16, (4, MASKED_QUERIES + 1, 2 * MASKED_QUERIES + 30)),
]
"""Tokens of a prompt, and of the responses behind it."""


def laid_out(packs: list[tuple[int, tuple[int, ...]]]) -> tuple[np.ndarray, int]:
    """Contexts for `layout` of packs end to end, and their tokens."""
    contexts, start = [], 0
    for prompt, responses in packs:
        end = start + prompt
        for response in responses:
            contexts.append([start, prompt, end, response])
            end += response
        start = end
    return np.array(contexts), start


def alone(states: list[Tensor], contexts: np.ndarray, total: int) -> Tensor:
    """[1, T, heads, D] one context at a time, with `transformers`' way to share key heads."""
    found = torch.zeros(1, total, HEADS, DIMS)
    for prompt, count, response, tokens in contexts.tolist():
        index = [*range(prompt, prompt + count), *range(response, response + tokens)]
        query, key, value = (part[:, :, index] for part in states)
        key, value = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (key, value))
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3).transpose(1, 2)
        found = found.index_put((torch.tensor(0), torch.tensor(index)), output[0])
    return found


@pytest.mark.parametrize("packs", [PACKS, PACKS[:1], PACKS[1:2], PACKS[3:4], PACKS[::-1]])
def test_outputs_and_gradients_are_those_of_each_context_alone(packs: Any) -> None:
    contexts, total = laid_out(packs)
    made = layout(contexts, total)
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, total, heads, DIMS, generator=generator).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    weight = torch.randn(1, total, HEADS, DIMS, generator=generator)
    found = []
    for output in (attend(None, *states, None, scaling=0.3, packing=made)[0], alone(states, contexts, total)):  # type: ignore[misc, arg-type]
        found.append((output, *torch.autograd.grad((output * weight).sum(), states)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_attention_in_bfloat16_is_computed_in_float32_on_a_cpu() -> None:
    contexts, total = laid_out(PACKS[:3])
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, total, DIMS, generator=generator).bfloat16() for heads in (4, 2, 2)]
    made = layout(contexts, total)
    exact, _ = attend(None, *(part.float() for part in states), None, packing=made)
    found, _ = attend(None, *states, None, packing=made)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())


def test_blocks_hold_contexts_of_similar_length_and_responses_ask_alone_behind_long_prompts() -> None:
    contexts, total = laid_out(PACKS)
    made = layout(contexts, total)
    blocks = [
        (block.contexts, len(block.queries) // block.contexts, len(block.keys) // block.contexts)
        for block in made.blocks
    ]
    long = MASKED_QUERIES
    assert blocks == [
        (1, 240, 240),
        (3, LONG + 9, LONG + 9),
        (3, 38, 38),
        (4, 20, 20),
        (1, 1, 1),
        (1, 2 * long + 30, 2 * long + 46),
        (1, long + 1, long + 17),
        (1, LONG + 5, 2 * LONG + 5),
        (1, 90, LONG + 90),
        (1, 20, LONG + 20),
        (2, 3, LONG + 3),
        (1, 60, LONG + 61),
    ]
    assert [block.mask is not None for block in made.blocks] == [False] * 5 + [True] * 7
    assert sum(len(block.keys) for block in made.blocks) < 1.1 * int((contexts[:, 1] + contexts[:, 3]).sum())


def test_long_responses_ask_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def attention(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
        asked.append((query.shape[2], key.shape[2]))
        return query

    monkeypatch.setattr("pipeline.models.attention.scaled_dot_product_attention", attention)
    contexts, total = laid_out([(16, (1, 600))])
    states = [torch.zeros(1, HEADS, total, DIMS) for _ in range(3)]
    attend(None, *states, None, packing=layout(contexts, total))  # type: ignore[misc]
    assert asked == [(17, 17), (256, 272), (256, 528), (88, 616)]


def test_many_short_rows_are_few_calls() -> None:
    random = np.random.default_rng(0)
    contexts, total = laid_out([(int(random.integers(15, 20)), (int(random.integers(6, 17)),)) for _ in range(512)])
    assert len(layout(contexts, total).blocks) <= 2


def test_flash_attention_is_told_where_each_contexts_own_tokens_and_keys_are() -> None:
    contexts, total = laid_out([(3, (2, 1)), (2, (1,))])
    made = layout(contexts, total)
    assert made.keys is not None and made.keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8]
    assert made.query_ends.tolist() == [0, 5, 6, 9] and made.key_ends.tolist() == [0, 5, 9, 12]
    assert made.longest == (5, 5)
    assert layout(*laid_out([(3, (2,)), (2, (1,))])).keys is None


def test_a_layout_moves_as_a_whole() -> None:
    made = layout(*laid_out(PACKS)).to("meta")
    assert isinstance(made, Layout)
    tensors = [made.answers, made.keys, made.query_ends, made.key_ends]
    for block in made.blocks:
        tensors += [block.queries, block.keys, block.mask]
    assert {part.device.type for part in tensors if part is not None} == {"meta"}


def test_without_a_layout_it_is_the_attention_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, HEADS, 5, DIMS, generator=generator) for _ in range(3))
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    found, _ = attend(module, query, key, value, None)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(found, expected)
