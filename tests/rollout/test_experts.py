"""The real engine with a mixture of experts: its log-probs are the trainer's after every update."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rollout import test_vllm
from tests.rollout.test_vllm import Engine, Place, in_flight, updates

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class Experts(Place):
    """A policy of which a token sees 2 of 4 experts in each layer, and of one family in all layers but the last."""

    kind = "qwen3_moe"

    def model(self, tokenizer: Any, tie: bool) -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(3)
        sizes: dict[str, Any] = {
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": tie,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        if self.kind == "qwen3_moe":
            experts = {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [2]}
            sizes |= {"intermediate_size": 96, **experts}
        else:
            sizes |= {"intermediate_size": 32, "num_local_experts": 4}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(self.kind, **sizes))


def open_place(kind: str, folder: str) -> int:
    from vllm import ModelRegistry
    from vllm.model_executor.models import mixtral, qwen3_moe

    # A class that vLLM knows by its name alone is looked at in one more process, which takes ten seconds to begin.
    for model in (mixtral.MixtralForCausalLM, qwen3_moe.Qwen3MoeForCausalLM):
        ModelRegistry.register_model(model.__name__, model)
    Experts.kind = kind
    test_vllm.place = Experts(True, folder)
    return os.getpid()


def published_names() -> list[str]:
    place = test_vllm.place
    return sorted({piece.name for shard in place.versions.shards[0] for piece in shard.pieces})


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    running = Engine(open_place, request.param, str(tmp_path_factory.mktemp("engine") / "model"))
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
