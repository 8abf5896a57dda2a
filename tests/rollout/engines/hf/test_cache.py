"""Rows that come and go in the cache: each next token is computed as in a pass over the whole row alone."""

import random
from pathlib import Path

import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.models.batch import TokenBatch
from pipeline.models.policy import Policy, load_policy
from pipeline.rollout.engines.hf.cache import AHEAD, WindowCache


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return load_policy(ModelConfig(path=str(tiny_model), dtype="float32")).eval().requires_grad_(False)


def agrees(policy: Policy, rows: list[list[int]], logits: torch.Tensor) -> bool:
    """True if `logits` are those after the last tokens of whole rows."""
    alone = torch.cat([policy.lm(input_ids=torch.tensor([row])).logits[:, -1] for row in rows])
    return torch.allclose(alone, logits, atol=2e-4)


def test_rows_that_come_and_go_in_any_order(policy: Policy) -> None:
    dice = random.Random(3)
    cache, rows = WindowCache(torch.device("cpu")), list[list[int]]()
    longest = 0
    with torch.inference_mode():
        for step in range(40):
            if dice.random() < 0.3:
                # One of them is longer than all others at times, and each comes several times.
                prompts = [[dice.randrange(3, 300) for _ in range(dice.choice((1, 4, 30)))] for _ in range(2)]
                logits, made = cache.prefill(policy, TokenBatch.of(prompts))
                assert agrees(policy, prompts, logits)
                index = [dice.randrange(2) for _ in range(dice.randrange(4))]
                cache.join(made, index)
                rows += [list(prompts[number]) for number in index]
            if rows:
                rows = [[*row, dice.randrange(3, 300)] for row in rows]
                assert agrees(policy, rows, cache.decode(policy, [row[-1] for row in rows])), step
                longest = max(longest, *map(len, rows))
            if dice.random() < 0.3:
                order = cache.keep(sorted(dice.sample(range(len(rows)), len(rows) // 2)))
                rows = [rows[number] for number in order]
            assert len(cache) == len(rows)
    assert longest > AHEAD // 2


def test_memory_is_allocated_ahead_and_what_rows_that_ended_took_is_used_again(policy: Policy) -> None:
    cache = WindowCache(torch.device("cpu"))
    with torch.inference_mode():
        _, made = cache.prefill(policy, TokenBatch.of([[5] * 10, [6]]))
        cache.join(made, [0, 1])
        held = {layer.keys.data_ptr() for layer in cache._cache.layers}
        for token in range(AHEAD - 10):
            cache.decode(policy, [token, token])
        assert {layer.keys.data_ptr() for layer in cache._cache.layers} == held, "no copy for each token"
        assert cache.keep([1]) == [1]
        assert cache._window.start == 9, "columns that only the other row had are skipped"
        cache.decode(policy, [3])
        assert cache._cache.layers[0].keys.shape[2] == AHEAD
        assert cache.keep([]) == [] and cache._cache is None
    assert made.cell_bytes == 2 * 2 * 2 * 32 * 4, "layers x (keys and values) x heads x dimensions x bytes"
