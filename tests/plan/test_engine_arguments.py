"""Names of vLLM's arguments are known without vLLM."""

import importlib.util

import pytest

from pipeline.plan import engine_arguments
from tests.plan.test_checks import good, refusal
from tests.sentences import Named


def test_arguments_that_vllm_does_not_know_are_refused(named: Named) -> None:
    named(refusal("rollout.engine_kwargs.max_modl_len=2048"), "rollout.engine_kwargs.max_modl_len 'max_model_len'")
    assert good("rollout.engine_kwargs.max_model_len=2048")
    assert list(engine_arguments.problems(["max_model_len", "load_format", "enable_lora"])) == []


def test_without_vllm_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    engine_arguments.engine_arguments.cache_clear()
    assert list(engine_arguments.problems(["x"])) == []
    engine_arguments.engine_arguments.cache_clear()
