"""Times of phases on hand-worked cases, and what changes them."""

from dataclasses import replace

import pytest

from pipeline.config import load_config
from pipeline.plan.gpus import GIB, Gpu
from pipeline.plan.memory import Models, estimate
from pipeline.plan.models import ModelFiles
from pipeline.plan.time import OF_BANDWIDTH, OF_FLOPS, PUBLISHED, TO_HOST, Times, times

SIZES = {"hidden_size": 1000, "num_hidden_layers": 10, "num_attention_heads": 10, "vocab_size": 50_000}
MODEL = ModelFiles(SIZES, 1_100_000_000, head=50_000_000, tables=100_000_000)
MODELS = Models(MODEL, MODEL.with_value_head(), MODEL, MODEL)
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
    reference = ["actor.use_kl_loss=true", "scoring.reference.where=train_workers"]
    assert found(*reference).log_probs == pytest.approx(2 * plain.log_probs)
    smaller = Models(MODEL, MODEL, replace(MODEL, parameters=600_000_000), None)
    less = ROWS * 2 * 5e8 * 2000 / (OF_FLOPS * 1e15)
    assert found(*reference, models=smaller).log_probs == pytest.approx(2 * plain.log_probs - less)
    replay = found("data.recorded_run=runs/x")
    assert (replay.generation, replay.publishing, replay.update) == (0, 0, plain.update)
    state = 8 * 1.1e9
    moved = found("actor.fsdp.offload=optimizer").update - plain.update
    assert moved == pytest.approx(2 * state / TO_HOST)
    assert found("actor.fsdp.offload=all").update > plain.update
    ppo = ["algorithm=ppo", "critic.optim.lr=1e-5"]
    # A critic has a head of one column.
    of_critic = 3 * ROWS * (FORWARD - 2 * (5e7 - 1e3) * 1000) / (OF_FLOPS * 1e15)
    assert found(*ppo).update == pytest.approx(plain.update + of_critic)
    values = found(*ppo, "scoring.value.num_gpus=1", "actor.old_log_probs=engine").log_probs
    assert values == pytest.approx(of_critic / 3)
    judge = ["reward.model.path=owner/judge", "scoring.reward_model.num_gpus=1", "actor.old_log_probs=engine"]
    assert found(*judge).log_probs == pytest.approx(ROWS * (FORWARD - 2 * 5e7 * 1000) / (OF_FLOPS * 1e15))


def test_gathers_count_where_they_take_longer() -> None:
    """32 workers with one short pass each wait for the network; copies of the shards in each node do not."""
    many = ["trainer.num_workers=32", "rollout.chunk_prompts=2", "actor.ppo_max_token_len_per_gpu=2000"]
    flat, copies = found(*many), found(*many, "actor.parallel.replicate=4")
    assert copies.update < flat.update
    # The embedding of 50 million is not gathered for the backward pass.
    moved = 2 * 1.1e9 + 2 * 1.05e9 + 4 * 1.1e9
    assert flat.update == pytest.approx(8 * moved * 31 / 32 / 40e9)
    assert copies.update == pytest.approx(8 * moved * 7 / 8 / 200e9)
    assert flat.log_probs == pytest.approx(8 * 2 * 1.1e9 * 31 / 32 / 40e9)
    assert found(*many, "model.lora.rank=4").update == pytest.approx(8 * 2 * (1.1e9 + 1.05e9) * 31 / 32 / 40e9)
    assert copies.update > 3 * ROWS * FORWARD / 32 / (OF_FLOPS * 1e15)


DIVIDED = ModelFiles(
    SIZES | {"hidden_size": 800, "num_attention_heads": 8, "num_key_value_heads": 4},
    1_100_000_000,
    head=40_000_000,
    tables=80_000_000,
)
"""10 layers of 1.02e9 parameters in all; 800 queries and 400 keys of a token; embedding and head of 4e7 each."""
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
MIXTURE = replace(DIVIDED, config=DIVIDED.config | EXPERTS, routed=800_000_000)
"""The same with 16 experts in a layer, of which a token passes through 2: 1.02e9 - 8e8 x 14/16 = 3.2e8 parameters."""
MESH = [
    *("trainer.num_workers=32", "actor.parallel.tensor=2", "actor.parallel.sequence=4", "rollout.chunk_prompts=1"),
    *("actor.ppo_max_token_len_per_gpu=2000", "actor.ppo_mini_batch_size=32"),
    "model.enable_gradient_checkpointing=true",
]


def test_a_mesh_worked_by_hand() -> None:
    """256 rows of 1,000 + 1,000 tokens, in 2 mini-batches. 4 groups of 8 ranks see 128,000 tokens each, in 8 passes of
    4 x 2,000 for each mini-batch."""
    models = Models(DIVIDED, DIVIDED.with_value_head(), DIVIDED, None)
    flat = found(*MESH, models=models)
    # A pass brings weights of 2 bytes, again without the embedding, and takes gradients of 4 bytes: of half a model,
    # (2.2e9 + 2.12e9 + 4.4e9) / 2 = 4.36e9. 15 of 16 shards are elsewhere; 32 ranks are on several nodes.
    # 16 passes x 4.36e9 x 15/16 / 40e9 = 1.635 s. For log-probs: 16 x 1.1e9 x 15/16 / 40e9 = 0.4125 s.
    assert (flat.update, flat.log_probs) == (pytest.approx(1.635), pytest.approx(0.4125))
    assert flat.beside == pytest.approx(0.4125 + 1.635 / 2), "the first of two steps may come early"
    # 4 copies keep 4 shards x 2 in a node: 16 x 4.36e9 x 3/4 / 200e9 = 0.2616 s, less than computing takes.
    # 2 copies of 8 shards x 2 are still on several: 16 x 4.36e9 x 7/8 / 40e9 = 1.526 s.
    assert found(*MESH, "actor.parallel.replicate=2", models=models).update == pytest.approx(1.526)
    # A row has 2 x 1.02e9 x 2,000 + 2 x 4e7 x 1,000 + 2 x 10 x 800 x 2,000^2 = 4.224e12 operations; 256 rows, 4 times
    # with checkpointing, by 32 workers of 4e14 a second: 0.33792 s.
    # Exchanges of a token and layer: tensor parallelism, where a sum sends half of 800 numbers twice, has 2 forward,
    # made twice, and 5 backward: 9 x 800 = 7,200. A rank has 2 heads of keys of 100, and copies them for 4: half of 800
    # + 800 + 800 + 800 numbers, of which 3/4 travel, is 1,200, three times: 3,600.
    # (7,200 + 3,600) x 10 layers x 2 bytes x 32,000 tokens of a rank / 200e9 = 0.03456 s.
    copies = found(*MESH, "actor.parallel.replicate=4", models=models)
    assert copies.update == pytest.approx(0.33792 + 0.03456)
    # Once forward alone: 0.08448 s, and (1,600 + 1,200) x 10 x 2 x 32,000 / 200e9 = 0.00896 s.
    assert copies.log_probs == pytest.approx(0.08448 + 0.00896)
    # A sequence of 8 is on two nodes. It copies keys 4 times: of half of 800 + 1,600 + 1,600 + 800 numbers 7/8 travel,
    # 2,100. 2,100 x 3 x 10 x 2 x 32,000 / 40e9 = 0.1008 s, and 0.02304 s of sums; two passes gather less.
    long = ["actor.parallel.replicate=2", "actor.parallel.sequence=8", "actor.ppo_max_token_len_per_gpu=16000"]
    wide = found(*MESH, *long, models=models)
    assert wide.update == pytest.approx(0.33792 + 0.02304 + 0.1008)
    # Offloaded, 1.1e9 + 1.06e9 + 1.1e9 numbers of 4 bytes come and go over 25e9, an eighth to each rank: 16 passes take
    # 1.0432 s. Each of 2 steps reads 16 and writes 12 bytes of 1.1e9 parameters on the 8 ranks of a node: 0.308 s.
    offloaded = found(*MESH, "actor.parallel.replicate=4", "actor.fsdp.offload=all", models=models)
    assert offloaded.update == pytest.approx(1.0432 + 2 * 0.308)
    # Two replicas score the rows: 256 x 4.224e12 / 4e14 / 2 = 1.35168 s.
    pools = ["actor.use_kl_loss=true", "scoring.reference.num_gpus=1", "scoring.reference.num_workers=2"]
    scored = found(*MESH, *pools, "actor.old_log_probs=engine", models=models)
    assert scored.log_probs == pytest.approx(1.35168)


def test_ranks_with_different_experts_worked_by_hand() -> None:
    """Two ranks divide the experts, and the tokens that they send to them."""
    # 2 x 3.2e8 x 2,000 + 8e10 + 6.4e10 = 1.424e12 operations of a row: 256 x 1.424e12 x 4 / 32 / 4e14 = 0.11392 s.
    # Forward, twice: a sum (2 x 800), half of the tokens to 2 experts and back (2 x 2 / 2 x 800), the outputs of the
    # others (800), of which half travels: 5 x 400. Backward 3 sums, and the same of experts: 9 x 400.
    # 7,600 numbers x 10 layers x 2 bytes x 32,000 tokens of a rank / 200e9 = 0.02432 s.
    mesh = ["actor.parallel.replicate=16", "actor.parallel.sequence=1", "actor.parallel.expert=2"]
    result = found(*MESH, *mesh, models=Models(MIXTURE, MIXTURE, MIXTURE, None))
    assert result.update == pytest.approx(0.11392 + 0.02432)


def test_an_engine_of_four_gpus_worked_by_hand() -> None:
    """Two engines, 128 rows each, of which 64 run together."""
    engines = ["rollout.num_engines=2", "rollout.tensor_parallel_size=4", "rollout.max_num_seqs=64"]
    models = Models(DIVIDED, DIVIDED, DIVIDED, None)
    # A token has 2 x 10 x 400 x 2 / 4 = 4,000 bytes of cache on a GPU, and lies on average before 1,500 of them. A step
    # reads 1.1e9 x 2 / 4 + 64 x 4,000 x 1,500 = 9.34e8 bytes at 1.2e12: 2,000 steps take 1.556667 s.
    # 32 prompts of 2 x 1.02e9 x 1,000 + 2 x 10 x 800 x 1,000^2 = 2.056e12 operations at 1.6e15: 0.04112 s.
    # Two sums a layer send 2 x 2 x 3/4 x 800 numbers of 2 bytes: 10 layers x 4,800 / 200e9 = 2.4e-7 s for each of
    # 32,000 + 128,000 tokens: 0.0384 s.
    assert found(*engines, models=models).generation == pytest.approx(1.556667 + 0.04112 + 0.0384, rel=1e-6)
    # Without shared prompts 128 of them: 0.16448 s, and 256,000 tokens: 0.06144 s.
    apart = found(*engines, "rollout.enable_prefix_caching=false", models=models)
    assert apart.generation == pytest.approx(1.556667 + 0.16448 + 0.06144, rel=1e-6)
    # A GPU of 1e13 computes longer than it reads: 64 x (2 x 1.02e9 + 2 x 4e7 + 4 x 10 x 800 x 1,500) / 1.6e13 is
    # 0.008672 s a step, 17.344 s in all; prompts 4.112 s.
    slow = found(*engines, models=models, gpu=replace(GPU, flops=1e13))
    assert slow.generation == pytest.approx(17.344 + 4.112 + 0.0384)
    # Half of 1.356e9 bytes has room for 16 sequences of 2,000 x 4,000 bytes beside 5.5e8 of weights: 8,000 steps of
    # (5.5e8 + 16 x 4,000 x 1,500) / 1.2e12 s take 4.306667 s.
    small = found(*engines, "rollout.gpu_memory_utilization=0.5", models=models, gpu=replace(GPU, memory=1_356_000_000))
    assert small.generation == pytest.approx(4.306667 + 0.04112 + 0.0384, rel=1e-6)
    # With room for less than one sequence it runs alone: 128,000 steps of (5.5e8 + 4,000 x 1,500) / 1.2e12 s.
    least = found(*engines, "rollout.gpu_memory_utilization=0.5", models=models, gpu=replace(GPU, memory=1_110_000_000))
    assert least.generation == pytest.approx(59.306667 + 0.04112 + 0.0384, rel=1e-6)
    # Two tokens choose 1 - (7/8)^2 = 15/64 of the experts: (3e8 + 8e8 x 15/64) x 2 / 4 + 2 x 4,000 x 1,500 = 2.5575e8
    # bytes in each of 64,000 steps: 13.64 s; prompts 32 x (2 x 3.2e8 x 1,000 + 1.6e10) / 1.6e15 = 0.01312 s.
    two = [*engines, "rollout.max_num_seqs=2", "rollout.max_num_batched_tokens=4096"]
    sparse = found(*two, models=Models(MIXTURE, MIXTURE, MIXTURE, None))
    assert sparse.generation == pytest.approx(13.64 + 0.01312 + 0.0384)


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
