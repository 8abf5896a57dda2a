"""The value model against hidden states and a head written out, on ragged batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from pipeline.config import Config
from pipeline.models.value import ValueModel, load_value_model
from tests.models.test_policy import FAMILIES, ROWS, SIZES, pack

WIDTH = SIZES["hidden_size"]


def build(family: str, dtype: torch.dtype = torch.float32, head: bool = True) -> ValueModel:
    """The value model of a family; with random weights in its head, or as it starts."""
    torch.manual_seed(7)
    model = ValueModel(FAMILIES[family]().to(dtype))
    if head:
        with torch.no_grad():
            model.head.weight.copy_(torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1)))
            model.head.bias.fill_(0.75)
    return model


def plain_parts(family: str) -> tuple[Any, torch.nn.Linear]:
    """The language model of the family, and the head of `build`."""
    torch.manual_seed(7)
    lm, head = FAMILIES[family](), torch.nn.Linear(WIDTH, 1)
    head.load_state_dict(build(family).head.state_dict())
    return lm, head


def plain(lm: Any, head: torch.nn.Linear) -> Tensor:
    """Values the direct way: one row at a time, the language model's last hidden states times the head."""
    values = []
    for ids, prompt in ROWS:
        hidden = lm(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        values += [hidden[t - 1] @ head.weight[0] + head.bias[0] for t in range(prompt, len(ids))]
    return torch.stack(values)


def inputs(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return pack(*args, **kwargs)[:2]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_last_hidden_state_times_the_head_with_gradients(family: str) -> None:
    model, (lm, head) = build(family), plain_parts(family)
    got, want = model(*inputs(ROWS, padding=3, pad=5)), plain(lm, head)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    target = torch.arange(float(len(got)))
    for values in (got, want):
        (values - target).square().mean().backward()
    decoder = lm.get_decoder()
    wanted = {**dict(decoder.named_parameters(prefix="decoder")), **dict(head.named_parameters(prefix="head"))}
    assert {name for name, _ in model.named_parameters()} == wanted.keys()
    for name, parameter in model.named_parameters():
        # Sums of large terms round by a part of the largest entry.
        limit = 1e-5 * float(wanted[name].grad.abs().max())
        torch.testing.assert_close(parameter.grad, wanted[name].grad, atol=limit, rtol=0)


def test_starts_at_zero_and_the_first_step_moves_the_head_alone() -> None:
    model = build("qwen2-tied", head=False)
    values = model(*inputs(ROWS))
    assert not values.any()
    (values - 1).square().mean().backward()
    assert model.head.weight.grad.any() and model.head.bias.grad.item() == pytest.approx(-2)
    assert not any(p.grad.any() for p in model.decoder.parameters())


def test_the_head_computes_in_float32() -> None:
    model = build("qwen3-untied", torch.bfloat16)
    input_ids, select = inputs(ROWS)
    hidden = model.decoder(input_ids=input_ids).last_hidden_state.flatten(0, 1)[select]
    assert hidden.dtype == model.head.weight.dtype == torch.bfloat16
    exact = hidden.double() @ model.head.weight[0].double() + 0.75
    values = model(input_ids, select)
    torch.testing.assert_close(values.double(), exact, atol=1e-5, rtol=0)
    assert (values.bfloat16().double() - exact).abs().max() > 1e-3  # what a bfloat16 head would lose


# sharding


# loading


def config_for(model: Path, critic: Path | None = None) -> Config:
    config = Config()
    config.model.path, config.critic.path = str(model), str(critic) if critic else None
    return config


def load_critic(config: Config) -> ValueModel:
    return load_value_model(config.model, config.critic.path)


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    return folder


def test_loads_the_policys_decoder_or_the_critics_own(tmp_path: Path) -> None:
    torch.manual_seed(7)
    policy = FAMILIES["qwen2-tied"]()
    config = config_for(saved(tmp_path / "policy", policy))
    config.model.enable_gradient_checkpointing = True
    model = load_critic(config)
    assert model.training and model.decoder.is_gradient_checkpointing and not model.head.weight.any()
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(dict(model.decoder.named_parameters())[name], parameter)
    config.model.dtype = "bfloat16"
    assert {p.dtype for p in load_critic(config).parameters()} == {torch.bfloat16}


def test_a_critic_of_its_own_must_know_the_policys_tokens(tiny_model: Path, tmp_path: Path) -> None:
    wide = Qwen3ForCausalLM(Qwen3Config(**SIZES | {"vocab_size": 320}))
    model = load_critic(config_for(tiny_model, saved(tmp_path / "wide", wide)))
    assert torch.equal(model.decoder.embed_tokens.weight, wide.model.embed_tokens.weight)
    narrow = saved(tmp_path / "narrow", FAMILIES["qwen3-untied"]())
    with pytest.raises(ValueError, match=r"320 tokens .* embedding of critic.path=.*narrow has 50 rows"):
        load_critic(config_for(tiny_model, narrow))


def test_a_reward_model_will_do_but_not_half_a_decoder(tiny_model: Path, tmp_path: Path) -> None:
    sizes = SIZES | {"vocab_size": 320}
    reward = Qwen3ForSequenceClassification(Qwen3Config(**sizes, num_labels=1, tie_word_embeddings=False))
    model = load_critic(config_for(tiny_model, saved(tmp_path / "reward", reward)))
    for name, parameter in reward.model.named_parameters():
        assert torch.equal(dict(model.decoder.named_parameters())[name], parameter)
    state = {name: p for name, p in reward.state_dict().items() if name != "model.norm.weight"}
    reward.save_pretrained(tmp_path / "half", state_dict=state)
    with pytest.raises(ValueError, match=r"critic.path=.*half lacks 1 weights, the first model.norm.weight"):
        load_critic(config_for(tiny_model, tmp_path / "half"))
