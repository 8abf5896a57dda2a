"""The reference's log-probs against the plain model's."""

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from pipeline.advantage.stage import Advantage
from pipeline.config import Config
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.models.batch import TokenBatch
from pipeline.models.packing import pack
from pipeline.models.policy import load_policy
from pipeline.rows import REFERENCE
from pipeline.scoring.reference import Reference
from tests.scoring.generated import assert_near, distributions, generated


def make_config(model: Path, temperature: float = 1.0, chunk_tokens: int = 1024, **scorer) -> Config:
    config = Config()
    config.model.path = str(model)
    config.rollout.temperature = temperature
    config.actor.logits_chunk_tokens = chunk_tokens
    for name, value in scorer.items():
        setattr(config.scoring.reference, name, value)
    return config


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
    done = Reference(make_config(tiny_model, temperature, max_token_len=30))(table)
    assert done.schema.equals(pa.schema([*table.schema, *REFERENCE]))
    assert done.select(table.column_names).equals(table)
    assert_near(done["ref_log_probs"], chosen(tiny_model, table, temperature))


def test_neither_chunks_nor_batches_matter(tiny_model: Path) -> None:
    table = generated()
    want = Reference(make_config(tiny_model, 0.8))(table)["ref_log_probs"]
    rows = [torch.tensor(row).double() for row in want.to_pylist()]
    small = Reference(make_config(tiny_model, 0.8, chunk_tokens=2, max_token_len=14))
    assert_near(small(table)["ref_log_probs"], rows, 2e-6)
    order = [4, 2, 5, 0, 3, 1]
    assert_near(small(table.take(order))["ref_log_probs"], [rows[i] for i in order], 2e-6)
    for i in range(len(table)):
        assert_near(small(table.slice(i, 1))["ref_log_probs"], [rows[i]], 2e-6)


def test_the_kl_to_oneself_is_zero(tiny_model: Path) -> None:
    """The trainer's log-probs, from its own batch, as those of the engine: no row pays anything."""
    config, table = make_config(tiny_model, 0.7, max_token_len=20), generated()
    rows = TokenBatch.from_table(table)
    batch = pack(rows, [[row] for row in range(len(rows))])
    log_probs = load_policy(config.model)(batch.input_ids, batch.logit_index, batch.targets, 0.7, 5)[0].tolist()
    column = pa.array([[log_probs.pop(0) for _ in row] for row in table["response_ids"]], pa.list_(pa.float32()))
    place = table.column_names.index("rollout_log_probs")
    scored = Reference(config)(table.set_column(place, table.schema.field(place), column))
    done = Advantage(AlgorithmConfig(use_kl_in_reward=True))(scored)
    assert done["kl"].to_pylist() == [pytest.approx(0, abs=1e-6) if n else None for n in (5, 1, 2, 12, 0, 3)]
    assert done["reward"].to_pylist() == pytest.approx([0, 1, 2, 3, 4, 5], abs=1e-5)


def test_another_model_may_be_the_reference(tiny_model: Path, tmp_path: Path) -> None:
    other = other_model(tmp_path / "other", AutoConfig.from_pretrained(tiny_model).vocab_size)
    table = generated()
    done = Reference(make_config(tiny_model, path=str(other)))(table)
    assert_near(done["ref_log_probs"], chosen(other, table, 1.0))


def test_another_vocabulary_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    other = other_model(tmp_path / "other", 77)
    with pytest.raises(ValueError, match="scoring.reference.path=.* has a vocabulary of 77 tokens and model.path=.*"):
        Reference(make_config(tiny_model, path=str(other)))


def test_a_missing_model_names_the_key(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scoring.reference.path=.*there is no folder"):
        Reference(make_config(tiny_model, path=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="model.path=.*there is no folder"):
        Reference(make_config(tmp_path / "nowhere"))


def test_types(tiny_model: Path) -> None:
    def kinds(config: Config) -> set[torch.dtype]:
        parameters = list(Reference(config)._replica.module.parameters())
        assert not any(parameter.requires_grad for parameter in parameters)
        return {parameter.dtype for parameter in parameters}

    config = make_config(tiny_model)
    assert kinds(config) == {torch.float32}
    config.actor.fsdp.param_dtype = "bfloat16"
    assert kinds(config) == {torch.bfloat16}
    config.scoring.reference.dtype = "float32"
    assert kinds(config) == {torch.float32}


def test_no_rows(tiny_model: Path) -> None:
    table = generated([])
    done = Reference(make_config(tiny_model))(table)
    assert len(done) == 0 and done.schema.equals(pa.schema([*table.schema, *REFERENCE]))
