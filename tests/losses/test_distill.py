"""The distillation loss against closed forms and TRL's numbers."""

import json
from pathlib import Path

import pytest
import torch

from pipeline.losses import distill_loss
from pipeline.losses.distill import with_rest

VECTORS = json.loads((Path(__file__).parent / "trl_divergences.json").read_text())
"""Made with TRL 1.16: logits of policy and teacher, the number of listed tokens, beta, divergences and gradients."""


def loss_of(policy: torch.Tensor, teacher: torch.Tensor, k: int, beta: float) -> torch.Tensor:
    top = torch.log_softmax(teacher, -1).topk(k, -1)
    return distill_loss(torch.log_softmax(policy, -1).gather(-1, top.indices), top.values, beta)


@pytest.mark.parametrize("number", range(len(VECTORS)))
def test_equals_trl_in_value_and_gradient(number: int) -> None:
    """In float64: TRL's numbers are rounded, and in float32 ours would be, in another way on each kind of CPU."""
    case = VECTORS[number]
    policy, teacher, wanted, gradient = (
        torch.tensor(case[name], dtype=torch.float64) for name in ("policy", "teacher", "loss", "gradient")
    )
    loss = loss_of(policy.requires_grad_(), teacher, case["k"], case["beta"])
    loss.sum().backward()
    assert policy.grad is not None
    assert torch.allclose(loss, wanted, atol=1e-5, rtol=1e-5)
    assert torch.allclose(policy.grad, gradient, atol=1e-5, rtol=1e-5)


def test_two_outcomes_by_hand() -> None:
    """Teacher 0.8 and 0.2, policy 0.5 and 0.5; the one listed token is the first."""
    p, q = torch.tensor([0.8, 0.2]), torch.tensor([0.5, 0.5])
    own, theirs = torch.tensor([[0.5]]).log(), torch.tensor([[0.8]]).log()
    kl = {"p q": (p * (p / q).log()).sum(), "q p": (q * (q / p).log()).sum()}
    assert distill_loss(own, theirs, 0.0).item() == pytest.approx(kl["p q"].item(), abs=1e-6)
    assert distill_loss(own, theirs, 1.0).item() == pytest.approx(kl["q p"].item(), abs=1e-6)
    m = 0.25 * p + 0.75 * q
    wanted = 0.25 * (p * (p / m).log()).sum() + 0.75 * (q * (q / m).log()).sum()
    assert distill_loss(own, theirs, 0.25).item() == pytest.approx(wanted.item(), abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_equal_distributions_have_no_loss_and_no_gradient(beta: float) -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    policy = logits.clone().requires_grad_()
    loss = loss_of(policy, logits, 4, beta)
    loss.sum().backward()
    assert policy.grad is not None
    assert loss.abs().max() < 1e-6 and policy.grad.abs().max() < 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_more_listed_tokens_never_lower_the_divergence(beta: float) -> None:
    generator = torch.Generator().manual_seed(2)
    policy, teacher = (torch.randn(40, 30, generator=generator) * 2 for _ in range(2))
    losses = [loss_of(policy, teacher, k, beta) for k in (1, 2, 5, 15, 29, 30)]
    for fewer, more in zip(losses, losses[1:], strict=False):
        assert (more >= fewer - 1e-3).all()


def test_outcomes_are_a_distribution_even_if_the_listed_tokens_have_all_of_the_mass() -> None:
    listed = torch.log_softmax(torch.randn(3, 6, generator=torch.Generator().manual_seed(3)), -1).requires_grad_()
    outcomes = with_rest(listed)
    assert torch.allclose(outcomes.exp().sum(-1), torch.ones(3), atol=1e-6)
    outcomes.sum().backward()
    assert listed.grad is not None and listed.grad.isfinite().all()
