"""The real engine with a mixture of experts: its log-probs are the trainer's after every update."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.errors import FinalError
from tests.rollout.engines import place as places
from tests.rollout.engines.place import Engine, Place, in_flight, updates

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
            # vLLM's GLM-4.5 has a head of its own, as all published ones have.
            "tie_word_embeddings": tie and self.kind != "glm4_moe",
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        if self.kind == "qwen3_moe":
            experts = {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [2]}
            sizes |= {"intermediate_size": 96, **experts}
        elif self.kind == "glm4_moe":
            experts = {"n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
            sizes |= {"intermediate_size": 96, "first_k_dense_replace": 1, **experts}
        else:
            sizes |= {"intermediate_size": 32, "num_local_experts": 4}
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(self.kind, **sizes))
        for buffer in biases(lm).values():
            buffer.normal_()
        return lm

    def step(self) -> int:
        """Biases of routers move, too: they choose other experts then."""
        for buffer in biases(self.policy).values():
            buffer.normal_()
        return super().step()


def biases(module: Any) -> dict[str, Any]:
    """Biases of routers that are buffers."""
    return {name: buffer for name, buffer in module.named_buffers() if name.endswith("e_score_correction_bias")}


def unread_bias() -> tuple[str, float]:
    """What the engine says if its loader skips the biases of routers, and the gap once it has read all."""
    place = places.place

    def skip(worker: Any) -> None:
        worker.weight_transfer_engine._accepted = set()
        load = worker.model_runner.model.load_weights
        worker.model_runner.model.load_weights = lambda weights: load(
            (name, tensor) for name, tensor in weights if not name.endswith("correction_bias")
        )

    def undo(worker: Any) -> None:
        del worker.model_runner.model.load_weights

    def on_workers(run: Any) -> None:
        place.rollout.engine.call(lambda engine: engine.llm.collective_rpc(run), when_idle=True).result()

    on_workers(skip)
    try:
        place.generate(place.chunk(place.step()))
        said = "nothing"
    except FinalError as error:
        said = str(error)
    on_workers(undo)
    (table,) = place.generate(place.chunk(place.step()))
    return said, place.gap(table)


def open_place(kind: str, folder: str) -> int:
    from vllm import ModelRegistry
    from vllm.model_executor.models import glm4_moe, mixtral, qwen3_moe

    # A class that vLLM knows by its name alone is looked at in one more process, which takes ten seconds to begin.
    for model in (mixtral.MixtralForCausalLM, qwen3_moe.Qwen3MoeForCausalLM, glm4_moe.Glm4MoeForCausalLM):
        ModelRegistry.register_model(model.__name__, model)
    Experts.kind = kind
    places.place = Experts(True, folder)
    return os.getpid()


def published_names() -> list[str]:
    place = places.place
    return sorted({piece.name for shard in place.versions.shards[0] for piece in shard.pieces})


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral", "glm4_moe"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    running: Any = Engine(open_place, request.param, str(tmp_path_factory.mktemp("engine") / "model"))
    running.kind = request.param
    yield running
    running.close()


def test_log_probs_are_the_trainers_after_every_update(engine: Engine) -> None:
    # The first layer of one family has none.
    assert "model.layers.1.mlp.experts.gate_up_proj" in engine(published_names)
    found = engine(updates, 0.7)
    assert all(seen == {version} for version, seen in found["versions"])
    assert max(found["gaps"]) < 1e-4, found
    assert min(found["stale"]) > 0.1, found


def test_an_engine_that_leaves_out_the_bias_of_a_router_is_refused(engine: Any) -> None:
    if engine.kind == "glm4_moe":
        said, gap = engine(unread_bias)
        assert "model.layers.1.mlp.gate.e_score_correction_bias, model.layers.2.mlp.gate.e_score_correct" in said
        assert "published and not read by the engine" in said and "weights of glm4_moe (" in said
        assert gap < 1e-4


def test_updates_in_flight_give_each_token_the_log_prob_of_its_version(engine: Engine) -> None:
    found = engine(in_flight, "recompute")
    assert max(found["gaps"].values()) < 1e-4, found["gaps"]
