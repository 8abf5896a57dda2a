"""The handshake finds what is wrong in the trainer's model, against a real engine with the right one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.config import Config
from pipeline.greeting import Greeting, GreetingPlan, Way
from pipeline.models import handshake
from pipeline.models.handshake import Compared, sentence, shake_hands
from pipeline.models.policy import Policy, load_policy
from pipeline.models.sharing import Passes
from tests.families import LONGEST, WINDOW, greet, save

CPU = torch.device("cpu")


def gemma2(vocabulary: int) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        initializer_range=0.1,
        max_position_embeddings=512,
    )
    return Gemma2ForCausalLM(config)


def glm4_moe(vocabulary: int) -> Any:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        initializer_range=0.1,
        max_position_embeddings=512,
    )
    model = Glm4MoeForCausalLM(config)
    model.model.layers[1].mlp.gate.e_score_correction_bias.uniform_(-0.2, 0.2)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save(made[family], {"gemma2": gemma2, "glm4_moe": glm4_moe}[family])
        return made[family]

    return get


@pytest.fixture(scope="module")
def greeted(tiny_model: Path, folder: Callable[[str], Path]) -> Callable[..., tuple[Path, GreetingPlan, Greeting]]:
    made: dict[Any, tuple[Path, GreetingPlan, Greeting]] = {}

    def get(family: str, dtype: str = "float32") -> tuple[Path, GreetingPlan, Greeting]:
        if (family, dtype) not in made:
            path = tiny_model if family == "qwen3" else folder(family)
            made[family, dtype] = path, *greet(path, dtype)
        return made[family, dtype]

    return get


def policy_of(path: Path) -> tuple[Policy, Passes]:
    config = Config()
    config.model.path = str(path)
    policy = load_policy(config.model, longest=LONGEST)
    return policy, Passes.of(policy, "auto")


def found(
    policy: Policy, passes: Passes, greeting: Greeting, dtype: torch.dtype = torch.float32
) -> handshake.Comparison:
    compared = Compared(policy, greeting, CPU, 256)
    return shake_hands(compared, passes, dtype == torch.float32, dtype)


def at_first(found: handshake.Comparison) -> handshake.Comparison:
    """As if there were no other way."""
    return replace(found, way=found.first, differences=found.before)


def rotary(policy: Policy) -> Any:
    return policy.decoder.rotary_emb


def rope_base(policy: Policy) -> None:
    rope = rotary(policy)
    steps = torch.arange(len(rope.inv_freq)) / len(rope.inv_freq)
    rope.inv_freq = rope.inv_freq * (10_000 / 12_000) ** steps


def no_cap(policy: Policy) -> None:
    policy.decoder.config._attn_implementation = "sdpa"


def window(policy: Policy) -> None:
    policy.decoder.config.sliding_window = WINDOW - 1
    for layer in policy.decoder.layers:
        layer.self_attn.sliding_window = layer.self_attn.sliding_window and WINDOW - 1


def epsilon(policy: Policy) -> None:
    for name, part in policy.named_modules():
        if name.endswith("norm"):
            part.eps = 0.01


def tied_head(policy: Policy) -> None:
    head = policy.lm.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone() * 1.01)


def router_bias(policy: Policy) -> None:
    policy.decoder.layers[1].mlp.gate.e_score_correction_bias.zero_()


def embedding_scale(policy: Policy) -> None:
    policy.decoder.embed_tokens.embed_scale *= 1.02


def wrong_dtype(policy: Policy) -> None:
    policy.bfloat16()


def positions(policy: Policy) -> None:
    """Samples behind a shared prompt go on behind each other."""
    forward = policy.forward

    def shifted(*args: Any, positions: Any = None, **options: Any) -> Any:
        if positions is not None:
            positions = torch.arange(positions.shape[1], device=positions.device)[None]
        return forward(*args, positions=positions, **options)

    policy.forward = shifted  # type: ignore[method-assign]


FAULTS: dict[str, tuple[str, Callable[[Policy], None], str]] = {
    "rope base": ("qwen3", rope_base, "alone"),
    "no cap on scores": ("gemma2", no_cap, "alone"),
    "window": ("gemma2", window, f"longer than sliding_window={WINDOW}, "),
    "epsilon of the norm": ("gemma2", epsilon, "alone"),
    "tied head": ("qwen3", tied_head, "alone"),
    "router bias": ("glm4_moe", router_bias, "alone"),
    "scale of embeddings": ("gemma2", embedding_scale, "alone"),
    "wrong type": ("qwen3", wrong_dtype, "alone"),
    "positions": ("qwen3", positions, "after a shared prompt"),
}


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * ("router" in name)) for name in FAULTS])
def test_a_fault_is_found(name: str, greeted: Callable[..., Any]) -> None:
    family, plant, words = FAULTS[name]
    path, plan, greeting = greeted(family)
    policy, passes = policy_of(path)
    sound = found(policy, passes, greeting)
    assert sound.agrees and sound.way == sound.first, sentence(sound, plan)
    with torch.no_grad():
        plant(policy)
    refused = at_first(found(policy, passes, greeting))
    assert not refused.agrees
    text = sentence(refused, plan)
    assert words in text and f"{refused.worst.largest:.2g} nats" in text, text
    assert refused.worst.largest > 1e-3


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_another_way_is_taken_if_it_agrees(greeted: Callable[..., Any]) -> None:
    path, plan, greeting = greeted("gemma2")
    policy, passes = policy_of(path)
    no_cap(policy)
    took = found(policy, passes, greeting)
    assert took.agrees and took.way == Way("eager", False, False), sentence(took, plan)
    assert "so the run uses it" in sentence(took, plan)
    path, plan, greeting = greeted("qwen3")
    policy, passes = policy_of(path)
    positions(policy)
    took = found(policy, passes, greeting)
    assert took.agrees and took.way == Way("packed", True, False), sentence(took, plan)


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_in_bfloat16_rounding_is_no_fault_and_a_missing_cap_is_one(greeted: Callable[..., Any]) -> None:
    path, plan, greeting = greeted("gemma2", "bfloat16")
    policy, passes = policy_of(path)
    sound = found(policy, passes, greeting, torch.bfloat16)
    assert sound.agrees and sound.worst.largest > handshake.LIMIT, sentence(sound, plan)
    no_cap(policy)
    assert not at_first(found(policy, passes, greeting, torch.bfloat16)).agrees


def test_a_number_that_is_none_is_a_difference() -> None:
    apart = np.array([0.0, np.nan, 0.0])
    rows = Greeting("engine", [[1, 2]], [np.array([3, 4, 5], np.int32)], [np.zeros(3, np.float32)])
    compared = Compared.__new__(Compared)
    compared.rows = handshake.token_batch(rows)
    assert compared._difference("alone", apart).largest == np.inf


def test_rows_pass_each_length_that_the_run_can_pass() -> None:
    class Text:
        vocab_size = 100

        @staticmethod
        def to_dict() -> dict[str, Any]:
            return {
                "sliding_window": 16,
                "max_window_layers": 28,
                "rope_parameters": {"original_max_position_embeddings": 4096},
                "max_position_embeddings": 40960,
            }

    plan = GreetingPlan.of(Text, 64, 1)
    assert plan.borders == {16: "sliding_window"} and plan.prompts == (5, 12, 17) and plan.response == 12
    assert GreetingPlan.of(Text, 10_000, 1).borders.keys() == {16, 4096}
    assert plan.passes(16) == [] and plan.passes(17) == ["sliding_window=16"]
    assert GreetingPlan.of(Text, 64, 1, exact=False).samples == 4 * plan.samples
    tiny = GreetingPlan.of(Text, 4, 1)
    assert max(tiny.prompts) + tiny.response <= 4 and not tiny.borders
