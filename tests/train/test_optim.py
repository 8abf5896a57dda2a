"""The optimiser's groups and the rates of its steps."""

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.config.learner import OptimConfig
from pipeline.train.optim import LOW, ByParameterAdamW, build_optimizer, build_scheduler, halves, joined


def test_the_schedule_sets_the_rate_of_each_step() -> None:
    config = OptimConfig(lr=2.0, lr_scheduler_type="linear", min_lr_ratio=0.5)
    optimizer = build_optimizer(nn.Linear(2, 2), config)
    scheduler = build_scheduler(optimizer, config, 3)
    seen = []
    for _ in range(3):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx([2, 1.5, 1])


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    model[0].weight.requires_grad_(True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model[0].weight, before["0.weight"] * 0.95)
    assert torch.equal(model[0].bias, before["0.bias"]) and torch.equal(model[1].weight, before["1.weight"])


def test_frozen_parameters_are_left_out_and_settings_arrive() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(lr=0.3, betas=(0.8, 0.9), eps=1e-4))
    assert [len(g["params"]) for g in optimizer.param_groups] == [1]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.3, (0.8, 0.9), 1e-4)


def test_betas_are_two() -> None:
    with pytest.raises(ValueError, match="optim.betas="):
        build_optimizer(nn.Linear(1, 1), OptimConfig(betas=(0.9,)))  # type: ignore[arg-type]


def test_an_optimiser_in_host_memory_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[tuple[int, str]] = []
    move = ByParameterAdamW._move

    def logged(self: ByParameterAdamW, parameter: nn.Parameter, device: torch.device) -> None:
        moves.append((parameter.numel(), device.type))
        move(self, parameter, device)

    # Another name for the same memory, as there is no GPU to come back from.
    monkeypatch.setattr(ByParameterAdamW, "_move", logged)
    models = []
    for offload in ("none", "optimizer"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2))
        model[0].bias.requires_grad_(False)
        config = OptimConfig(lr=0.1, weight_decay=0.5, lr_warmup_steps=2)
        optimizer = build_optimizer(model, config, offload)
        scheduler = build_scheduler(optimizer, config, 4)
        for step in range(4):
            optimizer.zero_grad()
            # The last layer has no gradient in the first step, and no state after it.
            part = model[:2] if step == 0 else model
            part(torch.arange(10.0).reshape(2, 5)).square().sum().backward()
            optimizer.step()
            scheduler.step()
        assert len(optimizer.param_groups) == 2 and len(optimizer.state) == 5
        models.append(model)
    for plain, offloaded in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(plain, offloaded)
    assert len(moves) == 2 * (3 + 5 + 5 + 5), "each parameter comes and goes in each step in which it has a gradient"


def test_moments_move_and_the_count_of_steps_stays() -> None:
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1), "optimizer")
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert isinstance(optimizer, ByParameterAdamW)
    optimizer._move(model.weight, torch.device("meta"))
    state = optimizer.state[model.weight]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_a_number_is_its_two_halves() -> None:
    whole = torch.cat([torch.randn(1000) * 10.0**power for power in range(-30, 31, 6)])
    whole = torch.cat([whole, torch.tensor([0.0, -0.0, 1 + 2.0**-8, -1 - 3 * 2.0**-8])])
    high, low = halves(whole)
    assert torch.equal(joined(high, low), whole)
    assert torch.equal((high.float() - whole).abs(), (whole.bfloat16().float() - whole).abs())


def test_a_number_that_is_none_stays_so() -> None:
    whole = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    high, low = halves(whole)
    assert high.isnan().all() and joined(high, low).isnan().all()


def stepped(dtype: torch.dtype, lr: float, offload: str = "none", steps: int = 20) -> tuple[nn.Module, Any]:
    """A small model with bfloat16 numbers, and its optimiser after steps with the same gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.LayerNorm(16)).bfloat16().to(dtype)
    config = OptimConfig(lr=lr, weight_decay=0.5, lr_warmup_steps=2)
    optimizer = build_optimizer(model, config, offload)
    scheduler = build_scheduler(optimizer, config, steps)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape).bfloat16().to(dtype)
        optimizer.step()
        scheduler.step()
    return model, optimizer


@pytest.mark.parametrize("lr", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_bfloat16_weights_take_the_steps_of_float32_weights(lr: float, offload: str) -> None:
    wide, _ = stepped(torch.float32, lr)
    narrow, optimizer = stepped(torch.bfloat16, lr, offload)
    for plain, parameter in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(joined(parameter.detach(), optimizer.state[parameter][LOW]), plain)


def test_the_state_of_bfloat16_weights_is_restored_in_its_own_types() -> None:
    model, optimizer = stepped(torch.bfloat16, 1e-6)
    other, restored = stepped(torch.bfloat16, 1e-6, steps=1)
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[mine].items():
            assert value.dtype == restored.state[theirs][name].dtype and torch.equal(
                value, restored.state[theirs][name]
            )


def test_weights_of_both_types_are_trained_together() -> None:
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 1))
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [LOW in optimizer.state[part.weight] for part in model] == [True, False]


def test_averages_of_8_bits_take_a_quarter_of_the_memory_and_nearly_the_same_steps() -> None:
    pytest.importorskip("torchao")
    models, sizes = [], []
    for name in ("adamw", "adamw_8bit"):
        torch.manual_seed(0)
        model = nn.Linear(64, 128)
        config = OptimConfig(name=name, lr=1e-2, weight_decay=0.5)
        optimizer = build_optimizer(model, config)
        scheduler = build_scheduler(optimizer, config, 4)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.eye(64)).square().sum().backward()
            optimizer.step()
            scheduler.step()
        averages = optimizer.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg_sq"]
        parts = [getattr(average, "codes", average) for average in averages]
        sizes.append(sum(part.nbytes for part in parts))
        models.append(model.weight.detach())
    assert sizes[1] * 4 == sizes[0] == 2 * 4 * 64 * 128
    torch.manual_seed(0)
    moved = (models[0] - nn.Linear(64, 128).weight.detach()).norm()
    # Of single numbers, whose averages are small beside others of their 256, the step may differ by a third.
    assert 0 < (models[0] - models[1]).norm() < 0.1 * moved


def test_8_bits_round_bfloat16_weights_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao does so if it is asked to."""
    asked: dict[str, Any] = {}
    stand_in = SimpleNamespace(AdamW8bit=lambda groups, **options: asked.update(options))
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(optim=stand_in))
    monkeypatch.setitem(sys.modules, "torchao.optim", stand_in)
    build_optimizer(nn.Linear(2, 2, dtype=torch.bfloat16), OptimConfig(name="adamw_8bit"))
    assert asked["bf16_stochastic_round"] is True
