"""What is found out about rewards before engines start."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.config.reward import OverlongBufferConfig, RewardConfig, RewardModelConfig
from pipeline.reward.dry import check_names, check_sources, dry_call
from tests.reward.rewards import TRUTH, custom
from tests.sentences import Named


def prompts(*rows: tuple[str, str]) -> list[pa.Table]:
    """One-row tables of (data_source, ground_truth), as the prompt source gives them."""
    names = ("data_source", "ground_truth", "prompt", "extra_info", "uid")
    question = json.dumps([{"role": "user", "content": "?"}])
    columns = ([[s], [t], [question], ["{}"], [str(i)]] for i, (s, t) in enumerate(rows))
    return [pa.table(dict(zip(names, values, strict=True))) for values in columns]


FINE, USELESS = ("countdown", json.dumps(TRUTH)), ("countdown", "{}")


def test_sources_need_a_rule(named: Named) -> None:
    with pytest.raises(ValueError) as refused:
        check_sources({None: ["countdown", "gsm9k", "countdown"]}, RewardConfig())
    named(refused.value, "'gsm9k'")
    check_sources({None: iter(["countdown", "taco"])}, RewardConfig())


def test_a_function_of_your_own_scores_any_source_and_must_load(tmp_path: Path, named: Named) -> None:
    check_sources({None: ["anything"]}, custom(tmp_path, "def compute_score(**row): return 1"))
    with pytest.raises(ValueError) as refused:
        dry_call(prompts(FINE), custom(tmp_path, "def compute_score(text): return 1", reward_kwargs={"a": 1}))
    named(refused.value, "reward.custom_reward_function compute_score")
    config = custom(tmp_path, "def compute_score(**row): return 1")
    config.functions = {"rule": {}, "own": {"path": config.custom_reward_function.path}}
    with pytest.raises(ValueError) as refused:
        check_sources({None: ["anything"]}, config)
    named(refused.value, "'anything'")


def test_rows_that_can_be_scored_pass() -> None:
    config = RewardConfig(overlong_buffer=OverlongBufferConfig(enable=True, len=4), length_penalty=1.0)
    assert dry_call(prompts(*[USELESS] * 3, FINE), config) == {"countdown": (None, True)}
    assert dry_call(prompts(FINE), config) == {"countdown": (0.0, True)}
    assert dry_call([], config) == {}


def test_a_function_may_give_acc_for_other_responses(tmp_path: Path) -> None:
    config = custom(tmp_path, "def compute_score(solution_str, **row): return {'score': 0.0}")
    assert dry_call(prompts(("own", "1")), config)["own"].acc is None
    config = custom(tmp_path, "def compute_score(solution_str, **row): return {'score': 0.0, 'acc': 0}")
    assert dry_call(prompts(("own", "1")), config)["own"].acc is True


def test_a_reward_that_fails_on_every_row_is_named(named: Named) -> None:
    with pytest.raises(ValueError) as refused:
        dry_call(prompts(*[USELESS] * 9), RewardConfig())
    named(refused.value, "4 data_source 'countdown' ground_truth")
    with pytest.raises(ValueError) as refused:
        dry_call(prompts(*[FINE] * 20, *[("gsm8k", "null")] * 2), RewardConfig())
    named(refused.value, "2 data_source 'gsm8k'")


def test_with_a_reward_model_alone_there_is_nothing_to_call(tmp_path: Path, named: Named) -> None:
    config = RewardConfig(model=RewardModelConfig("judge"))
    check_sources({None: ["anything"]}, config)
    dry_call(prompts(*[USELESS] * 9), config)
    config.functions = {"rule": {}}
    with pytest.raises(ValueError) as refused:
        check_sources({None: ["anything"]}, config)
    named(refused.value, "'anything'")
    with pytest.raises(ValueError) as refused:
        dry_call(prompts(*[USELESS] * 9), config)
    named(refused.value, "4 data_source 'countdown'")


def test_parts_that_the_estimator_reads_must_be_there(named: Named) -> None:
    dry_call(prompts(FINE), RewardConfig(), {"gdpo_reward_keys": ["acc", "format", "score"]})
    with pytest.raises(ValueError) as refused:
        dry_call(prompts(USELESS, FINE), RewardConfig(), {"gdpo_reward_keys": ["acc", "brief"]})
    named(refused.value, "gdpo_reward_keys 'countdown' 'brief'")


def test_the_metric_to_filter_by_must_be_a_number_of_the_reward(named: Named) -> None:
    with pytest.raises(ValueError) as refused:
        dry_call(prompts(FINE), RewardConfig(), {"algorithm.filter_groups.metric": ["pred"]})
    named(refused.value, "filter_groups.metric 'pred'")
    with pytest.raises(ValueError) as refused:
        dry_call(prompts(FINE), RewardConfig(), {"algorithm.filter_groups.metric": ["formatt"]})
    named(refused.value, "'formatt' 'format'")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"source_scale": {"gsm8k": 2.0}}, "reward.source_scale sets 'gsm8k', the data_source of no row, .*: 'a b', "),
        ({"source_scale": {"gsm8k": 2.0}}, r"\(the nearest is 'openai/gsm8k'\)$"),
        ({"normalize": {"数": [0.0, 1.0]}}, "reward.normalize sets '数'"),
        ({"source_scale": {"val": 2.0}}, "of validation rows alone, so it would do nothing; .* training rows: 'a b'"),
        ({"rule_kwargs": {"a b": {}, "math": {"v2": {}}}}, r"""in quotes: reward\.rule_kwargs\."math\.v2"$"""),
        ({"rule_kwargs": {"gsm8k": {}}}, "reward.rule_kwargs sets 'gsm8k', .* the rows: 'a b', 'openai/gsm8k', 'val'"),
    ],
)
def test_settings_by_source_name_a_source_of_the_data(settings: dict, sentence: str) -> None:
    sources = {"a b", "openai/gsm8k", "数学"}
    with pytest.raises(ValueError, match=sentence):
        check_names(RewardConfig(**settings), sources, {"val", "a b", *["math.v2"] * ("math" in str(settings))})
    known = RewardConfig(source_scale={"数学": 2.0}, normalize={"a b": [0, 1]}, rule_kwargs={"val": {}, "a b": {}})
    check_names(known, sources, {"val"})
