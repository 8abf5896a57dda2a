"""Pipeline stages: the division of layers, classes that can be cut, and passes through stages."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GraniteConfig, OPTConfig, Qwen3Config, Qwen3MoeConfig

from pipeline.models.layers import deal_layers
from pipeline.models.mesh import PipelineStage
from pipeline.models.policy import Policy
from pipeline.models.stages import Absent, borrowed, cut, why_whole

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("costs", "first", "last", "stages", "bounds"),
    [
        ([1] * 4, 0, 0, 2, [0, 2, 4]),
        # The embedding and the head are as large as two layers.
        ([1] * 8, 2, 2, 4, [0, 1, 4, 7, 8]),
        ([10] * 28, 60, 60, 4, [0, 4, 14, 24, 28]),
        # The largest stage has the head and one layer; the others are about equal.
        ([1] * 9, 0, 30, 4, [0, 2, 5, 8, 9]),
        ([5, 1, 1, 1], 0, 0, 2, [0, 1, 4]),
        ([3, 3], 1, 1, 1, [0, 2]),
    ],
)
def test_the_largest_stage_is_as_small_as_possible(
    costs: list[int], first: int, last: int, stages: int, bounds: list[int]
) -> None:
    found = deal_layers(costs, first, last, stages)
    sizes = [sum(costs[begin:end]) for begin, end in zip(found, found[1:], strict=False)]
    sizes[0] += first
    sizes[-1] += last
    wanted = [sum(costs[begin:end]) for begin, end in zip(bounds, bounds[1:], strict=False)]
    wanted[0] += first
    wanted[-1] += last
    assert (max(sizes), sum(size**2 for size in sizes)) == (max(wanted), sum(size**2 for size in wanted))
    assert found[0] == 0 and found[-1] == len(costs) and len(found) == stages + 1


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="a model of 2 layers has fewer than 3 stages need"):
        deal_layers([1, 1], 0, 0, 3)
    lm = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match="actor.parallel.pipeline=3: a model of 2 layers"):
        cut(lm, PipelineStage(0, 3))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("config", [Qwen3Config, Qwen3MoeConfig])
def test_stages_after_each_other_are_the_whole_model(config: Any, tie: bool) -> None:
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8} if config is Qwen3MoeConfig else {}
    made = config(**SIZES, tie_word_embeddings=tie, **more)
    torch.manual_seed(0)
    whole = Policy(AutoModelForCausalLM.from_config(made))
    ids = torch.arange(12).view(2, 6)
    index, targets = torch.arange(11), ids.flatten()[1:]
    expected = whole(ids, index, targets)
    hidden, names = None, set()
    for number in range(3):
        lm = AutoModelForCausalLM.from_config(made)
        lm.load_state_dict(whole.lm.state_dict())
        stage = PipelineStage(number, 3)
        cut(lm, stage)
        part = Policy(lm, stage=stage)
        own = {name for name, _ in part.named_parameters()}
        assert not names & own - part.borrowed
        assert bool(part.borrowed) == (tie and number == 2)
        names |= own
        hidden = part(ids, index, targets, hidden=hidden)
    assert names == {name for name, _ in whole.named_parameters()}
    torch.testing.assert_close(hidden.log_probs, expected.log_probs, rtol=0, atol=1e-6)


def test_the_first_stage_owns_a_tied_head() -> None:
    lm = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, tie_word_embeddings=True))
    cut(lm, PipelineStage(1, 2))
    assert borrowed(lm, PipelineStage(1, 2)) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert isinstance(lm.model.layers[0], Absent) and not isinstance(lm.model.layers[4], Absent)
    lm = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, tie_word_embeddings=True))
    cut(lm, PipelineStage(0, 2))
    assert not borrowed(lm, PipelineStage(0, 2)) and isinstance(lm.lm_head, Absent)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen3Config(**SIZES), None),
        (Qwen3Config(**SIZES, tie_word_embeddings=True), None),
        (GPT2Config(n_layer=2, n_embd=16, n_head=2), "no list of layers"),
        (OPTConfig(num_hidden_layers=2), "weights outside of its layers (embed_positions, final_layer_norm)"),
        (GraniteConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}), None),
        (
            GraniteConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, embedding_multiplier=12.0),
            "more than its layers and a norm after them",
        ),
    ],
    ids=["qwen3", "tied", "gpt2", "opt", "granite", "granite with a factor"],
)
def test_only_classes_of_layers_and_a_norm_can_be_cut(config: Any, reason: str | None) -> None:
    found = why_whole(config, AutoModelForCausalLM.from_config)
    assert found is None if reason is None else found is not None and reason in found
