"""Sampling of next tokens. Log-probs belong to the distribution from which the token is sampled."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.sampling import Sampling


def draw(logits: Tensor, settings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Sample one token for each row.

    Args:
        logits: [R, V] at temperature 1; minus infinity for tokens that are not allowed. Overwritten if float32.
        settings: sampling settings of each row.
        uniforms: for each row a number in [0, 1), which decides the token.

    Returns:
        Tokens [R] int64, and the log-probs [R, V] float32 of all tokens, minus infinity outside of the support.
        Log-probs of greedy rows are at temperature 1.
    """
    logits = logits.float()
    degrees = [own.temperature or 1.0 for own in settings]
    if any(degree != 1.0 for degree in degrees):
        logits /= torch.tensor(degrees, device=logits.device)[:, None]
    cut = [row for row, own in enumerate(settings) if own.temperature and own.truncated]
    if cut:
        logits[cut] = truncated(logits[cut], [settings[row] for row in cut])
    log_probs = torch.log_softmax(logits, -1)
    chosen = logits.argmax(-1)
    drawn = [row for row, own in enumerate(settings) if own.temperature]
    if drawn:
        every = len(drawn) == len(settings)
        sums = (log_probs if every else log_probs[drawn]).exp().cumsum(-1, dtype=torch.float64)
        numbers = torch.tensor([uniforms[row] for row in drawn], dtype=torch.float64, device=logits.device)
        found = torch.searchsorted(sums, (numbers * sums[:, -1])[:, None], right=True)[:, 0]
        chosen[drawn] = found.clamp_(max=logits.shape[1] - 1)
    return chosen, log_probs


def truncated(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Set to minus infinity the logits of tokens less likely than `min_p` times the likeliest one, of all but the
    `top_k` likeliest tokens, and then of those beyond `top_p`, in vLLM's order.

    Args:
        logits: [R, V].
        settings: sampling settings of each row.
    """
    least = torch.tensor([own.min_p for own in settings], device=logits.device)[:, None]
    ordered, order = logits.sort(-1, descending=True)
    ordered = ordered.masked_fill(ordered < ordered[:, :1] + least.log(), -torch.inf)
    size = logits.shape[1]
    most = torch.tensor([own.top_k if own.top_k > 0 else size for own in settings], device=logits.device)
    ranks = torch.arange(size, device=logits.device)[None]
    ordered = ordered.masked_fill(ranks >= most[:, None], -torch.inf)
    share = torch.tensor([own.top_p for own in settings], device=logits.device)[:, None]
    probs = ordered.softmax(-1)
    # The token that crosses the border stays; with top_p=1 rounding must remove none.
    beyond = (probs.cumsum(-1) - probs >= share) & (share < 1)
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(beyond, -torch.inf))
