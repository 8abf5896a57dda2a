"""The critic's loss, and the explained variance of its values."""

import torch
from torch import Tensor

from pipeline.losses.registry import Sums

Moments = tuple[float, float, float]
"""(number of tokens, mean, sum of squared deviations from the mean), as in the kind `std` of `pipeline.stats.Stat`."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Sums]:
    """PPO's clipped value loss: `0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)`.

    A value that has moved towards its return by more than c has no gradient. This is the value clipping of OpenAI's
    baselines (discussed in Engstrom et al. 2020, arXiv 2005.12729).

    Args:
        values: [N] values v of the critic that is trained, with gradient.
        old_values: [N] values v_old from which the advantages were computed.
        returns: [N] targets R.
        mask: [N] 1 if the token counts (any dtype); masked values are not read.
        cliprange_value: c, not negative.

    Returns:
        losses [N], 0 for masked tokens, and the metrics `vf_clipfrac` (fraction of tokens whose clipped term is the
        larger one) and `vpred_mean` (mean value).
    """
    keep = mask > 0
    values, old_values, returns = (torch.where(keep, x, x.new_zeros(())) for x in (values, old_values, returns))
    near = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    plain, clipped = (values - returns).square(), (near - returns).square()
    count = keep.sum()
    sums: Sums = {
        "vf_clipfrac": ((clipped > plain).sum(), count),
        "vpred_mean": (values.detach().double().sum(), count),
    }
    return 0.5 * torch.maximum(plain, clipped), sums


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Moments, Moments]:
    """Compute moments of the residuals R - V and of the returns R, over the unmasked tokens.

    Moments of several micro-batches and ranks merge exactly. The explained variance 1 - Var(R - V) / Var(R) is then
    1 - residuals[2] / returns[2], undefined if returns[2] is 0.

    Args:
        values: [N] values V of the critic.
        returns: [N] targets R.
        mask: [N] 1 if the token counts.

    Returns:
        `Moments` of the residuals and `Moments` of the returns, each computed in float64; (0, 0, 0) if all is masked.
    """
    keep = mask > 0
    kept = returns.detach()[keep].double()
    return _moments(kept - values.detach()[keep].double()), _moments(kept)


def _moments(values: Tensor) -> Moments:
    if not values.numel():
        return 0.0, 0.0, 0.0
    mean = values.mean()
    return float(values.numel()), float(mean), float((values - mean).square().sum())
