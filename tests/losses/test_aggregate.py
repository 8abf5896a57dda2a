import pytest
import torch

from pipeline.losses import AGG_MODES, agg_loss

LOSSES = torch.tensor([1.0, 2.0, 3.0, 10.0, 7.0, 99.0])
MASK = torch.tensor([1, 1, 1, 1, 0, 0])
SEGMENT = torch.tensor([0, 0, 0, 1, 1, 2])  # sequence 2 is masked as a whole: two sequences count


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
@pytest.mark.parametrize("sequences", [3, None])
def test_by_hand(mode, expected, sequences):
    how = {"global_tokens": 4, "global_sequences": 2, "row_index": SEGMENT, "sequences": sequences, "scale_factor": 8}
    assert agg_loss(LOSSES, MASK, mode, **how).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", AGG_MODES)
def test_nan_behind_the_mask_is_not_looked_at(mode):
    losses = torch.tensor([-1.0, float("nan")], requires_grad=True)
    how = {"global_tokens": 1, "global_sequences": 1, "row_index": torch.tensor([0, 0]), "scale_factor": 1.0}
    loss = agg_loss(losses, torch.tensor([1, 0]), mode, **how)
    loss.backward()
    assert loss.item() == -1.0
    assert losses.grad.tolist() == [1.0, 0.0]


def test_bad_arguments_get_sentences():
    token = torch.zeros(1)
    with pytest.raises(ValueError, match=r"loss_agg_mode 'token_mean' is unknown.*token-mean"):
        agg_loss(token, token, "token_mean", global_tokens=1, global_sequences=1)
    with pytest.raises(ValueError, match="positive actor.loss_scale_factor"):
        agg_loss(token, token, "seq-mean-token-sum-norm", global_tokens=1, global_sequences=1)
    with pytest.raises(ValueError, match="row_index"):
        agg_loss(token, token, "seq-mean-token-mean", global_tokens=1, global_sequences=1)
