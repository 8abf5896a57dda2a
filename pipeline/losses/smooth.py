"""Policy losses that keep the policy close to the old policy without clipping."""

import torch
from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.losses.registry import LossInput, Sums, token_sums


def sapo(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """SAPO, soft adaptive policy optimisation (Gao et al. 2025, arXiv 2511.20347): a sigmoid in place of the clip.

    The loss is `-A (4 / tau) sigmoid(tau (r - 1))` with tau = `tau_pos` if A > 0, else `tau_neg`. At r = 1 the gradient
    equals the gradient of `-A r`; away from r = 1 it fades smoothly, faster for a larger tau. The value of the loss
    (-2 A / tau at r = 1) does not estimate an objective, so compare it only within a run. verl aggregates by
    `seq-mean-token-mean`, as the paper does, in every mode; here `loss_agg_mode` applies.

    Metrics: `ppo_kl`.
    """
    advantages = data.masked(data.advantages)
    options = config.policy_loss
    tau = torch.full_like(advantages, options.tau_neg).masked_fill(advantages > 0, options.tau_pos)
    gate = torch.sigmoid(tau * (data.log_ratio.exp() - 1.0)) * (4.0 / tau)
    return -advantages * gate, token_sums(data)


def dro(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """DRO, direct reward optimisation (Richemond et al. 2024, arXiv 2405.19107), with the estimator's advantages.

    The loss is `-(A log_probs - beta / 2 (log r)^2)`, with beta = `dro_beta`: the policy gradient, and a quadratic
    penalty on each token's log ratio. The log ratio is not clamped, because the penalty matters most if the policies
    are far apart.

    Metrics: `ppo_kl`.

    Raises ValueError if `dro_beta` is not given or not above 0.
    """
    beta = config.policy_loss.dro_beta
    if beta is None or not beta > 0:
        raise ValueError(
            f"actor.policy_loss.loss_mode=dro needs actor.policy_loss.dro_beta above 0, but it is "
            f"{'null' if beta is None else beta}; give the weight of the squared log ratio, 0.05 for example"
        )
    log_ratio = data.masked(data.log_probs - data.old_log_probs)
    per_token = 0.5 * beta * log_ratio.square() - data.masked(data.advantages) * data.masked(data.log_probs)
    return per_token, token_sums(data)
