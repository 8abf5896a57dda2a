"""Memory on hand-worked cases, and what the files of models' folders rule out."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from pipeline.config import ConfigError, load_config
from pipeline.config.learner import OptimConfig
from pipeline.plan.memory import Models, estimate, read_models
from pipeline.plan.models import ModelFiles, read_model
from pipeline.plan.pipelining import bubbles, megatron_bytes, micro_batches, stage_sizes
from pipeline.train.optim import build_optimizer
from tests.plan.test_plan import PPO, shown, small


def write_model(folder: Path, shapes: dict[str, list[int]], **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_memory_of_a_local_model(tmp_path):
    write_model(
        tmp_path,
        {"a": [100, 10], "b": [24]},
        vocab_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=64,
    )
    overrides = [f"model.path={tmp_path}", "data.max_prompt_length=10", "data.max_response_length=30"]
    memory = small(*overrides, "rollout.max_num_seqs=5", "actor.logits_chunk_tokens=7").memory
    assert memory is not None
    assert memory.parameters == 1024
    assert memory.train_weights == memory.train_gradients == 1024 * 4 // 2
    assert memory.train_optimizer == 2 * 1024 * 4 // 2
    assert memory.engine_weights == 1024 * 2
    assert memory.engine_kv_needed == 2 * 2 * 2 * 16 * 2 * 40 * 5  # K and V, layers, heads, head size, bytes, tokens
    assert memory.train_logits == 3 * 4 * 7 * 100
    assert "1024" not in shown(*overrides) and "memory of an engine" in shown(*overrides)


def test_bfloat16_weights_have_a_state_of_ten_bytes(tmp_path):
    write_model(tmp_path, {"a": [32, 32]}, vocab_size=100, num_hidden_layers=1, num_attention_heads=2, hidden_size=10)
    memory = small(f"model.path={tmp_path}", *LENGTHS, "model.dtype=bfloat16", "trainer.num_workers=1").memory
    assert (memory.train_weights, memory.train_gradients, memory.train_optimizer) == (2 * 1024, 2 * 1024, 10 * 1024)
    # As the optimiser has it.
    weight = torch.nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16))
    optimizer = build_optimizer(torch.nn.ParameterList([weight]), OptimConfig())
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert sum(part.nbytes for name, part in optimizer.state[weight].items() if name != "step") == 10 * 1024


def test_memory_of_adapters(tmp_path):
    """A frozen base has no gradient and no optimiser state; tables and the head have no adapter."""
    shapes = {"model.embed_tokens.weight": [100, 10], "model.layers.0.mlp.up_proj.weight": [30, 10]}
    shapes |= {"model.layers.0.mlp.down_proj.weight": [10, 30], "model.norm.weight": [10], "lm_head.weight": [100, 10]}
    write_model(tmp_path, shapes, vocab_size=100, num_hidden_layers=1, num_attention_heads=2, hidden_size=10)
    overrides = [f"model.path={tmp_path}", "data.max_prompt_length=10", "data.max_response_length=30"]
    overrides += ["model.lora.rank=4", "model.dtype=bfloat16"]
    memory = small(*overrides).memory
    assert memory is not None and memory.adapter == 4 * (30 + 10) * 2
    assert memory.train_gradients == memory.adapter * 4 // 2 and memory.train_optimizer == 2 * memory.adapter * 4 // 2
    assert memory.train_weights == 2610 * 2 // 2 + memory.train_gradients
    one = small(*overrides, "model.lora.target_modules=[up_proj]").memory
    assert one is not None and one.adapter == 4 * 40
    assert "LoRA of rank 4 with 0.0M parameters, published merged" in shown(*overrides)
    base = 2610 * 2 // 2 - 1000 + 11
    assert abs(small(*overrides, *PPO).memory.train_critic - (base + 4 * memory.train_gradients)) < 12


@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_stages(tmp_path: Path, tied: bool) -> None:
    """Four layers of 400 parameters; embedding and head have 1000 each, as many as two and a half layers."""
    shapes = {"model.embed_tokens.weight": [100, 10], "model.norm.weight": [10]}
    shapes |= {f"model.layers.{number}.mlp.up_proj.weight": [40, 10] for number in range(4)}
    shapes |= {} if tied else {"lm_head.weight": [100, 10]}
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 10, "vocab_size": 100}
    write_model(tmp_path, shapes, **sizes, tie_word_embeddings=tied, model_type="qwen3", head_dim=4)
    run = [f"model.path={tmp_path}", *LENGTHS, "trainer.num_workers=4", "actor.fsdp.reshard_after_forward=true"]
    run += ["actor.ppo_max_token_len_per_gpu=40"]
    whole, staged = (small(*run, f"actor.parallel.pipeline={stages}").memory for stages in (1, 2))
    assert whole is not None and staged is not None
    assert whole.stages == () and len(staged.stages) == 2
    # The first stage keeps the activations of two micro-batches, the last one has the logits.
    assert staged.train_peak == max(staged.stages)
    sized = stage_sizes(load_config([*run, "actor.parallel.pipeline=2"]), read_model(tmp_path))
    layer = (4 * 400 + 10) // 4
    assert [(size.layers, size.model.parameters, size.held) for size in sized] == [
        (range(2), 1000 + 2 * layer, 2),
        (range(2, 4), 1000 + 2 * layer, 1),
    ]
    assert staged.train_weights == (1000 + 2 * layer) * 4 // 2
    assert staged.engine_weights == whole.engine_weights and staged.version == whole.version
    text = shown(*run, "actor.parallel.pipeline=2")
    assert "pipeline 2 x replicate 1 x shard 2 x tensor 1 = 4 train workers" in text
    assert "stage 0: layers 0 to 1 and the embedding" in text and "stage 1: layers 2 to 3 and the head" in text


def test_memory_of_megatron(tmp_path: Path) -> None:
    """Eight ranks: two stages of two tensor ranks, so two ranks with the same weights; experts over four."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 10, "vocab_size": 100}
    sizes |= {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    shapes = {"model.embed_tokens.weight": [100, 10], "lm_head.weight": [100, 10]}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.self_attn.q_proj.weight": [40, 10]}
        for expert in range(4):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            shapes |= {f"{name}.{part}_proj.weight": [20, 10] for part in ("gate", "up")}
            shapes |= {f"{name}.down_proj.weight": [10, 20]}
    write_model(tmp_path, shapes, **sizes)
    run = [f"model.path={tmp_path}", *LENGTHS, "trainer.num_workers=8", "actor.strategy=megatron"]
    run += ["actor.parallel.tensor=2", "actor.parallel.pipeline=2", "actor.parallel.expert=4"]
    config = load_config([*run, "model.dtype=bfloat16", "actor.fsdp.param_dtype=bfloat16"])
    [first, _] = stage_sizes(config, read_model(tmp_path))
    dense, experts = (1000 + 400) // 2, 4 * 600 // 4
    assert megatron_bytes(config, first.model) == (
        2 * (dense + experts),
        4 * (dense + experts),
        12 * (dense // 2 + experts),
    )
    config.model.dtype, config.actor.fsdp.param_dtype = "float32", None
    assert megatron_bytes(config, first.model)[2] == 8 * (dense // 2 + experts)
    models = read_models(config)
    assert models is not None
    memory = estimate(config, models)
    assert memory.train_gathered == 0 and memory.train_weights == 4 * (dense + experts)


def test_few_micro_batches_leave_stages_waiting(tmp_path: Path) -> None:
    write_model(tmp_path, {"a": [4, 4]}, num_hidden_layers=4, num_attention_heads=2, hidden_size=4, vocab_size=8)
    run = [f"model.path={tmp_path}", *LENGTHS, "trainer.num_workers=2", "actor.parallel.pipeline=2"]
    run += ["trainer.stream_gradients=false"]
    # Eight prompts of four samples are 32 rows of at most 40 tokens.
    config = load_config([*run, "data.train_batch_size=8", "rollout.n=4", "actor.ppo_max_token_len_per_gpu=160"])
    assert micro_batches(config) == 8 and list(bubbles(config)) == []
    config.actor.ppo_max_token_len_per_gpu = 320
    [found] = bubbles(config)
    assert "at most 4 micro-batches" in found and "20%" in found and "11%" in found
    config.actor.ppo_mini_batch_size = 2
    config.actor.ppo_max_token_len_per_gpu = 40
    assert micro_batches(config) == 8


def test_every_context_of_an_episode_may_have_a_prompt(tmp_path):
    write_model(tmp_path, {"a": [100, 10]}, num_hidden_layers=2, num_attention_heads=4, hidden_size=64)
    overrides = [f"model.path={tmp_path}", "data.max_prompt_length=10", "data.max_response_length=30"]
    one, three = (small(*overrides, "agent.program=a:run", f"agent.max_contexts={n}") for n in (1, 3))
    rows = one.config.data.train_batch_size * one.config.rollout.n
    assert three.memory.rows - one.memory.rows == rows * 2 * 10 * 4


def test_sizes_of_the_decoder_are_read_from_text_config(tmp_path):
    sizes = {"vocab_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    write_model(tmp_path, {"a": [100, 10]}, text_config=sizes)
    memory = small(f"model.path={tmp_path}", "data.max_prompt_length=10", "data.max_response_length=30").memory
    assert memory is not None
    assert memory.train_logits > 0 and memory.engine_kv_needed > 0


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ([1], "config.json"),
        ({"text_config": None, "architectures": ["Qwen3ForCausalLM"]}, None),
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            "Qwen3ForSequenceClassification config.json",
        ),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM model.path config.json"),
        ({"is_encoder_decoder": True}, "encoder model.path config.json"),
    ],
)
def test_models_that_generate_nothing_are_refused(tmp_path, config, keys, named):
    write_model(tmp_path, {"a": [1]})
    (tmp_path / "config.json").write_text(json.dumps(config))
    if keys is None:
        assert small(f"model.path={tmp_path}").memory
        return
    with pytest.raises(ConfigError) as refused:
        small(f"model.path={tmp_path}")
    named(refused.value, keys)


def test_a_critic_may_be_a_model_for_classification(tmp_path):
    write_model(tmp_path, {"a": [1]}, architectures=["Qwen3ForSequenceClassification"])
    assert small("model.path=owner/model", *PPO, f"critic.path={tmp_path}")


@pytest.mark.parametrize("tower", ["vision_config", "audio_config"])
def test_models_that_read_more_than_text_are_refused(tmp_path, tower, named):
    write_model(tmp_path, {"a": [100, 10]}, **{tower: {"hidden_size": 8}})
    with pytest.raises(ConfigError) as refused:
        small(f"model.path={tmp_path}")
    named(refused.value, f"model.path {tower} config.json")


@pytest.mark.parametrize("staleness", [0, 2])
def test_memory_of_versions_that_engines_read(tmp_path, monkeypatch, staleness):
    write_model(tmp_path, MODEL, vocab_size=100, hidden_size=8)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    settings = [f"model.path={tmp_path}", *LENGTHS, f"algorithm.max_staleness={staleness}", "rollout.dtype=bfloat16"]
    plain, kept = small(*settings).memory, small(*settings, "trainer.weight_transport=nixl").memory
    assert plain and kept and plain.train_versions == 0
    assert kept.train_versions == (staleness + 2) * (1600 + 64) * 2 // 2  # in two bytes, on two workers
    assert kept.train_worker == plain.train_worker + kept.train_versions
    assert "weights for the engines" in shown(*settings, "trainer.weight_transport=nixl")


MODEL = {"model.embed_tokens.weight": [100, 8], "model.layers.0.w": [8, 8], "lm_head.weight": [100, 8]}
DECODER = 100 * 8 + 8 * 8 + 8 + 1  # with a value head of one row and a bias in place of the head
LENGTHS = ["data.max_prompt_length=10", "data.max_response_length=30"]


def test_memory_of_a_critic(tmp_path):
    write_model(tmp_path, MODEL, vocab_size=100, hidden_size=8)
    model = [f"model.path={tmp_path}", *LENGTHS]
    alone, both = small(*model).memory, small(*model, *PPO).memory
    assert alone and both
    assert alone.train_critic == 0 and alone.scorer_weights == {}
    assert both.train_critic == 4 * (DECODER * 4 // 2)
    assert both.train_worker == alone.train_worker + both.train_critic
    assert both.scorer_weights == {"reference": (1600 + 64) * 4, "value": DECODER * 4}
    text = shown(*model, *PPO)
    assert f"a critic from {tmp_path}, KL to {tmp_path} in reward" in text
    assert "vanilla loss (token-mean), a critic" in text
    other = shown(*model, "actor.loss_agg_mode=seq-mean-token-mean", "algorithm.rollout_correction.rollout_is=token")
    assert "vanilla loss (seq-mean-token-mean), correction rollout_is=token" in other
    assert "logits 1 MiB, critic 7 KiB" in text and "memory of a value replica" in text


def test_memory_of_models_from_other_folders(tmp_path):
    for name, width in (("policy", 8), ("critic", 4), ("reference", 2)):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name, {"model.w": [100, width]}, vocab_size=100, hidden_size=width)
    paths = [f"model.path={tmp_path}/policy", *LENGTHS, *PPO]
    own = [f"critic.path={tmp_path}/critic", f"scoring.reference.path={tmp_path}/reference"]
    types = ["critic.fsdp.param_dtype=bfloat16", "scoring.reference.dtype=float16"]
    memory = small(*paths, *own, *types).memory
    assert memory and memory.train_critic == 4 * (405 * 4 // 2)
    assert memory.scorer_weights == {"reference": 200 * 2, "value": 405 * 2}
    memory = small(*paths, "critic.path=owner/critic", "scoring.reference.path=owner/reference").memory
    assert memory and memory.train_critic is None
    assert memory.scorer_weights == {"reference": None, "value": None}
    assert "critic not estimated" in shown(*paths, "critic.path=owner/critic")


def test_rows_grow_with_what_is_read(tmp_path):
    write_model(tmp_path, MODEL)

    def rows(*overrides: str) -> int:
        memory = small(f"model.path={tmp_path}", *LENGTHS, *overrides).memory
        assert memory
        return memory.rows

    # Ids, mask, log-probs, advantages and returns; then one float32 per token for each further column.
    assert rows() == 256 * (10 * 4 + 30 * (4 + 1 + 4 + 4 + 4))
    assert rows("actor.use_kl_loss=true") == rows() + 256 * 30 * 4
    assert rows(*PPO) == rows() + 256 * 30 * (4 + 4)
    assert rows("algorithm.adv_estimator=optimal_token_baseline") == rows() + 256 * 30 * 4
    assert rows("algorithm.adv_estimator=remax") == rows() * 5 // 4
    assert rows("rollout.min_tokens=2") == rows() + 256 * 30 * 4
    assert rows("rollout.top_k=20") == rows() + 256 * 30 * 4 * 21
    assert rows("rollout.top_p=0.9", "rollout.max_support=50") == rows() + 256 * 30 * 4 * 51
    taught = f"teacher.path={tmp_path}", "actor.distill_coef=1", "actor.distill_top_k=8"
    assert rows(*taught) == rows() + 256 * 30 * 4 * (1 + 16)


def test_reference_of_another_vocabulary(tmp_path, named):
    for name, size in (("policy", 100), ("reference", 90)):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name, {"model.w": [1]}, vocab_size=size)
    paths = [f"model.path={tmp_path}/policy", f"scoring.reference.path={tmp_path}/reference"]
    small(*paths)
    with pytest.raises(ConfigError) as refused:
        small(*paths, "actor.use_kl_loss=true")
    named(refused.value, "scoring.reference.path 90 model.path 100")


@pytest.mark.parametrize("key", ["critic.path", "scoring.reference.path"])
def test_row_longer_than_a_further_model(tmp_path, key, named):
    for name, longest in (("policy", 2000), ("other", 1000)):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name, {"model.w": [1]}, max_position_embeddings=longest)
    paths = [f"model.path={tmp_path}/policy", f"{key}={tmp_path}/other"]
    small(*paths)
    with pytest.raises(ConfigError) as refused:
        small(*paths, *PPO)
    named(refused.value, f"data.max_prompt_length data.max_response_length 1000 {key}")


def test_a_row_of_the_length_that_yarn_gives_is_taken(tmp_path, named):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    write_model(tmp_path, {"a": [1]}, max_position_embeddings=512, rope_scaling=yarn)
    small(f"model.path={tmp_path}")
    with pytest.raises(ConfigError) as refused:
        small(f"model.path={tmp_path}", "data.max_prompt_length=1537")
    named(refused.value, "data.max_prompt_length data.max_response_length 2049 2048 YaRN")


def test_row_longer_than_the_model(tmp_path, named):
    write_model(tmp_path, {"a": [1]}, max_position_embeddings=1000)
    with pytest.raises(ConfigError) as refused:
        small(f"model.path={tmp_path}")
    named(refused.value, "data.max_prompt_length data.max_response_length 1024 1000 model.path")


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, struct.pack("<Q", 3) + b"abc"])
def test_damaged_weights_are_named(tmp_path, content):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors is (not a complete safetensors file|empty)"):
        read_model(tmp_path)


def test_only_the_weights_of_the_model_are_counted(tmp_path):
    write_model(tmp_path, MODEL)
    alone = read_model(tmp_path)
    np_zeros = {f"old.{name}": np.zeros(shape, np.float32) for name, shape in MODEL.items()}
    for name in ("consolidated.safetensors", "model-00001-of-00003.safetensors", "adapter_model.safetensors"):
        save_file(np_zeros, tmp_path / name, metadata={"format": "pt"})
    assert read_model(tmp_path) == alone and alone.parameters
    import torch

    (tmp_path / "model.safetensors").unlink()
    torch.save({name: torch.zeros(shape) for name, shape in MODEL.items()}, tmp_path / "pytorch_model.bin")
    assert read_model(tmp_path) == alone


def test_a_tied_head_is_counted_once(tmp_path):
    shapes = {"model.embed_tokens.weight": [100, 16], "lm_head.weight": [100, 16]}
    write_model(tmp_path, shapes, tie_word_embeddings=True)
    assert (read_model(tmp_path).parameters, read_model(tmp_path).head) == (1600, 0)
    write_model(tmp_path, shapes, tie_word_embeddings=False)
    assert (read_model(tmp_path).parameters, read_model(tmp_path).head) == (3200, 1600)


def test_a_hub_name_is_measured_by_the_cache(tmp_path, monkeypatch):
    import huggingface_hub

    assert read_model("some/model") is None
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    write_model(tmp_path, MODEL, max_position_embeddings=1000)
    assert read_model("some/model") == read_model(tmp_path)
    with pytest.raises(ConfigError, match="more than the 1000 of the model model.path=some/model"):
        small("model.path=some/model")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert read_model("some/model").parameters == 0


def test_what_waits_in_host_memory_is_not_on_the_gpu(tmp_path):
    write_model(tmp_path, MODEL, vocab_size=100, hidden_size=8)
    settings = [f"model.path={tmp_path}", *LENGTHS, "trainer.use_gpu=true", *PPO]
    shard, critic = (1600 + 64) * 4 // 2, DECODER * 4 // 2  # float32 on two workers
    plain = small(*settings).memory
    assert plain and plain.offloaded == 0
    for kind, left in (("optimizer", 2), ("all", 0)):
        found = small(*settings, f"actor.fsdp.offload={kind}", f"critic.fsdp.offload={kind}").memory
        assert found and found.train_worker == left * (shard + critic) + found.train_logits
        assert found.offloaded == plain.train_worker - found.train_worker
    assert "6 KiB of these in host memory instead" in shown(*settings, "actor.fsdp.offload=optimizer")


def test_memory_of_a_reference_in_the_train_workers(tmp_path):
    """Its shard is in the type of the computation, and nothing of it has a gradient or is saved."""
    write_model(tmp_path, MODEL, vocab_size=100, hidden_size=8)
    model = [f"model.path={tmp_path}", *LENGTHS, "actor.use_kl_loss=true"]
    beside = [*model, "scoring.reference.placement=train_workers"]
    alone, found = small(*model).memory, small(*beside).memory
    assert alone and found and "reference" in alone.scorer_weights and not found.scorer_weights
    assert (alone.train_reference, found.train_reference) == (0, (1600 + 64) * 4 // 2)
    assert found.train_worker == alone.train_worker + found.train_reference
    assert found.train_start == alone.train_start + found.train_reference and found.checkpoint == alone.checkpoint
    assert found.rows < alone.rows, "no column travels"
    gpu = small(*beside, "trainer.use_gpu=true").memory
    half = small(*beside, "scoring.reference.dtype=bfloat16").memory
    assert gpu and half and gpu.train_reference == half.train_reference == (1600 + 64) * 2 // 2
    offloaded = small(*beside, "trainer.use_gpu=true", "scoring.reference.offload=true").memory
    assert offloaded and offloaded.offloaded == gpu.train_reference
    assert offloaded.train_worker == gpu.train_worker - gpu.train_reference
    text = shown(*beside, "trainer.use_gpu=true", "scoring.reference.offload=true")
    assert f"KL to {tmp_path} in loss, computed by the train workers" in text and "without adapters" not in text
    assert "reference 2 KiB; 2 KiB of these in host memory instead" in text
    adapters = shown(*model, "model.lora.rank=4", "model.lora.target_modules=[w]")
    assert "computed by the train workers without adapters" in adapters and ", reference" not in adapters
    unknown = shown(*beside, "scoring.reference.path=owner/reference")
    assert "reference not estimated" in unknown


def test_memory_at_the_start_and_space_for_checkpoints(tmp_path):
    write_model(tmp_path, MODEL, vocab_size=100, hidden_size=8)
    memory = small(f"model.path={tmp_path}", *LENGTHS, *PPO).memory
    shard, critic = (1600 + 64) * 4 // 2, DECODER * 4 // 2
    assert memory and memory.train_start == shard + critic and memory.checkpoint == 3 * (shard + critic)
    text = shown(f"model.path={tmp_path}", *LENGTHS, *PPO)
    assert "host memory at start" in text and "5 KiB per train worker, 6 KiB per reference replica" in text
    assert "space for checkpoints" in text and "15 KiB per train worker in TMPDIR" in text


def test_replicas_compute_in_bfloat16_on_gpus(tmp_path):
    write_model(tmp_path, MODEL, vocab_size=100, hidden_size=8)
    memory = small(f"model.path={tmp_path}", *LENGTHS, *PPO, "scoring.reference.num_gpus=1").memory
    assert memory and memory.scorer_weights == {"reference": (1600 + 64) * 2, "value": DECODER * 4}


def test_averages_of_8_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    write_model(tmp_path, MODEL, vocab_size=100, hidden_size=8)
    plain = small(f"model.path={tmp_path}", *LENGTHS, *PPO).memory
    found = small(f"model.path={tmp_path}", *LENGTHS, *PPO, "actor.optim.name=adamw_8bit").memory
    assert plain and found and plain.train_optimizer == (1600 + 64) * 8 // 2
    assert found.train_optimizer == 2 * 832 * 260 // 256 and found.train_critic == plain.train_critic
    both = small(f"model.path={tmp_path}", *LENGTHS, *PPO, "critic.optim.name=adamw_8bit").memory
    assert both and both.train_start == plain.train_start and both.train_critic < 0.63 * plain.train_critic


LLAMA = {
    "model.embed_tokens.weight": [100, 16],
    "lm_head.weight": [100, 16],
    **{f"model.layers.{layer}.w": [16, 40] for layer in range(3)},
}
SIZES = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 24}


def test_memory_of_a_pass(tmp_path):
    """Of what is gathered, the most is the gradients of both tables, of which one is converted; and what layers keep of
    50 tokens."""
    write_model(tmp_path, LLAMA, **SIZES)
    base = [f"model.path={tmp_path}", *LENGTHS, "trainer.use_gpu=true", "actor.ppo_max_token_len_per_gpu=50"]
    plain = small(*base).memory
    assert plain and plain.train_gathered == 2 * 3200 + 4 * 1600
    layer = 50 * (2 * (6 * 16 + 4 * (32 + 16 + 24)) + 8 * 16)
    assert plain.train_activations == 3 * layer
    inputs = 50 * 2 * 16 * 3
    checkpoints = [*base, "model.enable_gradient_checkpointing=true"]
    assert small(*checkpoints).memory.train_activations == inputs + layer
    offloaded = small(*checkpoints, "model.activation_offload=true").memory
    assert (offloaded.train_activations, offloaded.train_kept) == (layer, inputs)
    assert plain.train_peak == plain.train_worker + plain.train_gathered + plain.train_activations
    assert plain.train_idle == plain.train_worker - plain.train_logits
    divided = small(*base, "actor.parallel.tensor=2").memory
    assert divided.train_gathered == plain.train_gathered // 2 and divided.train_logits == plain.train_logits // 2
    assert divided.train_weights == plain.train_weights
    assert divided.train_activations == 3 * 50 * (2 * (6 * 16 + 2 * (32 + 16 + 24)) + 8 * 16)


@pytest.mark.parametrize(
    ("head", "embedding", "layer", "settings", "wanted"),
    [
        # Numbers of 2 bytes, summed in 4. In the end: gradients of both tables, and one of them in float32.
        (700, 700, 100, [], 2 * 1400 + 4 * 700),
        (700, 700, 100, ["actor.fsdp.reshard_after_forward=false"], 2 * (1400 + 700) + 4 * 700),
        (700, 700, 100, ["actor.fsdp.param_dtype=float32"], 4 * 1400 + 4 * 700),
        (700, 700, 100, ["actor.fsdp.reduce_dtype=bfloat16"], 2 * 1400 + 2 * 700),
        (700, 700, 100, ["actor.parallel.tensor=2"], (2 * 1400 + 4 * 700) // 2),
        # An embedding that is tied to the head is gathered with it, and has one gradient with it.
        (0, 700, 100, [], 2 * 700 + 4 * 700),
        # In the backward pass: head with gradient, two layers, and the gradient of one in both types.
        (50, 60, 100, [], 2 * (2 * 50 + 2 * 100 + 100) + 4 * 100),
        (50, 60, 100, ["actor.fsdp.reshard_after_forward=false"], 2 * (2 * 50 + 3 * 100 + 60 + 100) + 4 * 100),
        # Adapters leave no gradients of these. At the beginning: head and embedding; later head and layers.
        (700, 600, 100, ["model.lora.rank=4"], 2 * (700 + 600)),
        (50, 60, 100, ["model.lora.rank=4"], 2 * (50 + 200)),
        (50, 60, 100, ["model.lora.rank=4", "actor.fsdp.reshard_after_forward=false"], 2 * (50 + 300 + 60)),
    ],
)
def test_what_is_gathered_at_one_time(head, embedding, layer, settings, wanted):
    files = ModelFiles({"num_hidden_layers": 3}, head + embedding + 3 * layer, head, tables=head + embedding)
    config = load_config(["trainer.use_gpu=true", *settings])
    assert estimate(config, Models(files, files, files, None)).train_gathered == wanted


def test_memory_of_an_engine_of_several_gpus(tmp_path):
    write_model(tmp_path, LLAMA, **SIZES)
    engine = [f"model.path={tmp_path}", *LENGTHS, "rollout.num_gpus=1", "rollout.max_num_seqs=3"]
    one, four = (small(*engine, f"rollout.tensor_parallel_size={parts}").memory for parts in (1, 4))
    assert one.engine_weights == 4 * four.engine_weights == 2 * (3200 + 3 * 640)
    # Two heads of keys and values are on two GPUs each.
    assert one.engine_kv_needed == 2 * four.engine_kv_needed == 2 * 3 * 16 * 2 * 40 * 3


def test_experts(tmp_path):
    experts = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": [6, 16] for n in range(4)}
    shared = {"model.layers.0.mlp.shared_experts.up_proj.weight": [6, 16], "model.embed_tokens.weight": [100, 16]}
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    router = {"model.layers.0.mlp.gate.weight": [4, 16]}
    write_model(tmp_path, experts | shared | router, **SIZES | more)
    model = read_model(tmp_path)
    assert model and model.tables == 1600
    assert model.intermediate == 2 * 6
    found = estimate(small(f"model.path={tmp_path}", *LENGTHS).config, Models(model, model, model, None))
    # 64 rows of a mini-batch per worker, of 40 tokens each.
    tokens = 64 * 40 * (4 * (6 * 16 + 4 * (32 + 16 + 12) + 2 * 2 * 16) + 8 * 16)
    assert found.train_activations == 3 * tokens
    config = small(f"model.path={tmp_path}", *LENGTHS).config
    config.rollout.replay_routes = True
    # Two bytes for each expert of a token in three layers, in prompts and responses.
    replayed = estimate(config, Models(model, model, model, None))
    assert replayed.rows == found.rows + 256 * (10 + 30) * 2 * 2 * SIZES["num_hidden_layers"]
    # `transformers` computes with experts, and with what chooses them, without linear layers.
    assert list(model.matrices) == ["model.layers.0.mlp.shared_experts.up_proj"]


@pytest.mark.parametrize("experts", [0, 16])
def test_what_a_layer_keeps_is_what_torch_saves(experts):
    """The formula of activations against the tensors that torch saves for the backward pass of real layers."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 1}
    sizes |= {"vocab_size": 8, "head_dim": 64, "attn_implementation": "sdpa"}
    routed = {"num_experts": experts, "num_experts_per_tok": 4, "moe_intermediate_size": 192} if experts else {}
    kinds = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if experts else (Qwen3Config, Qwen3ForCausalLM)
    saved, tokens = [], 256
    for layers in (1, 3):
        made = kinds[0](num_hidden_layers=layers, **sizes, **routed)
        model = kinds[1](made).to(torch.bfloat16)
        weights, storages = {w.untyped_storage().data_ptr() for w in model.parameters()}, {}

        def keep(tensor, weights=weights, storages=storages):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage, tensor
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model(inputs_embeds=torch.randn(1, tokens, 256, dtype=torch.bfloat16, requires_grad=True))
        saved.append(sum(storage.nbytes() for storage, _ in storages.values()))
    files = ModelFiles(sizes | routed | {"num_hidden_layers": 1}, 0, 0)
    settings = ["trainer.use_gpu=true", f"actor.ppo_max_token_len_per_gpu={tokens}", "trainer.num_workers=1"]
    found = estimate(load_config(settings), Models(files, files, files, None))
    assert found.train_activations == pytest.approx((saved[1] - saved[0]) / 2, rel=0.06)


def test_memory_of_a_vision_tower(tmp_path):
    """A frozen tower has weights, but neither gradients nor averages; adapters and layers are the decoder's."""
    tower = {
        "visual.blocks.0.attn.qkv.weight": [30, 10],
        "model.visual.merger.mlp.0.weight": [10, 10],
        "model.connector.w": [4],
    }
    decoder = {"model.layers.0.mlp.up_proj.weight": [8, 8], "model.embed_tokens.weight": [100, 8]}
    write_model(tmp_path, tower | decoder, vocab_size=100, num_hidden_layers=1, vision_config={"depth": 1})
    model = read_model(tmp_path)
    assert model is not None
    assert (model.tower, model.parameters) == (404, 404 + 64 + 800)
    assert (model.layer, model.tables, list(model.matrices)) == (64, 800, ["model.layers.0.mlp.up_proj"])
    models = Models(model, critic=None, reference=None, reward=None)
    found = {}
    for vision in ("frozen", "trained"):
        config = load_config([f"model.path={tmp_path}", *LENGTHS, f"model.vision={vision}", "trainer.num_workers=1"])
        found[vision] = estimate(config, models)
        assert found[vision].train_weights == 4 * model.parameters == 4 * found[vision].engine_weights // 2
    assert found["trained"].train_gradients == 4 * model.parameters
    assert found["frozen"].train_gradients == 4 * (64 + 800)
    assert found["frozen"].train_optimizer == 8 * (64 + 800)
    config.model.vision = "none"
    text = estimate(config, models)
    images = config.data.train_batch_size * config.rollout.n * config.data.max_image_bytes
    assert found["frozen"].rows - text.rows == images
