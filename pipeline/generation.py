"""An engine's result for one request."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Generation:
    """Tokens that the policy sampled: ids `[T]` int32, their log-probs `[T]` float32, and why they ended."""

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    version_runs: tuple[tuple[int, int], ...]
    """Policy versions in their order, each with the number of tokens that it generated."""
