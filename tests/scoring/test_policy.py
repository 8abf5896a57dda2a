"""The sums of squared probabilities against the plain model's, with weights that a store handed out."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config import Config
from pipeline.models.policy import Policy
from pipeline.rows import POLICY
from pipeline.scoring.policy import PolicyScore
from pipeline.store.client import StoreClient
from pipeline.store.policy_store import PolicyStore
from pipeline.store.versions import Ticket
from pipeline.weights.publish import pack
from tests.scoring.generated import assert_near, distributions, generated

TIMEOUT = 7.0


class Store(StoreClient):
    """Hands out what was published last, and notes who asked for what; buffers stand in for object refs."""

    def __init__(self) -> None:
        super().__init__(None, 5)
        self.asked: list[tuple] = []

    def publish(self, version: int, folder: Path) -> None:
        policy = Policy(AutoModelForCausalLM.from_pretrained(folder))
        shard = pack(policy, 0, torch.float32, 20_000, lambda buffer: buffer, Policy.hf_name)
        self.ticket = Ticket(version, [shard])

    def _send(self, method: Any, *asked: Any, **kwargs: Any) -> Ticket:
        assert method is PolicyStore.weights
        self.asked.append(asked)
        return self.ticket


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr("pipeline.store.client.ray.get", lambda refs, timeout: refs)
    return Store()


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


def make_stage(store: Store, model: Path, temperature: float = 1.0, chunk_tokens: int = 1024, **scorer) -> PolicyScore:
    config = Config()
    config.model.path = str(model)
    config.rollout.temperature = temperature
    config.actor.logits_chunk_tokens = chunk_tokens
    config.trainer.deadlines.publish = TIMEOUT
    for name, value in scorer.items():
        setattr(config.scoring.policy, name, value)
    return PolicyScore(config, store)


def sums(folder: Path, table: pa.Table, temperature: float = 1.0) -> list[torch.Tensor]:
    return [log_probs.exp().square().sum(-1) for log_probs in distributions(folder, table, temperature)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_the_plain_model_with_the_published_weights(
    store: Store, model: Path, tmp_path: Path, temperature: float
) -> None:
    trained, table = variant(model, tmp_path / "trained", 12), generated(version=3)
    store.publish(4, trained)
    done = make_stage(store, model, temperature, max_token_len=30)(table)
    assert done.schema.equals(pa.schema([*table.schema, *POLICY]))
    assert_near(done["sum_pi_squared"], sums(trained, table, temperature))
    assert done["pi_version"].to_pylist() == [4] * len(table)
    assert store.asked == [(5, "policy", 3, TIMEOUT)]
    # The weights make a difference that the comparison sees.
    before = torch.cat(sums(model, table, temperature))
    assert (before - torch.cat(sums(trained, table, temperature))).abs().max() > 0.01


def test_weights_are_fetched_when_rows_are_newer(store: Store, tiny_model: Path, tmp_path: Path) -> None:
    stage = make_stage(store, tiny_model)
    folders = [variant(tiny_model, tmp_path / str(seed), seed) for seed in (1, 2)]
    store.publish(0, folders[0])
    for seed in (0, 1):
        table = generated(seed=seed)
        assert_near(stage(table)["sum_pi_squared"], sums(folders[0], table))
    assert len(store.asked) == 1
    store.publish(1, folders[1])
    # One row of the new version is enough.
    old, new = generated(), generated(version=1)
    mixed = pa.concat_tables([old.slice(0, 2), new.slice(2)])
    done = stage(mixed)
    assert_near(done["sum_pi_squared"], sums(folders[1], mixed))
    assert set(done["pi_version"].to_pylist()) == {1} and [a[2] for a in store.asked] == [0, 1]


def test_neither_chunks_nor_batches_matter(store: Store, tiny_model: Path) -> None:
    store.publish(0, tiny_model)
    table = generated()
    want = make_stage(store, tiny_model, 0.8)(table)["sum_pi_squared"]
    rows = [torch.from_numpy(np.array(row, dtype=np.float64)) for row in want.to_pylist()]
    small = make_stage(store, tiny_model, 0.8, chunk_tokens=2, max_token_len=14)
    order = [4, 2, 5, 0, 3, 1]
    assert_near(small(table.take(order))["sum_pi_squared"], [rows[i] for i in order], 1e-6)
    assert_near(small(table.slice(1, 1))["sum_pi_squared"], rows[1:2], 1e-6)


def test_no_rows_ask_for_no_weights(store: Store, tiny_model: Path) -> None:
    table = generated([])
    done = make_stage(store, tiny_model)(table)
    assert len(done) == 0 and done.schema.equals(pa.schema([*table.schema, *POLICY]))
    assert store.asked == []
