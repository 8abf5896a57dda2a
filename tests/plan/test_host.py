"""Memory of a run on CPUs against the memory of the machine."""

import os
from pathlib import Path

import pytest

from pipeline.config import Config, load_config
from pipeline.plan import host
from pipeline.plan.gpus import GIB
from pipeline.plan.host import machine_memory, needed, too_large
from pipeline.plan.memory import Models, estimate
from pipeline.plan.models import ModelFiles

SMALL = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
"""The sizes of SmolLM2-135M."""


@pytest.fixture
def models() -> Models:
    model = ModelFiles(SMALL, parameters=134_515_008, head=0, tables=28_311_552)
    return Models(model, critic=model.with_value_head(), reference=model, reward=None)


def config(*settings: str) -> Config:
    return load_config(["data.max_prompt_length=512", "data.max_response_length=512", *settings])


def total(config: Config, models: Models) -> float:
    return sum(needed(config, estimate(config, models)).values())


def test_the_advice_fits_and_the_next_larger_budget_does_not(models: Models) -> None:
    sentence = too_large(config(), models, 24 * GIB)
    assert sentence is not None
    assert "this machine has 24.0 GiB (1 train worker " in sentence and ", 1 engine " in sentence
    advised = int(sentence.partition("actor.ppo_max_token_len_per_gpu=")[2])
    assert too_large(config(f"actor.ppo_max_token_len_per_gpu={advised}"), models, 24 * GIB) is None
    assert total(config(f"actor.ppo_max_token_len_per_gpu={2 * advised}"), models) > 24 * GIB


def test_a_budget_is_never_below_the_longest_row(models: Models) -> None:
    sentence = too_large(config(), models, 4 * GIB)
    assert sentence is not None and "ppo_max_token_len_per_gpu" not in sentence
    assert "model.enable_gradient_checkpointing=true" in sentence


def test_runs_on_gpus_are_not_compared(models: Models) -> None:
    assert too_large(config("trainer.use_gpu=true"), models, GIB) is None
    assert too_large(config("rollout.num_gpus=1"), models, GIB) is None


def test_each_part_counts(models: Models) -> None:
    before = total(config(), models)
    assert total(config("rollout.num_engines=2"), models) - before > GIB
    assert total(config("rollout.cpu_kvcache_space_gb=3"), models) - before == 2 * GIB
    assert total(config("algorithm=ppo"), models) - before > 134_515_008 * 16, "a critic and its replica"
    few = config("data.train_batch_size=1", "rollout.n=1", "actor.ppo_max_token_len_per_gpu=16384")
    assert total(few, models) < before, "a pass has no more tokens than the rows"


def test_the_smallest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    machine = machine_memory()
    assert machine == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_memory() == machine
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    assert machine_memory() == GIB
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    # Without a limit, version 1 has a number above all memory.
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert machine_memory() == machine
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    assert machine_memory() == 2 * GIB
