"""What an engine cannot do is refused by name, from the facts about it."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from pipeline.config.engines import FACTS, EngineFacts
from pipeline.plan.check_engine import problems
from pipeline.plan.checks import check
from pipeline.sampling import row_limits
from tests.plan.test_checks import ALONE, SPLIT, good, refusal
from tests.sentences import Named

ROUTES = "rollout.replay_routes=true"
NEEDS = {
    "seeds": ("rollout.seed_per_request=true", "rollout.seed_per_request rollout.name"),
    "supports": ("rollout.top_k=5 rollout.min_p=0.1", "rollout.top_k rollout.min_p rollout.name"),
    "sleep": ("rollout.sleep=true rollout.num_gpus=0.4 trainer.use_gpu=true", "rollout.sleep rollout.name"),
    "tensor_parallel": (SPLIT, "rollout.tensor_parallel_size rollout.name"),
    "adapters": (ALONE, "model.lora.weight_sync rollout.name"),
    "images": ("model.vision=frozen", "model.vision rollout.name"),
    "routes": (f"{ROUTES} rollout.num_gpus=0.4 trainer.use_gpu=true", "rollout.replay_routes rollout.name"),
}
"""Settings that need a fact, and the keys of the refusal without it."""
READ_ELSEWHERE = {"package", "arguments", "seeds_with", "quantised", "own_models"}


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


def test_experts_that_vllm_does_not_return_or_the_model_lacks(tmp_path: Path, named: Named) -> None:
    named(refusal(ROUTES), "rollout.replay_routes=true rollout.num_gpus=0 rollout.name=hf")
    gpu = ("rollout.num_gpus=0.4", "trainer.use_gpu=true", "rollout.enable_prefix_caching=false")
    (sentence,) = problems(good(ROUTES, *gpu))
    named(sentence, "rollout.replay_routes=true rollout.enable_prefix_caching=false")
    for kind, fits in (("qwen3", False), ("gpt_oss", False), ("qwen3_moe", True), ("mixtral", True), ("olmoe", True)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 2}))
        found = list(problems(good(ROUTES, "rollout.name=hf", f"model.path={tmp_path}")))
        assert bool(found) != fits
        if found:
            named(found[0], f"rollout.replay_routes=true model.path={tmp_path} {kind} mixtral, olmoe, qwen3_moe")
    sparse = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "decoder_sparse_step": 2}
    (tmp_path / "config.json").write_text(json.dumps(sparse))
    assert list(problems(good(ROUTES, "rollout.name=hf", f"model.path={tmp_path}"))) == []
    (sentence,) = problems(good(ROUTES, *gpu[:2], f"model.path={tmp_path}"))
    named(sentence, f"rollout.replay_routes=true rollout.name=vllm model.path={tmp_path}")


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


SGLANG_HERE = ("rollout.name=sglang", "rollout.seed_per_request=false")
REFUSED_BY_SGLANG = [
    ("rollout.seed_per_request=true", "rollout.seed_per_request rollout.name=sglang"),
    ("rollout.top_p=0.9", "rollout.top_p rollout.name=sglang"),
    ("rollout.min_tokens=2", "rollout.min_tokens rollout.name=sglang"),
    ("rollout.sleep=true rollout.num_gpus=0.4 trainer.use_gpu=true", "rollout.sleep rollout.name=sglang"),
    (SPLIT, "rollout.tensor_parallel_size rollout.name=sglang"),
    (ALONE, "model.lora.weight_sync rollout.name=sglang"),
    ("rollout.engine_kwargs.block_size=32", "rollout.engine_kwargs.block_size sglang"),
    ("rollout.engine_kwargs.enable_deterministic_inference=true", "enable_deterministic_inference rollout.num_gpus"),
]


@pytest.mark.parametrize(("settings", "keys"), REFUSED_BY_SGLANG)
def test_what_sglang_cannot_do(settings: str, keys: str, monkeypatch: pytest.MonkeyPatch, named: Named) -> None:
    monkeypatch.setattr("pipeline.plan.check_engine.environment_problem", lambda python: "")
    check(good(*SGLANG_HERE, "rollout.val_kwargs.top_p=0.9", "rollout.engine_kwargs.max_total_tokens=4096"))
    named(refusal(*SGLANG_HERE, *settings.split()), keys)


def test_seeds_in_the_deterministic_mode_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.plan.check_engine.environment_problem", lambda python: "")
    gpu = ("rollout.num_gpus=0.4", "trainer.use_gpu=true", "rollout.engine_kwargs.enable_deterministic_inference=true")
    assert list(problems(good("rollout.name=sglang", *gpu))) == []


def test_the_environment_of_sglang(tmp_path: Path, named: Named) -> None:
    python = tmp_path / "python"
    named(refusal(*SGLANG_HERE, f"rollout.engine_python={python}"), "rollout.engine_python make sglang-env")
    for answer, words in (("exit 1", "has no package sglang"), ("echo 0.4.1", "has sglang 0.4.1, but only 0.5.23")):
        python.write_text(f"#!/bin/sh\n{answer}\n")
        python.chmod(0o755)
        assert words in refusal(*SGLANG_HERE, f"rollout.engine_python={python}")
    python.write_text("#!/bin/sh\necho 0.5.23\n")
    check(good(*SGLANG_HERE, f"rollout.engine_python={python}"))


def test_rows_may_not_truncate_where_the_engine_does_not_name_the_tokens() -> None:
    limits = row_limits(good(*SGLANG_HERE))
    with pytest.raises(ValueError, match=r"`extra_info.sampling_params.top_p` is 0.9.*rollout.name=sglang"):
        limits["train"].check({"sampling_params": {"top_p": 0.9}})
    limits["val"].check({"sampling_params": {"top_p": 0.9}})


def test_an_unknown_engine_is_refused() -> None:
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
