"""Nothing is random in training, whatever families call it, or the model is refused by name."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.functional import dropout

from pipeline.config.learner import FSDPConfig
from pipeline.config.model import ModelConfig
from pipeline.models import repeatable
from pipeline.models.fsdp import save_hf, shard
from pipeline.models.policy import Policy, load_policy
from pipeline.models.repeatable import check_repeatable, few_tokens, without_dropout
from pipeline.models.reward_model import RewardModel
from pipeline.models.value import ValueModel

CPU = torch.device("cpu")
ANY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
ANY |= {"max_position_embeddings": 64, "pad_token_id": 0}
HALF = {"attention_dropout": 0.5, "hidden_dropout": 0.5, "num_key_value_heads": 2}
PDROP = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
SMALL = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
OPT = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
OPT |= {"word_embed_proj_dim": 32, "max_position_embeddings": 64, "dropout": 0.5, "attention_dropout": 0.5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.5, "num_key_value_heads": 2}
FAMILIES: dict[str, Callable[[], Any]] = {
    "opt": lambda: hf.OPTConfig(**OPT, layerdrop=0.5),
    "gpt2": lambda: hf.GPT2Config(**SMALL, **PDROP),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**ANY, attention_dropout=0.5, hidden_dropout=0.5),
    "bloom": lambda: hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2, hidden_dropout=0.5),
    "falcon": lambda: hf.FalconConfig(**ANY | {"hidden_dropout": 0.5, "attention_dropout": 0.5}, parallel_attn=False),
    "mixtral": lambda: hf.MixtralConfig(**ANY, **EXPERTS),
    "seed-oss": lambda: hf.SeedOssConfig(**ANY, **HALF, residual_dropout=0.5, head_dim=16),
    "persimmon": lambda: hf.PersimmonConfig(**ANY, attention_dropout=0.5, hidden_dropout=0.5),
}


def build(family: str, auto: Any = hf.AutoModelForCausalLM, **more: Any) -> Any:
    torch.manual_seed(0)
    config = FAMILIES[family]()
    for name, value in more.items():
        setattr(config, name, value)
    return auto.from_config(config).train()


def states(lm: Any) -> torch.Tensor:
    with torch.no_grad():
        return lm.base_model(input_ids=few_tokens(lm, CPU), use_cache=False).last_hidden_state


def numbers(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if repeatable.RANDOM.search(name)}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_the_same_in_each_pass_whatever_they_call_it(family: str) -> None:
    lm = build(family)
    assert not torch.equal(states(lm), states(lm))
    before = torch.get_rng_state()
    without_dropout(lm)
    assert torch.equal(before, torch.get_rng_state()) and all(part.training for part in lm.modules())
    assert torch.equal(states(lm), states(lm))
    trained = states(lm)
    assert torch.equal(trained, states(lm.eval()))


@pytest.mark.parametrize("family", ["opt", "falcon"])
def test_a_saved_model_keeps_its_own_numbers(family: str, tmp_path: Path) -> None:
    """Falcon reads its configuration in each pass, so that it is changed while the model trains."""
    build(family).save_pretrained(tmp_path / "base")
    policy = load_policy(ModelConfig(path=str(tmp_path / "base")))
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    for dtype in (None, torch.bfloat16):
        save_hf(policy, tokenizer, tmp_path / "trained", dtype, replace=True)
        saved = hf.AutoConfig.from_pretrained(tmp_path / "trained")
        assert numbers(saved) == numbers(FAMILIES[family]()) and max(numbers(saved).values()) == 0.5
    assert not any(numbers(policy.lm.config).values())
    again = policy.train()
    assert torch.equal(states(again.lm), states(again.lm))


class Chance(nn.Module):
    """A layer that is random, and says so nowhere."""

    def __init__(self, inner: nn.Module, always: bool = False) -> None:
        super().__init__()
        self.inner, self.share, self.always = inner, 0.5, always

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return dropout(self.inner(hidden), self.share, training=self.training or self.always)


def random_lm(auto: Any = hf.AutoModelForCausalLM, always: bool = False) -> Any:
    lm = build("gpt-neox", auto, num_labels=1)
    lm.base_model.layers[1].mlp = Chance(lm.base_model.layers[1].mlp, always)
    return lm


REFUSED = r"^GPTNeoX\w+ is random in training: .* first in \S*layers\.1\.mlp, a Chance, .*use another model\.$"
LEARNERS: dict[str, tuple[Any, Any]] = {
    "policy": (hf.AutoModelForCausalLM, Policy),
    "critic": (hf.AutoModelForCausalLM, ValueModel),
    "reward model": (hf.AutoModelForSequenceClassification, RewardModel),
}


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("learner", LEARNERS)
def test_what_cannot_be_switched_off_is_refused_by_name(learner: str, always: bool) -> None:
    auto, wrapper = LEARNERS[learner]
    with pytest.raises(ValueError, match=REFUSED):
        wrapper(random_lm(auto, always))


def test_a_number_that_evaluation_reads_too_is_refused() -> None:
    """PhiMoE chooses experts by its router's jitter, in evaluation as in training; engines do so with its number."""
    torch.manual_seed(0)
    config = hf.PhimoeConfig(**ANY, **EXPERTS, input_jitter_noise=0.5)
    with pytest.raises(
        ValueError, match=r"^PhimoeForCausalLM computes something else.*router_jitter_noise=0\.5"
    ) as error:
        Policy(hf.AutoModelForCausalLM.from_config(config))
    assert "use another model" in str(error.value)


@pytest.mark.parametrize("draw", [lambda: float(torch.rand([])), random.random, np.random.rand])
def test_layers_that_are_seldom_dropped_are_found(draw: Callable[[], float]) -> None:
    lm = build("gpt-neox")
    layer = lm.base_model.layers[1]

    class Seldom(type(layer.mlp)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            dropped = self.training and draw() < 0.3
            return super().forward(hidden) * (0.0 if dropped else 1.0)

    layer.mlp.__class__ = Seldom
    random.seed(3)
    np.random.seed(3)
    with pytest.raises(ValueError, match=r"first in gpt_neox\.layers\.1\.mlp, a Seldom, "):
        without_dropout(lm)


def test_dropped_layers_are_refused_with_the_module_that_drops_them() -> None:
    lm = build("opt", dropout=0.0, attention_dropout=0.0)

    class Dropping(type(lm.model.decoder)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            result = super().forward(*args, **kwargs)
            if self.training and torch.rand([]) < 0.9:
                result.last_hidden_state = result.last_hidden_state * torch.rand([])
            return result

    lm.model.decoder.__class__ = Dropping
    with pytest.raises(ValueError, match=r"^OPTForCausalLM is random .* first in model\.decoder, a Dropping, "):
        without_dropout(lm)


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_sharded_learner_is_tried_as_it_trains(learner: str, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank has slices of the weights, nothing can be tried before they are sharded."""
    auto, wrapper = LEARNERS[learner]
    module = shard(wrapper(build("gpt-neox", auto, num_labels=1)), FSDPConfig(), CPU)
    modes = [part.training for part in module.modules()]
    check_repeatable(module, CPU)
    assert [part.training for part in module.modules()] == modes
    monkeypatch.setattr("pipeline.models.repeatable._why_random", lambda *_, **__: None)
    module = wrapper(random_lm(auto))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=REFUSED):
        check_repeatable(shard(module, FSDPConfig(), CPU), CPU)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_rounding_that_evaluation_shows_too_is_no_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of GPUs may sum in another order each time."""
    lm = build("gpt2")
    without_dropout(lm)
    sizes = iter([1e-6] * 5)
    sample = repeatable._sample

    def noisy(values: Any) -> Any:
        return [part + noise["now"] * part.abs().max() for part in sample(values) if len(part)]

    noise = {"now": 0.0}
    calls = repeatable._calls

    def passes(*args: Any, **kwargs: Any) -> Any:
        noise["now"] = noise["now"] + next(sizes)
        return calls(*args, **kwargs)

    monkeypatch.setattr(repeatable, "_sample", noisy)
    monkeypatch.setattr(repeatable, "_calls", passes)
    ids = few_tokens(lm, CPU)
    monkeypatch.setattr(repeatable.torch.random, "fork_rng", lambda devices: torch.no_grad())
    monkeypatch.setattr(repeatable, "_generators", lambda _: [])
    assert repeatable._why_random(lm, torch.device("cuda"), lambda: lm(input_ids=ids)) is None
    sizes = iter([0.0, 0.0, 1e-6, 1e-6])
    assert "is random" in str(repeatable._why_random(lm, CPU, lambda: lm(input_ids=ids)))
