"""Losses of DPO training: pure functions from log ratios of policy and reference to one loss per preference pair.

A loss is `f(data: PreferenceInput, config: PreferenceLossConfig) -> losses` under `@register_preference_loss("name")`.
The log ratio of an answer y to a prompt x is log policy(y | x) - log reference(y | x), summed over the answer's tokens,
in nats. The (implicit) reward of an answer is `beta` times its log ratio. The reference is the start model.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from pipeline.config.preference import PreferenceLossConfig
from pipeline.registry import Entry, look_up, register


@dataclass(frozen=True)
class PreferenceInput:
    """The answers of the C pairs of one micro-batch."""

    chosen: Tensor
    """[C] log ratio of each chosen answer, in nats, with gradient."""
    rejected: Tensor
    """[C] log ratio of each rejected answer, in nats, with gradient."""
    chosen_tokens: Tensor
    """[C] number of tokens in the loss of each chosen answer."""
    rejected_tokens: Tensor
    """[C] number of tokens in the loss of each rejected answer."""


PreferenceFunction = Callable[[PreferenceInput, PreferenceLossConfig], Tensor]
"""A preference loss. Returns losses [C], one per pair."""


@dataclass(frozen=True)
class PreferenceLoss(Entry):
    """A registered preference loss: a name and a `PreferenceFunction`."""


_LOSSES: dict[str, PreferenceLoss] = {}


def register_preference_loss(name: str) -> Callable[[PreferenceFunction], PreferenceFunction]:
    """Return a decorator that makes a loss known as `loss.type=name`.

    Raises ValueError if the name belongs to another function.
    """

    def decorate(function: PreferenceFunction) -> PreferenceFunction:
        register("preference loss", _LOSSES, PreferenceLoss(name, function))
        return function

    return decorate


def get_preference_loss(name: str) -> PreferenceLoss:
    """Return the loss of `loss.type`: a registered name or an import path `package.module:function`.

    Raises ValueError as `look_up` does.
    """
    return look_up("loss.type", name, _LOSSES, PreferenceLoss)


@register_preference_loss("sigmoid")
def sigmoid(data: PreferenceInput, config: PreferenceLossConfig) -> Tensor:
    """DPO loss (Rafailov et al. 2023, arXiv 2305.18290, equation 7): [C] -log sigmoid(d), with the difference d of the
    rewards, chosen minus rejected.

    With `label_smoothing` e the loss is -(1 - e) log sigmoid(d) - e log sigmoid(-d) (cDPO, Mitchell 2023).
    """
    lead = config.beta * (data.chosen - data.rejected)
    return -(1 - config.label_smoothing) * logsigmoid(lead) - config.label_smoothing * logsigmoid(-lead)


@register_preference_loss("ipo")
def ipo(data: PreferenceInput, config: PreferenceLossConfig) -> Tensor:
    """IPO loss (Azar et al. 2023, arXiv 2310.12036, equation 17): [C] (h - 1 / (2 beta))^2, with the difference h of
    log ratios, chosen minus rejected.

    Here a log ratio is the mean over an answer's tokens, not the sum, as the authors advise for language models and as
    TRL does: the target 1 / (2 beta) does not grow with the length.
    """
    chosen = data.chosen / data.chosen_tokens.clamp(min=1)
    rejected = data.rejected / data.rejected_tokens.clamp(min=1)
    return (chosen - rejected - 1 / (2 * config.beta)).square()


def checked(loss: PreferenceLoss, data: PreferenceInput, losses: object) -> Tensor:
    """Return `losses`, the return value of `loss`, after a check that it is a tensor of shape [C].

    Raises ValueError if it is not.
    """
    wanted = len(data.chosen)
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if not isinstance(losses, Tensor) or losses.shape != (wanted,):
        raise ValueError(
            f"preference loss {loss.name!r} returned losses of shape {shape}; one number for each of the {wanted} "
            "pairs was expected"
        )
    return losses
