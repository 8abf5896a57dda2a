"""Losses of preferences: numbers worked out by hand, gradients, and the registry."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config.preference import BUILT_IN_LOSSES, DPOConfig, PreferenceLossConfig
from pipeline.losses.preference import _LOSSES, PreferenceInput, checked, get_preference_loss

CHOSEN, REJECTED = [2.0, -1.0, 0.5], [1.0, 3.0, 0.5]
TOKENS = [4, 2, 5], [2, 3, 5]
BETA = 0.5


def inputs(grad: bool = False) -> PreferenceInput:
    chosen, rejected = (torch.tensor(side, dtype=torch.float64, requires_grad=grad) for side in (CHOSEN, REJECTED))
    counts = (torch.tensor(side) for side in TOKENS)
    return PreferenceInput(chosen, rejected, *counts)


def loss(name: str, data: PreferenceInput | None = None, **options: Any) -> Tensor:
    return get_preference_loss(name).function(data or inputs(), PreferenceLossConfig(type=name, beta=BETA, **options))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


# Differences of the rewards: 0.5 * (2 - 1), 0.5 * (-1 - 3), 0.5 * 0.
LEADS = [0.5, -2.0, 0.0]


def test_sigmoid_by_hand() -> None:
    assert loss("sigmoid").tolist() == pytest.approx([-log_sigmoid(lead) for lead in LEADS])
    # -log sigmoid(0.5) = log(1 + e^-0.5) = log 1.60653
    assert loss("sigmoid")[0].item() == pytest.approx(0.474077, abs=1e-6)
    smoothed = [-0.9 * log_sigmoid(lead) - 0.1 * log_sigmoid(-lead) for lead in LEADS]
    assert loss("sigmoid", label_smoothing=0.1).tolist() == pytest.approx(smoothed)


def test_ipo_compares_means_over_tokens_with_half_of_one_over_beta() -> None:
    # 2/4 - 1/2 - 1, -1/2 - 3/3 - 1, 0.5/5 - 0.5/5 - 1
    assert loss("ipo").tolist() == pytest.approx([1.0, 6.25, 1.0])


@pytest.mark.parametrize("name", BUILT_IN_LOSSES)
def test_every_loss_raises_the_chosen_side_and_lowers_the_other(name: str) -> None:
    data = inputs(grad=True)
    loss(name, data).sum().backward()
    assert (data.chosen.grad < 0).all() and (data.rejected.grad > 0).all()
    if name == "sigmoid":  # the gradient of the paper: -beta sigmoid(-lead)
        slopes = [-BETA / (1 + math.exp(lead)) for lead in LEADS]
        assert data.chosen.grad.tolist() == pytest.approx(slopes)
        assert data.rejected.grad.tolist() == pytest.approx([-slope for slope in slopes])


def test_at_the_start_dpo_is_log_two() -> None:
    zero = torch.zeros(3)
    start = PreferenceInput(zero, zero, *(torch.ones(3),) * 2)
    assert loss("sigmoid", start).tolist() == pytest.approx([math.log(2)] * 3)
    assert loss("ipo", start).tolist() == [1.0] * 3


def own(data: PreferenceInput, config: PreferenceLossConfig) -> Tensor:
    return data.chosen * config.kwargs["scale"]


def test_names_and_forms_are_checked() -> None:
    assert sorted(_LOSSES) == sorted(BUILT_IN_LOSSES)
    with pytest.raises(ValueError, match="loss.type 'sigmoyd' is unknown. Did you mean 'sigmoid'"):
        get_preference_loss("sigmoyd")
    mine = get_preference_loss(f"{__name__}:own")
    assert mine.function is own
    assert get_preference_loss("pipeline.losses.preference:ipo") is get_preference_loss("ipo")
    assert len(checked(mine, inputs(), own(inputs(), PreferenceLossConfig(kwargs={"scale": 2})))) == 3
    with pytest.raises(ValueError, match="returned losses of shape .4,.; one number for each of the 3 pairs"):
        checked(mine, inputs(), torch.zeros(4))
    with pytest.raises(ValueError, match="returned losses of shape float; one number for each of the 3 pairs"):
        checked(mine, inputs(), 0.5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"type": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
        ({"type": "kto"}, "was removed; take sigmoid or ipo"),
        ({"type": "hinge"}, "was removed; take sigmoid or ipo"),
        ({"type": "ipo", "kwargs": {"a": 1}}, "no built-in loss reads it"),
    ],
)
def test_options_of_other_losses_are_refused(settings: dict[str, Any], sentence: str) -> None:
    config = DPOConfig(loss=PreferenceLossConfig(**settings))
    assert [text for text, applies in config.problems().items() if applies and sentence in text]
    assert not any(DPOConfig().problems().values())
