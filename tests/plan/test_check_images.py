"""Settings of a run with images that cannot be: one sentence each, with its keys."""

import json
from pathlib import Path

import pytest

from pipeline.plan import check_images
from pipeline.plan.models import problems
from pipeline.plan.without_effect import unread
from tests.plan.test_checks import good
from tests.sentences import Named

ON = "model.vision=frozen"
QWEN = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}, "text_config": {"model_type": "qwen2_5_vl_text"}}


def found(*overrides: str) -> list[str]:
    return list(check_images.problems(good(*overrides)))


def test_runs_of_text_have_no_limits_of_images() -> None:
    assert not list(check_images.problems(good("data.truncation=left")))


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "model.vision=trained",
        "model.share_prompts=never",
        "data.truncation=left data.filter_overlong_prompts=true",
        "model.min_pixels=784 model.max_pixels=784",
        "model.lora.rank=4 model.lora.weight_sync=merged",
        "actor.use_kl_loss=true",
        "algorithm.adv_estimator=gae",
        "agent.environment=my_game:Game",
    ],
)
def test_settings_that_fit(overrides: str) -> None:
    assert found(ON, *overrides.split()) == []


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("data.truncation=left", "model.vision data.truncation data.filter_overlong_prompts"),
        ("model.min_pixels=9 model.max_pixels=8", "model.min_pixels model.max_pixels"),
        ("actor.parallel.sequence=2", "model.vision actor.parallel.sequence"),
        ("actor.parallel.tensor=2", "model.vision actor.parallel.tensor"),
        ("model.vision=trained model.lora.rank=4", "model.vision model.lora.rank"),
        ("model.lora.rank=4 model.lora.weight_sync=adapter", "model.vision model.lora.weight_sync"),
        ("model.vision=trained rollout.update_kv=keep", "model.vision rollout.update_kv"),
        ("reward.model.path=owner/judge", "model.vision reward.model.path"),
        ("agent.program=my_game:run", "model.vision agent.program agent.command environments tools"),
        ("agent.environment=my_game:Game agent.context=rerender", "model.vision agent.context"),
    ],
)
def test_settings_that_exclude_images(overrides: str, keys: str, named: Named) -> None:
    (sentence,) = found(ON, *overrides.split())
    named(sentence, keys)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (QWEN, []),
        ({"model_type": "qwen3", "vocab_size": 100}, ["model.path vision_config model.vision"]),
        (QWEN | {"model_type": "gemma3"}, ["model.path gemma3 attend"]),
        (QWEN | {"model_type": "llava"}, ["model.path llava names"]),
        (QWEN | {"model_type": "internvl"}, ["model.path internvl tried"]),
    ],
)
def test_families(tmp_path: Path, config: dict, keys: list[str], named: Named) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    sentences = found(ON, f"model.path={tmp_path}")
    for sentence, wanted in zip(sentences, keys, strict=True):
        named(sentence, wanted)


def test_a_tower_is_read_only_with_images(tmp_path: Path, named: Named) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "tokenizer.json").write_text("{}")
    path = f"model.path={tmp_path}"
    (sentence,) = problems(good(path))
    named(sentence, "model.path vision_config")
    assert not list(problems(good(path, ON)))
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"audio_config": {"depth": 2}}))
    (sentence,) = problems(good(path, ON))
    assert "audio_config" in sentence


def test_settings_of_images_are_not_read_without_images() -> None:
    given = ["data.image_key=pictures", "data.max_image_bytes=5", "model.min_pixels=1", "model.max_pixels=2"]
    assert sorted(unread(good(*given))) == sorted(given)
    assert not list(unread(good(*given, ON)))


def test_a_critic_of_another_family(tmp_path: Path, named: Named) -> None:
    for name, family in (("policy", "qwen2_5_vl"), ("critic", "qwen3_vl")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(QWEN | {"model_type": family}))
    words = (ON, "algorithm.adv_estimator=gae", f"model.path={tmp_path / 'policy'}")
    assert found(*words, f"critic.path={tmp_path / 'policy'}") == found(*words) == []
    (sentence,) = found(*words, f"critic.path={tmp_path / 'critic'}")
    named(sentence, "critic.path qwen3_vl qwen2_5_vl")
