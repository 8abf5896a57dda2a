import math

import pytest
import torch

from pipeline.kl_estimate import NAMES
from pipeline.losses import kl_loss

P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
Q = torch.tensor([0.4, 0.2, 0.1, 0.3], dtype=torch.float64)
EXACT = float((P * (P / Q).log()).sum())
KINDS = [kind + plus for kind in NAMES for plus in ("", "+")]


def of(kind, difference):
    """Estimate and gradient of tokens with these log p - log q."""
    log_probs = torch.tensor(difference, dtype=torch.float64) - 1.0
    log_probs.requires_grad_()
    loss = kl_loss(log_probs, torch.full_like(log_probs, -1.0), torch.ones(len(difference)), kind)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss.tolist(), gradient.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_by_hand(kind):
    values = {
        "k1": [0.5, -0.5, 0.0],
        "abs": [0.5, 0.5, 0.0],
        "k2": [0.125, 0.125, 0.0],
        "k3": [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 0.0],
    }
    slopes = {
        "k1": [1.0, 1.0, 1.0],
        "abs": [1.0, -1.0, 0.0],
        "k2": [0.5, -0.5, 0.0],
        "k3": [1 - math.exp(-0.5), 1 - math.exp(0.5), 0.0],
    }
    base = NAMES[kind.rstrip("+")]
    loss, gradient = of(kind, [0.5, -0.5, 0.0])
    assert loss == pytest.approx(values[base])
    assert gradient == pytest.approx(slopes["k2" if kind.endswith("+") else base])


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_unbiased_over_a_small_vocabulary(kind):
    assert float((P * kl_loss(P.log(), Q.log(), torch.ones(4), kind)).sum()) == pytest.approx(EXACT, rel=1e-12)


def kl_gradient(p_first):
    """Gradient by the logits of P, of KL(P || Q) or of KL(Q || P)."""
    logits = P.log().requires_grad_()
    log_p = logits.log_softmax(0)
    kl = (log_p.exp() * (log_p - Q.log())).sum() if p_first else (Q * (Q.log() - log_p)).sum()
    return torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("k2", "k1+", "abs+", "k2+", "k3+"), kl_gradient(True)),
        (("k1",), torch.zeros(4).double()),
        (("k3",), kl_gradient(False)),
    ],
)
def test_what_the_gradient_is_on_average(kinds, expected):
    for kind in kinds:
        logits = P.log().requires_grad_()
        loss = kl_loss(logits.log_softmax(0), Q.log(), torch.ones(4), kind)
        (gradient,) = torch.autograd.grad((P * loss).sum(), logits)  # tokens come from P, which is not differentiated
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_are_not_looked_at(kind):
    log_probs = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    loss = kl_loss(log_probs, torch.tensor([-1.5, -1.0, math.nan]), torch.tensor([1, 0, 0]), kind)
    loss.sum().backward()
    assert loss[1:].tolist() == [0.0, 0.0] and loss[0] > 0
    assert log_probs.grad[1:].tolist() == [0.0, 0.0] and log_probs.grad[0] > 0
    assert kl_loss(log_probs[:0], log_probs[:0], torch.zeros(0), kind).tolist() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distance", [-800.0, 800.0])
def test_far_policies_stay_finite(kind, distance):
    loss, gradient = of(kind, [distance])
    assert math.isfinite(loss[0]) and math.isfinite(gradient[0])
    if kind.endswith("+"):
        assert gradient == [distance]


@pytest.mark.parametrize("kind", ["full", "k4", "+", "k1++", ""])
def test_unknown_kinds_are_refused(kind):
    with pytest.raises(ValueError, match="is unknown; it is one of kl, k1, abs, .*low_var_kl"):
        kl_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), kind)


OLD = torch.tensor([0.35, 0.3, 0.25, 0.1], dtype=torch.float64)


def off_policy(kind: str, weighted: bool) -> tuple[float, torch.Tensor]:
    """Mean value and gradient by the logits of P, for tokens sampled from OLD."""
    logits = P.log().requires_grad_()
    log_p = logits.log_softmax(0)
    log_ratio = log_p - OLD.log() if weighted else None
    loss = (OLD * kl_loss(log_p, Q.log(), torch.ones(4), kind, log_ratio)).sum()
    return loss.item(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize(("kind", "value"), [("k1", True), ("k3", True), ("k1+", True), ("k3+", True), ("k2", False)])
def test_the_ratio_gives_the_kl_of_the_policy_for_tokens_of_an_older_one(kind: str, value: bool) -> None:
    found, gradient = off_policy(kind, True)
    assert not value or found == pytest.approx(EXACT, rel=1e-12)
    torch.testing.assert_close(gradient, kl_gradient(True), rtol=1e-10, atol=1e-12)
    without, other = off_policy(kind, False)
    assert abs(without - EXACT) > 1e-3 and not torch.allclose(other, kl_gradient(True), rtol=0.05)
