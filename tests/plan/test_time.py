"""Times of phases on hand-worked cases, and what changes them."""

import pytest

from pipeline.config import load_config
from pipeline.plan.gpus import GIB, Gpu
from pipeline.plan.memory import Models, estimate
from pipeline.plan.models import ModelFiles
from pipeline.plan.time import OF_BANDWIDTH, OF_FLOPS, PUBLISHED, TO_HOST, Times, times

SIZES = {"hidden_size": 1000, "num_hidden_layers": 10, "num_attention_heads": 10, "vocab_size": 50_000}
MODEL = ModelFiles(SIZES, 1_100_000_000, head=50_000_000, tables=100_000_000)
MODELS = Models(MODEL, MODEL, MODEL, None)
GPU = Gpu("Z1", 80 * GIB, 1e15, 2e12)
RUN = [
    *("trainer.use_gpu=true", "rollout.num_gpus=1", "data.train_batch_size=64", "rollout.n=4"),
    *("data.max_prompt_length=1000", "data.max_response_length=1000", "rollout.chunk_prompts=64"),
]
ROWS = 256
FORWARD = 2 * 1e9 * 2000 + 2 * 5e7 * 1000 + 2 * 10 * 1000 * 2000**2
"""Operations of a row: layers, head for the response, attention."""


def found(*settings: str, models: Models = MODELS, gpu: Gpu = GPU) -> Times:
    config = load_config([*RUN, *settings])
    result = times(config, models, estimate(config, models), gpu)
    assert result
    return result


def test_hand_worked_phases() -> None:
    plain = found()
    assert plain.log_probs == pytest.approx(ROWS * FORWARD / (OF_FLOPS * 1e15))
    assert plain.update == pytest.approx(3 * plain.log_probs)
    assert plain.publishing == pytest.approx(2 * 1.1e9 / PUBLISHED)
    # All 256 sequences fit: each step reads the weights, and keys and values of 1,500 tokens of each sequence.
    step = (2 * 1.1e9 + 256 * 2 * 10 * 1000 * 2 * 1500) / (OF_BANDWIDTH * 2e12)
    prefill = 64 * (2 * 1e9 * 1000 + 2 * 10 * 1000 * 1000**2) / (OF_FLOPS * 1e15)
    assert plain.generation == pytest.approx(prefill + 1000 * step)
    assert plain.iteration == pytest.approx(plain.generation + plain.log_probs + plain.update + plain.publishing)


def test_what_changes_the_update() -> None:
    plain = found()
    assert found("model.enable_gradient_checkpointing=true").update == pytest.approx(4 / 3 * plain.update)
    assert found("model.lora.rank=4").update == pytest.approx(2 / 3 * plain.update)
    assert found("actor.ppo_epochs=2").update == pytest.approx(2 * plain.update)
    assert found("trainer.num_workers=2", "rollout.chunk_prompts=32").update == pytest.approx(plain.update / 2)
    assert found("actor.old_log_probs=engine").log_probs == 0
    beside = found("actor.use_kl_loss=true", "scoring.reference.where=train_workers")
    assert beside.log_probs == pytest.approx(2 * plain.log_probs)
    state = 8 * 1.1e9
    moved = found("actor.fsdp.offload=optimizer").update - plain.update
    assert moved == pytest.approx(2 * state / TO_HOST)
    assert found("actor.fsdp.offload=all").update > plain.update
    assert found("algorithm=ppo", "critic.optim.lr=1e-5").update == pytest.approx(2 * plain.update)


def test_gathers_count_where_they_take_longer() -> None:
    """32 workers with one short pass each wait for the network; copies of the shards in each node do not."""
    many = ["trainer.num_workers=32", "rollout.chunk_prompts=2", "actor.ppo_max_token_len_per_gpu=2000"]
    flat, copies = found(*many), found(*many, "actor.parallel.replicate=4")
    assert copies.update < flat.update
    assert flat.update == pytest.approx(8 * 1.1e9 * (2 + 2 + 4) * 31 / 32 / 40e9)
    assert copies.update == pytest.approx(8 * 1.1e9 * (2 + 2 + 4) * 7 / 8 / 200e9)
    assert copies.update > 3 * ROWS * FORWARD / 32 / (OF_FLOPS * 1e15)


def test_experts_that_no_token_chose_are_not_read() -> None:
    sizes = SIZES | {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
    mixture = ModelFiles(sizes, MODEL.parameters, MODEL.head, MODEL.tables, routed=900_000_000)
    sparse = found(models=Models(mixture, mixture, mixture, None))
    assert sparse.update < 0.2 * found().update
    one = ["rollout.max_num_seqs=1", "rollout.max_num_batched_tokens=4096"]
    assert found(*one, models=Models(mixture, mixture, mixture, None)).generation < 0.3 * found(*one).generation


def test_a_small_cache_holds_fewer_sequences() -> None:
    assert found("rollout.gpu_memory_utilization=0.05").generation > 1.5 * found().generation


def test_what_happens_at_the_same_time() -> None:
    stale = found("algorithm.max_staleness=1")
    train = stale.log_probs + stale.update + stale.publishing
    assert stale.iteration == pytest.approx(max(stale.generation, train))
    early = found("rollout.chunk_prompts=16")
    assert early.beside == pytest.approx(early.log_probs + early.update)
    assert found("trainer.stream_gradients=false", "rollout.chunk_prompts=16").beside == 0
    shared = ["algorithm.max_staleness=1", "rollout.num_gpus=0.4", "trainer.gpus_per_worker=0.6"]
    assert found(*shared).beside == 0


def test_nothing_is_said_of_cpus_or_unknown_gpus() -> None:
    for settings in (["trainer.use_gpu=false"], ["rollout.num_gpus=0"]):
        config = load_config([*RUN, *settings])
        assert times(config, MODELS, estimate(config, MODELS), GPU) is None
    config = load_config(RUN)
    assert times(config, MODELS, estimate(config, MODELS), Gpu("Z2", GIB, None, None)) is None
