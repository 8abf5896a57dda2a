"""Policy losses that compare two responses to one prompt."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pipeline.config.learner import ActorConfig
from pipeline.losses.registry import LossInput, Sums, token_sums


def online_dpo(data: LossInput, config: ActorConfig) -> tuple[Tensor, Sums]:
    """Online DPO (Guo et al. 2024, arXiv 2402.04792): DPO on the best and the worst response of each group.

    The loss of a pair is L = -log sigmoid(beta h), with h = `pair_margin` and beta = `dpo_beta`. The gradient of L is
    the gradient of the sum of -beta sigmoid(-beta h) A log_probs over the tokens of both responses, with A = 1 for the
    better response and -1 for the worse one (Rafailov et al. 2023, arXiv 2305.18290, section 4). Since h is known
    before the step, the two responses need not be in one forward pass.

    With `seq-mean-token-sum` the loss of a mini-batch, and its gradient, equal the mean of L over the mini-batch's
    pairs. That mode averages over responses, two per pair, so each response has the value L and twice its summand of
    the gradient.

    Metrics: `reward_margin`, the mean of beta h; `reward_accuracy`, the fraction of responses whose pair has h > 0
    (a pair with h = 0 counts half); `ppo_kl`, which is only reported.
    """
    if data.pair_margin is None:
        raise ValueError("policy loss 'online_dpo' was called without `pair_margin`, the margin of each token's pair")
    beta = config.policy_loss.dpo_beta
    margin = beta * data.masked(data.pair_margin)
    slope = -2 * beta * torch.sigmoid(-margin) * data.masked(data.advantages).sign()
    moving = slope * data.masked(data.log_probs)
    tokens = margin.new_zeros(data.sequences).index_add(0, data.row_index, data.keep.to(margin.dtype))
    value = data.masked(-logsigmoid(margin) / tokens.clamp(min=1)[data.row_index])
    of_row, rows = data.sequence_mean(margin)[tokens > 0], (tokens > 0).sum()
    sums = token_sums(data)
    sums["reward_margin"] = (of_row.sum(), rows)
    sums["reward_accuracy"] = ((of_row.sign() + 1).sum() / 2, rows)
    return value + (moving - moving.detach()), sums
