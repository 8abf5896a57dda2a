"""Shape the scores of training rows: scale, normalisation, penalties, bounds.

These steps are applied in this order, each only if it is set:

    raw_score                                    result of the reward function
    * source_scale[data_source]
    (score - mean) / std                         normalize[data_source]
    - overlong, length and repetition penalty
    clipped to clip                              last, so the bounds hold for the scores that advantages are made of

Scores of validation rows are not shaped, so they can be compared between runs. A running mean is not used: chunks are
scored in parallel and in no fixed order, so it would differ from run to run and after a resume.
"""

import math

import numpy as np

from pipeline.config.reward import OverlongBufferConfig, RewardConfig


def overlong_penalty(lengths: np.ndarray, max_response_length: int, config: OverlongBufferConfig) -> np.ndarray:
    """Compute DAPO's soft overlong punishment (Yu et al. 2025, equation 13): [R], numbers of at most 0.

    Args:
        lengths: [R] lengths of the responses, in tokens.
        max_response_length: `data.max_response_length`.
        config: the section `reward.overlong_buffer`.
    """
    over = lengths - (max_response_length - config.len)
    return np.minimum(0.0, -over / config.len * config.penalty_factor)


def repeated_share(tokens: np.ndarray, ngram: int) -> float:
    """Return the fraction of n-grams in `tokens` [L] that repeat an earlier one: 1 - distinct / all.

    0 if there are fewer than two n-grams. `ngram` is their length in tokens.
    """
    count = len(tokens) - ngram + 1
    if count < 2:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(tokens, dtype=np.int32), ngram)
    return 1.0 - len({window.tobytes() for window in windows}) / count


class Shaping:
    """Shapes scores by the settings in the section `reward`.

    Args:
        config: the section `reward`.
        max_response_length: `data.max_response_length`, needed for penalties on length.

    Raises:
        ValueError: a penalty on length is set, but `max_response_length` is not given.
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
        """Shape the scores of R rows. Returns (shaped scores [R], {name: raw score or penalty [R]}).

        Args:
            score: [R] scores.
            sources: `data_source` of each row.
            tokens: token ids of each response, without tokens of tools and environments.
        """
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
