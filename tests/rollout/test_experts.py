"""The real engine with a mixture of experts: its log-probs are the trainer's after every update."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rollout import test_vllm
from tests.rollout.test_vllm import Engine, Place, in_flight, updates

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class Experts(Place):
    """A policy of which a token sees 2 of 4 experts in each layer but the last, which has none."""

    def model(self, tokenizer: Any, tie: bool) -> Any:
        import torch
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(3)
        config = Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[2],
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=tie,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        return Qwen3MoeForCausalLM(config)


def open_place(folder: str) -> int:
    test_vllm.place = Experts(True, folder)
    return os.getpid()


def published_names() -> list[str]:
    place = test_vllm.place
    return sorted({piece.name for shard in place.versions.shards[0] for piece in shard.pieces})


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    running = Engine(open_place, str(tmp_path_factory.mktemp("engine") / "model"))
    yield running
    running.close()


def test_log_probs_are_the_trainers_after_every_update(engine: Engine) -> None:
    assert "model.layers.0.mlp.experts.gate_up_proj" in engine(published_names)
    found = engine(updates, 0.7)
    assert all(seen == {version} for version, seen in found["versions"])
    assert max(found["gaps"]) < 1e-4, found
    assert min(found["stale"]) > 0.1, found


def test_updates_in_flight_give_each_token_the_log_prob_of_its_version(engine: Engine) -> None:
    found = engine(in_flight, "recompute")
    assert max(found["gaps"].values()) < 1e-4, found["gaps"]
