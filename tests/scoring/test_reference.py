"""The reference's log-probs against the plain model's."""

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from pipeline.advantage.stage import Advantage
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.config.learner import ActorConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ReferenceConfig
from pipeline.models.batch import TokenBatch
from pipeline.models.packing import pack
from pipeline.models.policy import load_policy
from pipeline.rows import REFERENCE
from pipeline.scoring.reference import Reference
from tests.scoring.generated import assert_near, distributions, generated


def make_stage(model: Path, temperature: float = 1.0, chunk: int = 1024, share: str = "auto", **scorer) -> Reference:
    trained = ModelConfig(path=str(model), share_prompts=share)
    return Reference(trained, ReferenceConfig(**scorer), ActorConfig(logits_chunk_tokens=chunk), temperature)


def other_model(folder: Path, vocabulary: int) -> Path:
    """An untied model with weights and sizes of its own."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **sizes, **heads)).save_pretrained(folder)
    return folder


def chosen(folder: Path, table: pa.Table, temperature: float) -> list[torch.Tensor]:
    rows = zip(distributions(folder, table, temperature), table["response_ids"].to_pylist(), strict=True)
    return [log_probs.gather(-1, torch.tensor(ids).long()[:, None])[:, 0] for log_probs, ids in rows]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_equals_the_plain_model(tiny_model: Path, temperature: float) -> None:
    table = generated()
    done = make_stage(tiny_model, temperature, max_token_len=30)(table)
    assert done.schema.equals(pa.schema([*table.schema, *REFERENCE]))
    assert done.select(table.column_names).equals(table)
    assert_near(done["ref_log_probs"], chosen(tiny_model, table, temperature))


def test_neither_chunks_nor_batches_matter(tiny_model: Path) -> None:
    table, order = generated(), [4, 2, 5, 0, 3, 1]
    rows = chosen(tiny_model, table, 0.8)
    small = make_stage(tiny_model, 0.8, chunk=2, max_token_len=14)
    assert_near(small(table.take(order))["ref_log_probs"], [rows[i] for i in order])
    assert_near(small(table.slice(2, 1))["ref_log_probs"], rows[2:3])


def test_the_kl_to_oneself_is_zero(tiny_model: Path) -> None:
    """The trainer's log-probs, from its own batch, as those of the engine: no row pays anything."""
    table = generated()
    rows = TokenBatch.from_table(table)
    batch = pack(rows, [[row] for row in range(len(rows))])
    policy = load_policy(ModelConfig(path=str(tiny_model)))
    log_probs = policy(batch.input_ids, batch.logit_index, batch.targets, 0.7, 5)[0].tolist()
    column = pa.array([[log_probs.pop(0) for _ in row] for row in table["response_ids"]], pa.list_(pa.float32()))
    place = table.column_names.index("rollout_log_probs")
    table = table.set_column(place, table.schema.field(place), column)
    done = Advantage(AlgorithmConfig(use_kl_in_reward=True))(make_stage(tiny_model, 0.7, max_token_len=20)(table))
    assert done["kl"].to_pylist() == [pytest.approx(0, abs=1e-6) if n else None for n in (5, 1, 2, 12, 0, 3)]
    assert done["reward"].to_pylist() == pytest.approx([0, 1, 2, 3, 4, 5], abs=1e-5)


def test_another_model_may_be_the_reference(tiny_model: Path, tmp_path: Path) -> None:
    other, table = other_model(tmp_path / "other", AutoConfig.from_pretrained(tiny_model).vocab_size), generated()
    assert_near(make_stage(tiny_model, path=str(other))(table)["ref_log_probs"], chosen(other, table, 1.0))


def test_models_that_cannot_be_the_reference(tiny_model: Path, tmp_path: Path) -> None:
    other = other_model(tmp_path / "other", 77)
    with pytest.raises(ValueError, match="scoring.reference.path=.* vocabulary of 77 tokens and model.path=.*"):
        make_stage(tiny_model, path=str(other))
    with pytest.raises(ValueError, match="scoring.reference.path=.*does not exist"):
        make_stage(tiny_model, path=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="^model.path=.*does not exist"):
        make_stage(tmp_path / "nowhere")
