"""Mappings with free names: any name can be written as an argument and in YAML, and wrong values name their place."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import Config, ConfigError, load_config, load_yaml, save_yaml
from pipeline.config.compose import load
from pipeline.config.preference import DPOConfig
from pipeline.config.supervised import PreferenceConfig, SFTConfig
from pipeline.plan.checks import check
from tests.sentences import Named

NAMES = [
    *("gsm8k", "openai/gsm8k", "math.v2", "2024", "1.50", "1_000", "数学", "a b", "a:b", "mean@8", "[0]", "on", "null"),
    *("true", "{x}", "${x}", "hard math #1 50%", "-", "it's", "~", "../x", "é,ü", " a ", "a\\b"),
]


def refusal(*arguments: str, config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(arguments, config_dir=config_dir)
    return str(error.value)


def experiment(folder: Path, text: str) -> Path:
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\n" + text)
    return folder


def test_names_without_an_equals_sign_are_written_as_they_are() -> None:
    config = load_config([*(f"reward.source_scale.{name}=2" for name in NAMES), "reward.normalize.math.v2=[1,2]"])
    assert config.reward.source_scale == dict.fromkeys(NAMES, 2.0) and config.reward.normalize == {"math.v2": [1, 2]}


def test_all_names_can_be_quoted_and_given_as_json(tmp_path: Path) -> None:
    names = [*NAMES, "", "x=y", 'say "x"', "a\nb"]
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    config = load_config(
        [
            *(f"reward.source_scale.{name}=2" for name in quoted),
            *(f"reward.rule_kwargs.{name}.method=strict" for name in quoted),
            f"data.source_weights={json.dumps(dict.fromkeys(names, 0.5))}",
        ]
    )
    assert config.reward.source_scale == dict.fromkeys(names, 2.0)
    assert config.data.source_weights == dict.fromkeys(names, 0.5)
    assert config.reward.rule_kwargs == {name: {"method": "strict"} for name in names}
    save_yaml(config, tmp_path / "config.yaml")
    assert load_yaml(tmp_path / "config.yaml", Config) == config
    folder = experiment(tmp_path, f"reward: {{source_scale: {{{', '.join(f'{name}: 2' for name in quoted)}}}}}")
    assert load_config(["experiment=mine"], config_dir=folder).reward.source_scale == config.reward.source_scale


@settings(max_examples=10)
@given(st.dictionaries(st.text(), st.integers(-9, 9), min_size=1))
def test_json_holds_every_name(scales: dict[str, int]) -> None:
    assert load_config([f"reward.source_scale={json.dumps(scales)}"]).reward.source_scale == scales


@pytest.mark.parametrize(
    ("argument", "scales"),
    [
        ("{openai/gsm8k: 2, math.v2: 3}", {"openai/gsm8k": 2, "math.v2": 3}),
        ("{2024: 2, true: 1, null: 3}", {"2024": 2, "true": 1, "null": 3}),
        ("{'a b': 2}", {"a b": 2}),
        ("{数学: 2}", {"数学": 2}),
        ("{a: ${trainer.seed}}", {"a": 1}),
        ("{}", {}),
    ],
)
def test_names_in_braces(argument: str, scales: dict[str, float]) -> None:
    assert load_config([f"reward.source_scale={argument}"]).reward.source_scale == scales


def test_names_of_names() -> None:
    config = load_config(
        [
            *("trainer.placement.rollout.ray.io/node-type=gpu", "trainer.placement.agent={role: cpu}"),
            *("rollout.engine_kwargs.a.b=[1,2]", "rollout.engine_kwargs.a.c='x, y'"),
            *("reward.functions.f.kwargs.tag=x", "agent.env_vars.V=1.10", "trainer.placement.rollout.spot=true"),
        ]
    )
    assert config.trainer.placement == {
        "rollout": {"ray.io/node-type": "gpu", "spot": "true"},
        "agent": {"role": "cpu"},
    }
    assert config.rollout.engine_kwargs == {"a": {"b": [1, 2], "c": "x, y"}}
    assert config.reward.functions == {"f": {"kwargs": {"tag": "x"}}} and config.agent.env_vars == {"V": "1.10"}


def test_arguments_are_laid_over_files_in_their_order(tmp_path: Path) -> None:
    folder = experiment(tmp_path, "reward: {source_scale: {a.b: 1, c: 2}, normalize: {a: [1, 2]}}")

    def scales(*arguments: str) -> dict[str, float]:
        return load_config(["experiment=mine", *arguments], config_dir=folder).reward.source_scale

    assert scales("reward.source_scale.d=3") == {"a.b": 1, "c": 2, "d": 3}
    assert scales("reward.source_scale={c: 5}", "++reward.source_scale.c=6") == {"a.b": 1, "c": 6}
    assert scales("~reward.source_scale.a.b") == {"c": 2}
    assert scales("~reward.source_scale") == scales("reward.source_scale={}") == {}
    assert load_config(["experiment=mine"], config_dir=folder).reward.normalize == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("schema", "job"), [(SFTConfig, "sft"), (DPOConfig, "dpo"), (PreferenceConfig, "reward_model")]
)
def test_every_job_reads_them(schema: type, job: str) -> None:
    config = load(schema, ["data.apply_chat_template_kwargs.思 考=true"], job)
    assert config.data.apply_chat_template_kwargs == {"思 考": True}


@pytest.mark.parametrize(
    ("argument", "keys"),
    [
        ("reward.source_scale.a=x", "reward.source_scale.a=x"),
        ("reward.source_scale.math.v2=x", 'reward.source_scale."math.v2"=x'),
        ("reward.source_scale=3", "reward.source_scale=3"),
        ("reward.source_scale={数学:2}", "reward.source_scale"),
        ("reward.source_scale={a: {b: 1}}", "reward.source_scale"),
        ("reward.normalize.a=3", "reward.normalize.a=3"),
        ("reward.source_scale.a=1,2", "reward.source_scale.a=1,2"),
        ("reward.source_scale.a={", "reward.source_scale.a"),
        ("reward.source_scale.=2", '""'),
        ("reward.source_scale", "key=value"),
        ("reward.source_scale={1_000: 2}", "1000"),
        ("~reward.source_scale.a", "reward.source_scale.a none"),
        ("reward={source_scale: {a: 1}}", "reward.source_scale"),
    ],
)
def test_what_cannot_be_read_is_named(argument: str, keys: str, named: Named) -> None:
    found = refusal(argument)
    assert repr(argument) in found and "\n" not in found
    named(found, keys)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        *((f"{name}: 2", "reward.source_scale") for name in ("2024", "on", "null", "1.5")),
        ("a: x", "reward.source_scale.a=x"),
        ("a: {b: 1}", "reward.source_scale.a={'b':"),
    ],
)
def test_what_a_file_may_not_hold(text: str, keys: str, tmp_path: Path, named: Named) -> None:
    folder = experiment(tmp_path, f"reward: {{source_scale: {{{text}}}}}")
    named(refusal("experiment=mine", config_dir=folder), keys)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("reward: {source_scale: {on: 2}}", "a name in reward.source_scale reads as"),
        ("reward: {source_scale: {1.5: 2}}", "a name in reward.source_scale reads as"),
        ("agent: {env_vars: {yes: a}}", "a name in agent.env_vars reads as"),
        ("trainer: {placement: {rollout: {off: a}}}", "a name in trainer.placement reads as"),
        ("agent: {named: {a: {on: 1}}}", "a name in agent.named reads as"),
        ("rollout: {engine_kwargs: {a: {on: 1}}}", "the name True in rollout.engine_kwargs.a is not text"),
        ("actor: {on: 3}", "a name in actor reads as"),
        ("on: 3", "a name in the file reads as"),
    ],
)
def test_a_name_of_a_file_that_yaml_reads_as_another_value(text: str, place: str, tmp_path: Path) -> None:
    """YAML 1.1 reads `on` and `yes` as true, so `reward.source_scale.True` is not how the user wrote it."""
    found = refusal("experiment=mine", config_dir=experiment(tmp_path, text))
    assert place in found and "write it in quotes" in found and ".True" not in found


SECTION = [
    ("reward.functions.f=x", "reward.functions.f=x"),
    ("reward.functions.f.wieght=1", "reward.functions.f.wieght reward.functions.f.weight"),
    ("reward.functions.f.weight=much", "reward.functions.f.weight='much'"),
    ("reward.functions.f.weight=true", "reward.functions.f.weight=True"),
    ("reward.functions.f.batch=[1]", "reward.functions.f.batch"),
    ("reward.functions.f.kwargs=[1]", "reward.functions.f.kwargs"),
    ("reward.functions.f.path={a:1}", "reward.functions.f.path"),
    ("agent.named.a.tool=[a:b]", "agent.named.a.tool agent.named.a.tools"),
    ("agent.named.a.named={}", "agent.named.a.named"),
    ("agent.named.a.max_turns=few", "agent.named.a.max_turns='few'"),
    ("agent.named.a=x", "agent.named.a=x"),
    ("agent.named.a.env_vars.X.Y=1", "agent.named.a.env_vars"),
]
"""A setting of a section with a free name, and what the refusal names."""


@pytest.mark.parametrize(("argument", "keys"), SECTION)
def test_a_setting_of_a_named_section_that_does_not_fit(argument: str, keys: str, tmp_path: Path, named: Named) -> None:
    named(refusal(argument), keys)


def test_settings_of_a_named_section_have_the_types_of_their_keys(tmp_path: Path) -> None:
    config = load_config(["agent.named.a.max_turns='3'", "agent.named.a.program=7", "reward.functions.f.weight=2"])
    assert config.agent.named == {"a": {"max_turns": 3, "program": "7"}}
    weight = config.reward.functions["f"]["weight"]
    assert weight == 2 and isinstance(weight, float)
    config.agent.named["a"]["max_turns"] = "4"
    save_yaml(config, tmp_path / "config.yaml")
    assert load_yaml(tmp_path / "config.yaml", Config).agent.named["a"]["max_turns"] == 4
    config.agent.named["a"]["max_turns"] = "few"
    save_yaml(config, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml: agent\.named\.a\.max_turns='few' does not fit"):
        load_yaml(tmp_path / "config.yaml", Config)


def test_settings_of_a_named_section_made_in_python_are_checked() -> None:
    config = Config()
    config.agent.named = {"a": {"tool": ["a:b"]}}
    with pytest.raises(
        ConfigError, match=r"the key agent\.named\.a\.tool does not exist; did you mean agent\.named\.a\.tools"
    ):
        check(config)
    config.agent.named = {"a": "x"}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"agent\.named\.a='x' does not fit; expected a mapping"):
        check(config)
