"""Rows behind one copy of their prompt: the same log-probs, values and gradients as alone, and only where it pays."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline.models.attention import PACKED
from pipeline.models.batch import TokenBatch, TrainBatch
from pipeline.models.packing import pack
from pipeline.models.policy import Policy
from pipeline.models.sharing import Passes, enable, share_prefixes
from pipeline.models.value import ValueModel
from pipeline.train.setup import build_actor
from tests.models.test_policy import SIZES, VOCAB, build
from tests.scoring.test_reference import make_stage as reference_stage
from tests.train.updates import COLUMNS, CPU, assert_same, make_config, trained

GROUPS = [
    ((7, 8, 9, 1, 2, 3), (3, 1, 0, 5)),
    ((4,), (2, 2)),
    ((5, 6, 5, 6), (1,)),
    ((9, 9, 9, 9, 9, 9, 9, 9), (6, 4, 2)),
]
"""Prompts, and how long the responses to each are."""


def make_rows(groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = GROUPS, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    made = [
        {
            "uid": str(group),
            "sample": sample,
            "prompt_ids": prompt,
            "response_ids": rng.integers(0, VOCAB, length),
            "response_mask": rng.random(length) < 0.8,
            "rollout_log_probs": rng.normal(-5.7, 0.4, length),
            "advantages": np.full(length, rng.normal()),
            "returns": np.zeros(length),
        }
        for group, (prompt, lengths) in enumerate(groups)
        for sample, length in enumerate(lengths)
    ]
    return pa.Table.from_pylist(made, schema=COLUMNS)


def sequences(groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = GROUPS) -> TokenBatch:
    return TokenBatch.from_table(make_rows(groups))


def numbers(module: Any, rows: TokenBatch, taken: list[list[int]], pad: int = 0) -> torch.Tensor:
    """What the module gives for each response token, in the order of the rows."""
    batch = pack(rows, taken, pad, packed=enable(module.decoder) is None)
    more = {"positions": batch.positions, "packing": batch.packing}
    if isinstance(module, Policy):
        log_probs, entropies, *_ = module(batch.input_ids, batch.logit_index, batch.targets, 0.7, 5, True, **more)
        found = torch.stack([log_probs, entropies], 1)
    else:
        found = module(batch.input_ids, batch.logit_index, **more)[:, None]
    return found[torch.from_numpy(np.argsort(batch.token_index))]


def test_packs_by_hand() -> None:
    rows = sequences([((7, 8), (2, 0, 1)), ((9,), (1,))])
    a = rows.response_ids[0]  # the last token of a response is not in the input
    batch = pack(rows, [[0, 1, 2], [3]], pad_token_id=5, packed=True)
    assert batch.input_ids.tolist() == [[7, 8, a, 9]]
    assert batch.positions is not None and batch.positions.tolist() == [[0, 1, 2, 0]]
    assert batch.logit_index.tolist() == [1, 2, 1, 3]
    assert batch.row_index.tolist() == [0, 0, 2, 3] and batch.sequences == 4
    assert batch.lengths.tolist() == [3, 1] and batch.token_index.tolist() == [0, 1, 2, 3]
    padded = pack(rows, [[0], [1], [2], [3]], pad_token_id=5)
    assert padded.input_ids.tolist() == [[7, 8, a], [7, 8, 5], [7, 8, 5], [9, 5, 5]]
    assert padded.positions is None and padded.packing is None and padded.sequences == 4
    assert padded.logit_index.tolist() == [1, 2, 7, 9]


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3-untied", "cohere-scale", "granite-scaling"])
@pytest.mark.parametrize("kind", [Policy, ValueModel])
def test_numbers_and_gradients_are_those_of_the_rows_alone(family: str, kind: type) -> None:
    lm = build(family).lm
    module: Any = Policy(lm) if kind is Policy else ValueModel(lm)
    if kind is ValueModel:
        torch.nn.init.normal_(module.head.weight)
    rows = sequences()
    alone = [[row] for row in range(len(rows))]
    together = share_prefixes(rows, range(len(rows)), 1000, True)
    assert together == [[0, 1, 2, 3], [4, 5], [6], [7, 8, 9]]
    found = []
    for taken in (alone, together, [[9, 7], [1, 2, 0], [4], [5], [6], [8], [3]]):
        module.zero_grad()
        given = numbers(module, rows, taken, pad=3)
        (given * torch.linspace(-1, 1, given.numel()).reshape(given.shape)).sum().backward()
        found.append(
            (given.detach(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        )
    for given, grads in found[1:]:
        torch.testing.assert_close(given, found[0][0], atol=1e-5, rtol=0)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, found[0][1][name], atol=1e-4, rtol=1e-4)


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12).map(tuple)
ragged_groups = st.lists(st.tuples(prompts, st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple)), max_size=4)


@settings(max_examples=40)
@given(ragged_groups, st.integers(21, 60), st.randoms(use_true_random=False))
def test_packs_are_complete_and_bounded(groups: Any, budget: int, random: Any) -> None:
    rows = sequences(groups)
    index = sorted(random.sample(range(len(rows)), random.randint(0, len(rows))))
    packs = share_prefixes(rows, index, budget, True)
    assert [row for members in packs for row in members] == index
    assert share_prefixes(rows, index, budget, False) == [[row] for row in index]
    for members, length in zip(packs, rows.pack_lengths(packs), strict=True):
        own = {tuple(rows.prompt_ids[rows.prompt_offsets[i] : rows.prompt_offsets[i + 1]]) for i in members}
        assert len(own) == 1 and (length <= budget or len(members) == 1)
    policy = build("qwen3-untied")
    with torch.no_grad():
        apart = numbers(policy, rows, [[row] for row in index])
        torch.testing.assert_close(numbers(policy, rows, packs), apart, atol=1e-5, rtol=0)


def test_a_pack_ends_at_the_budget() -> None:
    rows = sequences([((1,) * 400, (4,) * 4)])
    assert share_prefixes(rows, range(4), 10_000, True) == [[0, 1, 2, 3]]
    assert share_prefixes(rows, range(4), 409, True) == [[0, 1], [2, 3]]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("changes", [{}, {"old_log_probs": "recompute"}, {"loss_agg_mode": "seq-mean-token-mean"}])
def test_the_step_is_the_same(tiny_model: Path, changes: dict[str, Any]) -> None:
    rows = make_rows([((11, 12, 13, 14, 15), (3, 6)) for _ in range(4)] + [((20 + i,) * 6, (2, 7)) for i in range(4)])
    found = []
    # Packed alone, packed behind shared prompts twice, and padded, which is all that eager attention can.
    for share, attention in (("never", "sdpa"), ("auto", "sdpa"), ("always", "sdpa"), ("auto", "eager")):
        config = make_config(tiny_model, **changes)
        config.model.share_prompts, config.model.attn_implementation = share, attention
        found.append(trained(config, rows, rows))
    for metrics, weights in found[1:]:
        assert_same(found[0][1], weights)
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert metrics[name] == pytest.approx(found[0][0][name], rel=1e-3, abs=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_fewer_tokens_go_through_the_model(tiny_model: Path) -> None:
    rows = TrainBatch.from_table(make_rows([((30,) * 20, (4,) * 8)] * 2))

    def passed(share: str) -> int:
        config = make_config(tiny_model)
        config.model.share_prompts = share
        actor = build_actor(config, CPU, iterations=1)
        return sum(int(batch.lengths.sum()) for batch in actor.micro_batches(rows, list(range(16))))

    assert passed("never") == 16 * 23
    assert passed("auto") == passed("always") == 20 + 16 * 3  # two groups with the same prompt are as good as one


def test_replicas_share(tiny_model: Path) -> None:
    rows, found = make_rows(), []
    for share in ("never", "auto"):
        reference = reference_stage(tiny_model, 0.7, share=share)
        seen: list[tuple[int, ...]] = []
        reference._replica.module.lm.get_decoder().register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        found.append((np.concatenate([np.asarray(row) for row in reference(rows)["ref_log_probs"].to_pylist()]), seen))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-5)
    assert sum(b * t for b, t in found[1][1]) < sum(b * t for b, t in found[0][1])


REFUSED = {
    "sliding": (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES)), "sliding_attention"),
    "recurrent": (lambda: FalconH1ForCausalLM(FalconH1Config(**SIZES, mamba_d_ssm=32, mamba_n_heads=4)), ""),
    "alibi": (lambda: BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_are_found_out(name: str) -> None:
    make, reason = REFUSED[name]
    torch.manual_seed(0)
    decoder = make().get_decoder()
    found = enable(decoder)
    assert found is not None and reason in found
    assert decoder.config._attn_implementation != PACKED
    module = type("Module", (), {"decoder": decoder})
    for setting in ("auto", "never"):
        assert Passes.of(module, setting) == Passes(packed=False, shared=False)
    with pytest.raises(ValueError, match=r"model\.share_prompts=always, but"):
        Passes.of(module, "always")
    with pytest.raises(ValueError, match=r"actor\.parallel\.sequence=2 divides packed rows, but"):
        Passes.of(module, "auto", 2)


def test_models_that_can() -> None:
    torch.manual_seed(0)
    for lm in (
        Qwen3ForCausalLM(Qwen3Config(**SIZES)),
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)),
        GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=64)),
    ):
        decoder = lm.eval().get_decoder()
        for other in ("eager", "flash_attention_2"):
            decoder.config._attn_implementation = other
            assert other in str(enable(decoder))
        decoder.config._attn_implementation = "sdpa"
        assert enable(decoder) is None and enable(decoder) is None
        module = type("Module", (), {"decoder": decoder})
        assert Passes.of(module, "never") == Passes(packed=True, shared=False)
        assert Passes.of(module, "auto") == Passes.of(module, "always") == Passes(packed=True, shared=True)
