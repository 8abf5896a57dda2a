"""Result of an engine for one request."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Generation:
    """Tokens that the policy sampled: ids [T] int32, their log-probs [T] float32, and the reason why sampling ended."""

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    version_runs: tuple[tuple[int, int], ...]
    """(Policy version, number of tokens that it generated), in the order of the tokens."""
