"""The sums of squared probabilities against the plain model's, with weights that a store handed out."""

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.learner import ActorConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ScorerConfig
from pipeline.config.trainer import DeadlineConfig
from pipeline.models.policy import Policy
from pipeline.rows import POLICY
from pipeline.scoring.policy import PolicyScore
from tests.scoring.generated import assert_near, distributions, generated
from tests.scoring.published import LocalStore, shard_of

DEADLINES = DeadlineConfig(admission=7.0)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    """What `model.path` names."""
    return variant(tiny_model, tmp_path / "initial", 11, request.param)


def variant(folder: Path, to: Path, seed: int, tied: bool | None = None) -> Path:
    """A model like that in `folder`, with weights of its own."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = config.tie_word_embeddings if tied is None else tied
    # Large weights: flat distributions would all have a sum near 1 / V.
    config.initializer_range = 0.3
    AutoModelForCausalLM.from_config(config).save_pretrained(to)
    return to


def publish(store: LocalStore, version: int, folder: Path) -> None:
    policy = Policy(AutoModelForCausalLM.from_pretrained(folder))
    store.publish(version, policy=shard_of(policy, Policy.hf_name))


def make_stage(store: LocalStore, model: Path, temperature: float, chunk: int, longest: int) -> PolicyScore:
    scorer, actor = ScorerConfig(max_token_len=longest), ActorConfig(logits_chunk_tokens=chunk)
    return PolicyScore(ModelConfig(path=str(model)), scorer, actor, temperature, store, DEADLINES)


def sums(folder: Path, table: pa.Table, temperature: float = 1.0) -> list[torch.Tensor]:
    return [log_probs.exp().square().sum(-1) for log_probs in distributions(folder, table, temperature)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_the_plain_model_with_the_published_weights(
    local_store: LocalStore, model: Path, tmp_path: Path, temperature: float
) -> None:
    trained, table = variant(model, tmp_path / "trained", 12), generated(version=3)
    publish(local_store, 4, trained)
    done = make_stage(local_store, model, temperature, 1024, 30)(table)
    assert done.schema.equals(pa.schema([*table.schema, *POLICY]))
    assert_near(done["sum_pi_squared"], sums(trained, table, temperature))
    assert done["pi_version"].to_pylist() == [4] * len(table)
    assert local_store.asked == [(local_store.attempt, "policy", 3, DEADLINES.admission)]
    # The weights make a difference that the comparison sees.
    before = torch.cat(sums(model, table, temperature))
    assert (before - torch.cat(sums(trained, table, temperature))).abs().max() > 0.01


def test_neither_chunks_nor_batches_matter(local_store: LocalStore, tiny_model: Path) -> None:
    publish(local_store, 0, tiny_model)
    table, order = generated(), [4, 2, 5, 0, 3, 1]
    rows = sums(tiny_model, table, 0.8)
    small = make_stage(local_store, tiny_model, 0.8, 2, 14)
    assert_near(small(table.take(order))["sum_pi_squared"], [rows[i] for i in order], 1e-6)
    assert_near(small(table.slice(1, 1))["sum_pi_squared"], rows[1:2], 1e-6)
