"""The shaping of training rows' scores: scale, normalisation, penalties, bounds.

The steps, each only if it is set, in this order:

    raw_score                                    result of the reward function
    * source_scale[data_source]
    (score - mean) / std                         normalize[data_source]
    - overlong, length and repetition penalty
    within clip                                  so the bounds hold for the scores that advantages are made of

Validation rows are not shaped, so their scores mean the same in every run. A running mean is not used: chunks are
scored in parallel and in no fixed order, so it would differ from run to run and after a resume.
"""

import math

import numpy as np

from pipeline.config.reward import OverlongBufferConfig, RewardConfig


def overlong_penalty(lengths: np.ndarray, max_response_length: int, config: OverlongBufferConfig) -> np.ndarray:
    """Compute DAPO's soft overlong punishment (Yu et al. 2025, equation 13), [R], 0 or less, for `lengths` [R] in
    tokens."""
    over = lengths - (max_response_length - config.len)
    return np.minimum(0.0, -over / config.len * config.penalty_factor)


def repeated_share(tokens: np.ndarray, ngram: int) -> float:
    """Compute the share of repeats in the n-grams of `tokens` [L]: 1 - distinct / all; 0 for fewer than two n-grams."""
    count = len(tokens) - ngram + 1
    if count < 2:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(tokens, dtype=np.int32), ngram)
    return 1.0 - len({window.tobytes() for window in windows}) / count


class Shaping:
    """The shaping steps of the section `reward`; penalties on length need `data.max_response_length`.

    Raises:
        ValueError: the steps need it, and it is not given.
    """

    def __init__(self, config: RewardConfig, max_response_length: int | None = None) -> None:
        self._config, self._longest = config, max_response_length or 0
        if (config.overlong_buffer.enable or config.length_penalty) and not max_response_length:
            raise ValueError("reward.overlong_buffer and reward.length_penalty need data.max_response_length")
        self.used = bool(
            config.source_scale
            or config.normalize
            or config.overlong_buffer.enable
            or config.length_penalty
            or config.repetition_penalty.factor
            or config.clip
        )
        """True if any step is set."""

    def __call__(
        self, score: np.ndarray, sources: list[str], tokens: list[np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Shape the scores [R] of rows with these sources and response token ids; also returns the raw score and each
        penalty [R]."""
        config = self._config
        parts = {"raw_score": score}
        lengths = np.array([len(ids) for ids in tokens], dtype=np.float64)
        score = score * np.array([config.source_scale.get(source, 1.0) for source in sources])
        means, stds = np.array([config.normalize.get(source, (0.0, 1.0)) for source in sources]).reshape(-1, 2).T
        score = (score - means) / stds
        if config.overlong_buffer.enable:
            parts["overlong_penalty"] = overlong_penalty(lengths, self._longest, config.overlong_buffer)
        if config.length_penalty:
            parts["length_penalty"] = -config.length_penalty * lengths / self._longest
        if config.repetition_penalty.factor:
            shares = np.array([repeated_share(ids, config.repetition_penalty.ngram) for ids in tokens])
            parts["repetition_penalty"] = -config.repetition_penalty.factor * shares
        for name in list(parts)[1:]:
            score = score + parts[name]
        low, high = config.clip or (-math.inf, math.inf)
        return np.clip(score, low, high), parts
