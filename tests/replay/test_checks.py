"""Recordings of tokens that were sampled from a part of the vocabulary, and of the experts of tokens."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.config import Config, ConfigError
from pipeline.replay.checks import _check_routes, _check_supports, _mismatches
from pipeline.rows import ROUTES
from tests.train.updates import table, with_routes


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


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    config, rows = Config(), with_routes(table(0), 8, 16)
    config.data.recorded_run, config.model.path = "before", str(tmp_path)

    def check(rows: pa.Table, **sizes: int) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"num_experts_per_tok": 2, "num_experts": 16, **sizes}))
        _check_routes(config, rows)

    check(rows, num_hidden_layers=4)
    check(table(0).append_column("routes", pa.nulls(len(rows), ROUTES)), num_hidden_layers=1)
    said = "before holds 8 experts for each token, up to number 15, and model.path=.* has {} of {}; replay with a model"
    with pytest.raises(ConfigError, match=said.format(6, 16)):
        check(rows, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=said.format(8, 8)):
        check(rows, num_hidden_layers=4, num_experts=8)


def test_experts_are_replayed_as_they_were_recorded() -> None:
    config, recorded = Config(), Config()
    config.data.recorded_run, recorded.rollout.replay_routes = "before", True
    assert list(_mismatches(recorded, recorded)) == []
    (sentence,) = _mismatches(config, recorded)
    assert sentence.startswith("rollout.replay_routes=False: the responses of before were sampled with")
