"""What an engine cannot do is refused by name, from the facts about it."""

from dataclasses import fields, replace

import pytest

from pipeline.config.engines import FACTS, EngineFacts
from pipeline.plan.check_engine import problems
from pipeline.plan.checks import check
from tests.plan.test_checks import ALONE, SPLIT, good, refusal
from tests.sentences import Named

NEEDS = {
    "seeds": ("rollout.seed_per_request=true", "rollout.seed_per_request rollout.name"),
    "truncated_log_probs": ("rollout.top_k=5", "rollout.top_p rollout.top_k rollout.name"),
    "sleep": ("rollout.sleep=true rollout.num_gpus=0.4 trainer.use_gpu=true", "rollout.sleep rollout.name"),
    "tensor_parallel": (SPLIT, "rollout.tensor_parallel_size rollout.name"),
    "adapters": (ALONE, "model.lora.weight_sync rollout.name"),
}
"""Settings that need a fact, and the keys of the refusal without it."""
READ_ELSEWHERE = {"package", "arguments", "built", "quantised", "own_models"}


def test_each_fact_is_claimed_with_a_case() -> None:
    assert {field.name for field in fields(EngineFacts)} == {*NEEDS, *READ_ELSEWHERE}


@pytest.mark.parametrize("fact", NEEDS)
def test_a_setting_that_the_engine_cannot_do_is_refused(
    fact: str, monkeypatch: pytest.MonkeyPatch, named: Named
) -> None:
    settings, keys = NEEDS[fact]
    config = good(*settings.split())
    assert list(problems(config)) == []
    monkeypatch.setitem(FACTS, "vllm", replace(FACTS["vllm"], **{fact: False}))
    (sentence,) = problems(config)
    named(sentence, keys)
    assert list(problems(good("rollout.seed_per_request=false", "rollout.sleep=false"))) == []


REFUSED_BY_HF = [
    ("rollout.sleep=true rollout.num_gpus=0.4 trainer.use_gpu=true", "rollout.sleep rollout.name=hf"),
    (SPLIT, "rollout.tensor_parallel_size rollout.name=hf"),
    (ALONE, "model.lora.weight_sync rollout.name=hf"),
    ("rollout.engine_kwargs.block_size=32", "rollout.engine_kwargs.block_size hf"),
]


@pytest.mark.parametrize(("settings", "keys"), REFUSED_BY_HF)
def test_what_hf_cannot_do(settings: str, keys: str, named: Named) -> None:
    named(refusal("rollout.name=hf", *settings.split()), keys)
    check(good("rollout.name=hf", "rollout.engine_kwargs.use_cache=false", "rollout.top_k=5"))


def test_an_engine_of_another_version_is_refused(named: Named) -> None:
    named(refusal("rollout.name=sglang"), "rollout.name=sglang")
    assert refusal("rollout.name=trtllm").startswith("rollout.name=trtllm must be one of ")


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, named: Named) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    named(refusal("trainer.logger=[]"), "rollout.name=vllm vllm")
    replayed = ("data.recorded_run=runs/x", "data.train_files=null", "data.val_files=null")
    check(good("trainer.logger=[]", *replayed))


def test_arguments_that_vllm_does_not_know_are_refused(named: Named) -> None:
    named(refusal("rollout.engine_kwargs.max_modl_len=2048"), "rollout.engine_kwargs.max_modl_len 'max_model_len'")
    check(good("rollout.engine_kwargs.max_model_len=2048"))


def test_names_are_not_refused_if_vllm_is_not_here_to_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.plan.check_engine.engine_arguments", lambda: ())
    check(good("rollout.engine_kwargs.x=1"))
