import pytest
import torch

from pipeline.losses import AGG_MODES, agg_divisor, agg_loss

LOSSES = torch.tensor([1.0, 2.0, 3.0, 10.0, 7.0, 99.0])
MASK = torch.tensor([1, 1, 1, 1, 0, 0])
ROW_INDEX = torch.tensor([0, 0, 0, 1, 1, 2])  # sequence 2 is masked as a whole: two sequences count


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8),
        ("seq-mean-token-mean", (2 + 10) / 2),
    ],
)
def test_by_hand(mode, expected):
    loss = agg_loss(LOSSES, MASK, mode, ROW_INDEX, 3, 8.0) / agg_divisor(mode, 4, 2)
    assert loss.item() == pytest.approx(expected)
    assert agg_divisor(mode, 0, 0) == 1


@pytest.mark.parametrize("mode", AGG_MODES)
def test_masked_nan_is_not_read(mode):
    losses = torch.tensor([-1.0, float("nan")], requires_grad=True)
    loss = agg_loss(losses, torch.tensor([1, 0]), mode, torch.tensor([0, 0]), 1, 1.0)
    loss.backward()
    assert loss.item() == -1.0
    assert losses.grad.tolist() == [1.0, 0.0]


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"loss_agg_mode 'token_mean' is unknown.*token-mean"):
        agg_loss(LOSSES, MASK, "token_mean", ROW_INDEX, 3, 1.0)
