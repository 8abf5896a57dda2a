"""The fast attention remains if it computes all that a model's layers ask for, and only then."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from pipeline.config.model import ModelConfig
from pipeline.models.attention_choice import choose_attention
from pipeline.models.policy import load_policy
from tests.models.test_pretrained import CAP, ENCODERS, MAKE, SIZES


def build(config: Any, dtype: torch.dtype = torch.float32, auto: Any = hf.AutoModelForCausalLM) -> Any:
    torch.manual_seed(0)
    return auto.from_config(config, attn_implementation="sdpa").to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [5.0, 50.0])
def test_a_cap_on_scores_needs_eager(cap: float, dtype: torch.dtype) -> None:
    lm = build(hf.Gemma2Config(**SIZES, **CAP, attn_logit_softcapping=cap), dtype)
    note = choose_attention(lm)
    assert note is not None and "attention 'sdpa' leaves out softcap, so 'eager' computes it" in note
    assert lm.config._attn_implementation == lm.model.config._attn_implementation == "eager"
    assert choose_attention(lm) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [name for name in MAKE if name != "gemma 2, cap 5"])
def test_no_false_alarm(family: str, dtype: torch.dtype) -> None:
    lm = build(MAKE[family](), dtype)
    assert choose_attention(lm) is None and lm.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", [name for name in ENCODERS if name != "deberta 2"])
def test_no_false_alarm_for_encoders(family: str) -> None:
    lm = build(ENCODERS[family](), auto=hf.AutoModelForSequenceClassification)
    assert choose_attention(lm) is None and lm.config._attn_implementation == "sdpa"


def own_attention(change: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """An attention of a family's own that gets an argument which others do not know."""
    from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

    def eager(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, bias: Any = None, **_: Any
    ) -> Any:
        # A bias on the scores is a term of the mask.
        return eager_attention_forward(module, query, key, value, change(mask, bias), scaling)

    return eager


@pytest.mark.parametrize("size", [0.0, 2.0])
def test_an_argument_is_missed_only_if_it_matters(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3 import modeling_qwen3 as family

    def change(mask: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return mask if bias is None else mask + bias

    monkeypatch.setattr(family, "eager_attention_forward", own_attention(change))
    forward = family.Qwen3Attention.forward

    def with_bias(self: Any, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        bias = size * torch.linspace(-1, 1, hidden_states.shape[1])
        return forward(self, hidden_states, *args, **options, bias=bias)

    monkeypatch.setattr(family.Qwen3Attention, "forward", with_bias)
    note = choose_attention(build(hf.Qwen3Config(**SIZES)))
    assert (note is None) == (size == 0.0)
    assert note is None or "leaves out bias" in note


def test_a_model_that_does_not_run_here_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = build(hf.Gemma2Config(**SIZES, **CAP))

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(lm.model, "forward", fail)
    assert choose_attention(lm) is None and lm.config._attn_implementation == "sdpa"


def test_large_scores_are_capped_in_the_policy(tmp_path: Any) -> None:
    """Scores of some tens, as those of large models, under Gemma 2's own cap of 50."""
    lm = build(hf.Gemma2Config(**SIZES, **CAP, attn_logit_softcapping=50.0))
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight *= 8
    lm.save_pretrained(tmp_path)
    ids = torch.randint(3, 90, (2, 60), generator=torch.Generator().manual_seed(1))
    index = (torch.arange(2)[:, None] * 60 + torch.arange(59)).flatten()
    found = []
    for attention in ("sdpa", "eager"):
        policy = load_policy(ModelConfig(path=str(tmp_path), attn_implementation=attention))
        with torch.no_grad():
            found.append(policy(ids, index, ids[:, 1:].flatten())[0])
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)
