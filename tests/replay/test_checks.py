"""Recordings of tokens that were sampled from a part of the vocabulary."""

from pathlib import Path

import pytest

from pipeline.config import Config, ConfigError
from pipeline.replay.checks import _check_supports


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("actor", "old_log_probs", "engine", "actor.old_log_probs=engine"),
        ("algorithm", "use_kl_in_reward", True, "algorithm.use_kl_in_reward=true"),
        ("algorithm", "teacher_coef", 0.5, "algorithm.teacher_coef"),
        ("algorithm", "adv_estimator", "optimal_token_baseline", "algorithm.adv_estimator=optimal_token_baseline"),
        ("algorithm", "max_staleness", 1, "algorithm.rollout_correction"),
    ],
)
def test_recordings_without_supports_are_refused_if_log_probs_are_compared(
    section: str, key: str, value: object, named: str, tmp_path: Path
) -> None:
    config, recorded = Config(), Config()
    config.data.recorded_run = str(tmp_path)
    recorded.rollout.top_p = 0.9
    _check_supports(config, recorded, none=True)
    setattr(getattr(config, section), key, value)
    _check_supports(config, recorded, none=False)
    _check_supports(config, Config(), none=True)
    with pytest.raises(ConfigError, match=f"recorded with rollout.top_p by a version .* as {named} needs"):
        _check_supports(config, recorded, none=True)
