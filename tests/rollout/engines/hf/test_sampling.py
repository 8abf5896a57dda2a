"""Next tokens: how often each is drawn, what is cut off, and the log-probs."""

import numpy as np
import torch

from pipeline.rollout.engines.hf.sampling import draw, truncated
from pipeline.sampling import Sampling

PLAIN = Sampling(1.0, 1.0, -1, 0, 9, ())
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])


def drawn(own: Sampling, count: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probs for evenly spread numbers."""
    uniforms = (np.arange(count) + 0.5) / count
    tokens, log_probs = draw(LOGITS.repeat(count, 1), [own] * count, uniforms.tolist())
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def test_each_token_is_as_frequent_as_it_is_likely() -> None:
    for degrees in (1.0, 0.7):
        tokens, log_probs = drawn(Sampling(degrees, 1.0, -1, 0, 9, ()))
        wanted = torch.softmax(LOGITS / degrees, -1)
        assert torch.allclose(torch.bincount(tokens, minlength=5) / 4000, wanted, atol=1e-3)
        assert torch.allclose(log_probs, wanted.log()[tokens])


def test_the_least_and_the_largest_number_give_tokens_that_are_allowed() -> None:
    tokens, _ = draw(LOGITS.flip(0).repeat(2, 1), [PLAIN] * 2, [0.0, 1 - 2.0**-53])
    assert tokens.tolist() == [1, 4]


def test_greedy_rows_beside_drawn_ones_have_the_log_prob_at_temperature_1() -> None:
    settings = [PLAIN, PLAIN.greedy(), Sampling(0.5, 1.0, -1, 0, 9, ())]
    tokens, log_probs = draw(LOGITS.repeat(3, 1), settings, [0.999, 0.999, 0.99])
    assert tokens.tolist() == [3, 0, 2]
    own = [torch.log_softmax(LOGITS / degrees, -1) for degrees in (1.0, 1.0, 0.5)]
    assert torch.allclose(log_probs.gather(1, tokens[:, None])[:, 0], torch.stack([own[0][3], own[1][0], own[2][2]]))


def test_what_is_cut_off_is_never_drawn_and_the_rest_is_renormalised() -> None:
    cases = ((Sampling(1.0, 1.0, 2, 0, 9, ()), 2), (Sampling(1.0, 0.7, -1, 0, 9, ()), 2))
    # The third token is exp(-2) times as likely as the first.
    for own, left in (*cases, (Sampling(1.0, 1.0, -1, 0, 9, (), 0.14), 2), (Sampling(1.0, 1.0, -1, 0, 9, (), 0.13), 3)):
        tokens, log_probs = drawn(own)
        assert set(tokens.tolist()) == set(range(left))
        wanted = torch.log_softmax(LOGITS[:left], -1)
        assert torch.allclose(log_probs, wanted[tokens], atol=1e-6)


def test_top_p_is_of_what_top_k_leaves_and_1_removes_nothing() -> None:
    settings = [Sampling(1.0, 0.72, 2, 0, 9, ()), Sampling(1.0, 1.0, 3, 0, 9, ()), Sampling(1.0, 1e-9, -1, 0, 9, ())]
    kept = truncated(LOGITS.repeat(3, 1), settings).isfinite().sum(-1)
    # Of two tokens the first one has a share of 0.731.
    assert kept.tolist() == [1, 3, 1]
