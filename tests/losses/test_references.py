"""Every policy loss against its formula, written out plainly on padded tensors and differentiated by autograd."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.losses import get_policy_loss
from tests.losses.batches import NAMES, actor, choose, loss_input, random_row

LOW, HIGH, C = 0.2, 0.3, 1.7
CONFIG = actor(clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=C, dro_beta=0.3, ppo_kl_coef=0.1)


def mean(x, mask):
    """Over the tokens of each row; [B, 1]."""
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)


def with_gradient(value, derivative, new):
    """`value` whose derivative by `new` is `derivative`: for formulas that stop gradients."""
    return value.detach() + derivative.detach() * (new - new.detach())


def clip(new, old, a):
    ratio = (new - old).exp()
    return torch.where(a >= 0, -a * ratio.clamp(max=1 + HIGH), -a * ratio.clamp(min=1 - LOW))


def vanilla(new, old, a, mask, token_mask):
    ratio = (new - old).exp()
    return torch.where(a >= 0, -a * ratio.clamp(max=1 + HIGH), -a * ratio.clamp(1 - LOW, C))


def cispo(new, old, a, mask, token_mask):
    weight = (new - old).exp().clamp(1 - LOW, 1 + HIGH).detach()
    return -weight * a * new


def dppo(valid):
    def loss(new, old, a, mask, token_mask):
        weight = torch.zeros_like(new)
        for place in np.ndindex(*new.shape):
            p, q, advantage = new[place].exp().item(), old[place].exp().item(), a[place].item()
            weight[place] = min(p / q, C) if valid(p, q, advantage) else 0.0
        return -weight * a * new

    return loss


def valid_tv(p, q, a):
    return p - q <= HIGH if a > 0 else q - p <= LOW


def valid_kl(p, q, a):
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    return (kl <= HIGH or p <= q) if a > 0 else (kl <= LOW or p >= q)


def gspo(new, old, a, mask, token_mask):
    s = mean(new - old, mask).exp().expand_as(new)
    free = torch.where(a >= 0, s < 1 + HIGH, s > 1 - LOW)
    return with_gradient(torch.maximum(-a * s, -a * s.clamp(1 - LOW, 1 + HIGH)), -a * s * free, new)


def geo_mean(new, old, a, mask, token_mask):
    a = mean(a, mask)
    x = torch.where(a > 0, (new - old).clamp(max=HIGH), (new - old).clamp(min=-LOW))
    return -a * mean(x, mask).exp().expand_as(new)


def sapo(new, old, a, mask, token_mask):
    tau = 1.05 - 0.05 * (a > 0).double()
    return -a * 4 / tau / (1 + (-tau * ((new - old).exp() - 1)).exp())


REFERENCES = {
    "vanilla": vanilla,
    "cispo": cispo,
    "dppo_tv": dppo(valid_tv),
    "dppo_kl": dppo(valid_kl),
    "gspo": gspo,
    "geo_mean": geo_mean,
    "sapo": sapo,
    "dro": lambda new, old, a, mask, token_mask: -new * a + 0.15 * (new - old) ** 2,
    "gpg": lambda new, old, a, mask, token_mask: -new * a,
    "reinforce": lambda new, old, a, mask, token_mask: -new * a,
    "clip_cov": lambda new, old, a, mask, token_mask: clip(new, old, a) * (1 - token_mask),
    "kl_cov": lambda new, old, a, mask, token_mask: -a * (new - old).exp() + 0.1 * token_mask * (new - old).abs(),
}


def padded(parts: list[np.ndarray], padding: float) -> Tensor:
    """[B, T]."""
    tensors = [torch.from_numpy(part).double() for part in parts]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient(name, seed):
    rng = np.random.default_rng(seed)
    rows = choose(name, [random_row(rng, length) for length in (1, 9, 4, 7, 2)], CONFIG)
    columns = {"log_probs": -1.0, "old_log_probs": -1.0, "advantages": 0.0, "mask": 0.0, "token_mask": 0.0}
    filled = (padded([getattr(row, name) for row in rows], fill) for name, fill in columns.items())
    new, old, a, mask, token_mask = filled
    trained = mask > 0
    # Weights tell the tokens apart: a plain sum would hide a gradient that went to the wrong token.
    weights = torch.from_numpy(rng.normal(size=new.shape))
    expected = REFERENCES[name](new.requires_grad_(), old, a, mask, token_mask)
    (expected_gradient,) = torch.autograd.grad((expected * weights * mask).sum(), new)

    data = loss_input(rows)
    data.log_probs.requires_grad_()
    got, _ = get_policy_loss(name).function(data, CONFIG)
    (gradient,) = torch.autograd.grad((got * weights[trained]).sum(), data.log_probs)
    torch.testing.assert_close(got, expected[trained], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient[trained], rtol=1e-10, atol=1e-12)
    assert gradient.any()
