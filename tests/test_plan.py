"""The plan's numbers on hand-worked cases, the resource check, and what the terminal shows."""

import io
import json
import struct
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.config import ConfigError, load_config
from pipeline.plan import check_resources, count_parameters, local_gpus, plan, render, validate

SMALL = [
    "data.train_files=train.parquet",
    "model.path=owner/model",
    "data.train_batch_size=64",
    "rollout.chunk_prompts=8",
    "rollout.n=4",
    "rollout.num_engines=3",
    "trainer.num_workers=2",
    "actor.ppo_mini_batch_size=32",
    "actor.ppo_epochs=3",
]


def small(*overrides: str, train_rows: int | None = None):
    return plan(load_config([*SMALL, *overrides]), train_rows)


def shown(*overrides: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render(small(*overrides)))
    return console.file.getvalue()


def test_hand_worked_numbers():
    numbers = small(train_rows=1000)
    assert numbers.chunks_per_iteration == 8
    assert numbers.chunks_per_rank == 4
    assert numbers.rows_per_iteration == 256
    assert numbers.rows_per_rank == 128
    assert numbers.mini_batches == 2
    assert numbers.optimizer_steps_per_iteration == 6
    # One validation sample per prompt: 256 sequences of the engine / 8 prompts of a chunk, more than a share of 8 / 3.
    assert numbers.chunks_in_flight_per_engine == 32
    assert small("rollout.max_num_seqs=8").chunks_in_flight_per_engine == 3  # 8 chunks over 3 engines, rounded up
    assert small("rollout.chunks_in_flight=5").chunks_in_flight_per_engine == 5
    assert numbers.iterations == 15
    assert numbers.cpus == 3 * 1 + 2 * 1 + 1 + 1
    assert numbers.gpus == 0


def test_iterations():
    assert small().iterations is None
    assert small("trainer.total_epochs=2", train_rows=1000).iterations == 31
    assert small("data.train_max_samples=128", train_rows=1000).iterations == 2
    assert small("trainer.total_training_steps=5", train_rows=10).iterations == 5
    with pytest.raises(ConfigError, match="10 training prompts x trainer.total_epochs=2 = 20 do not fill"):
        small("trainer.total_epochs=2", train_rows=10)


def test_cpus_are_checked_against_what_the_local_ray_is_told():
    validate(load_config([*SMALL, "trainer.ray_num_cpus=7"]))
    with pytest.raises(ConfigError, match=r"3 x 1 \+ 2 x 1 \+ 1 \+ 1 = 7 CPUs and trainer.ray_num_cpus=6"):
        validate(load_config([*SMALL, "trainer.ray_num_cpus=6"]))


def test_gpus_are_checked(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert local_gpus() == 4
    config = load_config([*SMALL, "trainer.ray_num_cpus=8", "rollout.num_gpus=1", "trainer.use_gpu=true"])
    with pytest.raises(ConfigError, match=r"3 x 1 \+ 2 x 1 = 5 GPUs and this machine has 4"):
        validate(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    assert validate(config).gpus == 5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert local_gpus() == 0


def test_a_cluster_needs_a_node_for_each_actor():
    numbers = small("rollout.num_cpus=4")
    check_resources(numbers, [{"CPU": 16.0}])
    with pytest.raises(ConfigError, match="no node can hold one rollout actor of 4 CPUs"):
        check_resources(numbers, [{"CPU": 2.0}] * 10)
    with pytest.raises(ConfigError, match="= 16 CPUs and the cluster has 8"):
        check_resources(numbers, [{"CPU": 4.0}] * 2)


def write_model(folder: Path, shapes: dict[str, list[int]], **config: int) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    encoded = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded)


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


def test_row_longer_than_the_model(tmp_path):
    write_model(tmp_path, {"a": [1]}, max_position_embeddings=1000)
    with pytest.raises(ConfigError, match="512 \\+ 512 = 1024 tokens, more than the 1000"):
        small(f"model.path={tmp_path}")


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, struct.pack("<Q", 3) + b"abc"])
def test_damaged_weights_are_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="model.safetensors is not a whole safetensors file"):
        count_parameters(tmp_path)


def test_render_shows_the_arithmetic_and_notes():
    text = shown("rollout.num_engines=9")
    assert "64 prompts x 4 samples = 256 rows in 8 chunks" in text
    assert "2 mini-batches x 3 epochs = 6" in text
    assert "1 engines stay idle" in text
