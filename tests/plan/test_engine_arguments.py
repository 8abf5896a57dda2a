"""Names of vLLM's arguments are known without vLLM."""

import importlib.util

import pytest

from pipeline.plan.engine_arguments import engine_arguments


def test_names_are_read_from_the_source() -> None:
    assert {"max_model_len", "load_format", "enable_lora"} <= set(engine_arguments())


def test_without_vllm_no_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    engine_arguments.cache_clear()
    assert engine_arguments() == ()
    engine_arguments.cache_clear()
