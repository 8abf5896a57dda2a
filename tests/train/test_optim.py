"""The optimiser's groups and the rates of its steps."""

import pytest
import torch
from torch import nn

from pipeline.config.learner import OptimConfig
from pipeline.train.optim import OffloadedAdamW, build_optimizer, build_scheduler


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
    move = OffloadedAdamW._move

    def logged(self: OffloadedAdamW, parameter: nn.Parameter, device: torch.device) -> None:
        moves.append((parameter.numel(), device.type))
        move(self, parameter, device)

    # Another name for the same memory, as there is no GPU to come back from.
    monkeypatch.setattr(OffloadedAdamW, "_move", logged)
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
    assert isinstance(optimizer, OffloadedAdamW)
    optimizer._move(model.weight, torch.device("meta"))
    state = optimizer.state[model.weight]
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


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
