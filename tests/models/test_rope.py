"""Ropes that choose their frequencies by length: one choice for all rows, the one that vLLM makes at its start."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from pipeline.config.model import ModelConfig
from pipeline.models.policy import load_policy
from pipeline.models.rope import fix_ropes

BORDER, MOST, HALF = 16, 64, 4
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [2.0, 4.0, 8.0, 16.0]
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MOST,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": BORDER,
}
PLAIN = 1e4 ** -(torch.arange(HALF) / HALF)


def phi3() -> Any:
    config = hf.Phi3Config(**SIZES, rope_parameters=dict(LONGROPE), original_max_position_embeddings=BORDER)
    return hf.Phi3ForCausalLM(config)


def llama(kind: str, **more: Any) -> Any:
    ropes = {"rope_type": kind, "rope_theta": 1e4, **more}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, rope_parameters=ropes))


def passed(model: Any, length: int) -> torch.Tensor:
    """The frequencies of a rope after a pass of that many tokens."""
    with torch.no_grad():
        model(input_ids=torch.arange(length)[None] % 50 + 3)
    return model.model.rotary_emb.inv_freq


@pytest.mark.parametrize(("longest", "factors"), [(BORDER, SHORT), (BORDER + 1, LONG), (None, LONG)])
def test_longrope_has_one_set_of_factors(longest: int | None, factors: list[float]) -> None:
    model = phi3()
    note = fix_ropes(model, longest)
    for length in (5, BORDER, BORDER + 1, MOST, 5):
        torch.testing.assert_close(passed(model, length), PLAIN / torch.tensor(factors))
    kind = "long" if factors is LONG else "short"
    assert note is not None and f"its {kind} factors" in note and f"original_max_position_embeddings={BORDER}" in note


def test_longrope_is_scaled_as_by_vllm() -> None:
    """vLLM scales cos and sin by sqrt(1 + ln(factor) / ln(original)), for short rows, too."""
    for longest in (BORDER, MOST):
        model = phi3()
        fix_ropes(model, longest)
        scale = (1 + torch.log(torch.tensor(MOST / BORDER)) / torch.log(torch.tensor(float(BORDER)))).sqrt()
        assert model.model.rotary_emb.attention_scaling == pytest.approx(float(scale))


def test_dynamic_does_not_stretch() -> None:
    model = llama("dynamic", factor=4.0)
    assert "max_position_embeddings=64" in str(fix_ropes(model))
    for length in (5, MOST, MOST + 20, 5):
        torch.testing.assert_close(passed(model, length), PLAIN)


@pytest.mark.parametrize("ropes", [("default", {}), ("linear", {"factor": 2.0}), ("yarn", {"factor": 4.0})])
def test_other_ropes_are_left_alone(ropes: tuple[str, dict[str, Any]]) -> None:
    model = llama(ropes[0], **ropes[1])
    before = copy.deepcopy(model.model.rotary_emb)
    assert fix_ropes(model, MOST) is None
    assert model.model.rotary_emb.rope_type == before.rope_type == ropes[0]
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, before.inv_freq)


def test_each_kind_of_layer_keeps_its_own() -> None:
    """Gemma 3 has a rope for windows and one for full attention."""
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e5, "factor": 4.0},
    }
    model = hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8, layer_types=list(ropes), rope_parameters=ropes)
    )
    rope = model.model.rotary_emb
    before = rope.full_attention_inv_freq.clone(), rope.sliding_attention_inv_freq.clone()
    assert fix_ropes(model, MOST) is not None
    passed_beyond = torch.arange(MOST + 30)[None] % 50 + 3
    with torch.no_grad():
        model(input_ids=passed_beyond)
    torch.testing.assert_close((rope.full_attention_inv_freq, rope.sliding_attention_inv_freq), before)
    assert rope.rope_type["sliding_attention"] == "default"


@pytest.mark.parametrize("make", [phi3, lambda: llama("dynamic", factor=4.0)], ids=["longrope", "dynamic"])
def test_a_row_has_its_numbers_beside_a_longer_one_and_the_saved_model_its_settings(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "model")
    for longest in (None, MOST + 40):
        policy = load_policy(ModelConfig(path=str(tmp_path / "model")), longest=longest)
        ids = torch.randint(3, 50, (2, MOST + 40), generator=torch.Generator().manual_seed(1))
        short = ids[:1, :10]
        beside = torch.cat([torch.nn.functional.pad(short, (0, MOST + 30)), ids[1:]])
        with torch.no_grad():
            alone, together, again = (policy(rows, torch.arange(9), short[0, 1:])[0] for rows in (short, beside, short))
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(again, alone, atol=0, rtol=0)
    policy.lm.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "config.json").read_text() == (tmp_path / "model" / "config.json").read_text()
