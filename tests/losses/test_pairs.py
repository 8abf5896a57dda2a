"""Online DPO as a policy loss: by hand, and its gradient against that of the pair's loss."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pipeline.losses import LossInput, agg_divisor, agg_loss, get_policy_loss
from tests.losses.batches import actor

CONFIG = actor(dpo_beta=0.5, loss_mode="online_dpo")
LENGTHS = [2, 3, 1, 2]  # two pairs: sequences 0 and 1, 2 and 3
REFERENCE = torch.tensor([-1.0, -2.0, -1.0, -1.0, -0.5, -2.0, -1.0, -3.0], dtype=torch.float64)
LOG_PROBS = torch.tensor([-0.5, -1.5, -1.5, -1.5, -0.5, -2.5, -0.5, -2.0], dtype=torch.float64)
# The log ratios of the sequences are 1, -1, -0.5 and 1.5, so the margins are 2 and -2.


def index() -> Tensor:
    return torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))


def margins(log_probs: Tensor, mask: Tensor) -> Tensor:
    ratios = torch.zeros(4, dtype=torch.float64).index_add(0, index(), (log_probs - REFERENCE) * mask)
    return ratios[0::2] - ratios[1::2]


def inputs(log_probs: Tensor, mask: Tensor | None = None) -> LossInput:
    mask = torch.ones(8, dtype=torch.float64) if mask is None else mask
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)[index()]
    margin = margins(log_probs.detach(), mask)[index() // 2]
    return LossInput(log_probs, log_probs.detach(), signs, mask, index(), 4, pair_margin=margin)


def evaluate(data: LossInput) -> tuple[Tensor, dict]:
    per_token, sums = get_policy_loss("online_dpo").function(data, CONFIG)
    part = agg_loss(per_token, data.mask, "seq-mean-token-sum", data.row_index, data.sequences, 1.0)
    return part / agg_divisor("seq-mean-token-sum", 8, 4), sums


def test_value_and_metrics_by_hand() -> None:
    loss, sums = evaluate(inputs(LOG_PROBS))
    # -log sigmoid(0.5 * 2) and -log sigmoid(0.5 * -2)
    assert loss.item() == pytest.approx((math.log(1 + math.exp(-1)) + math.log(1 + math.exp(1))) / 2)
    assert (sums["reward_margin"][0].item(), int(sums["reward_margin"][1])) == (0.0, 4)
    assert (sums["reward_accuracy"][0].item(), int(sums["reward_accuracy"][1])) == (2.0, 4)


@pytest.mark.parametrize("masked", [[], [1, 6]])
def test_the_gradient_is_that_of_the_mean_over_pairs(masked: list[int]) -> None:
    mask = torch.ones(8, dtype=torch.float64)
    mask[masked] = 0
    log_probs = LOG_PROBS.clone().requires_grad_()
    loss, _ = evaluate(inputs(log_probs, mask))
    (got,) = torch.autograd.grad(loss, log_probs)
    direct = LOG_PROBS.clone().requires_grad_()
    wanted_loss = -logsigmoid(0.5 * margins(direct, mask)).mean()
    (wanted,) = torch.autograd.grad(wanted_loss, direct)
    torch.testing.assert_close(got, wanted)
    assert loss.item() == pytest.approx(wanted_loss.item())


def test_without_margins_it_says_what_is_missing() -> None:
    data = inputs(LOG_PROBS)
    bare = LossInput(data.log_probs, data.old_log_probs, data.advantages, data.mask, data.row_index, data.sequences)
    with pytest.raises(ValueError, match="without `pair_margin`"):
        evaluate(bare)
