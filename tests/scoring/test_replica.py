"""Scoring in micro-batches, and weights that follow the store's versions."""

from typing import Any

import pyarrow as pa
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.config.scoring import ScorerConfig
from pipeline.config.trainer import DeadlineConfig
from pipeline.models.packing import ModelInputs
from pipeline.rows import flat
from pipeline.scoring.replica import Replica, StoreWeights
from pipeline.store.errors import StoreTimeout
from tests.scoring.generated import generated
from tests.scoring.published import LocalStore, shard_of


def replica(max_token_len: int = 16384) -> Replica[nn.Linear]:
    return Replica(lambda: nn.Linear(1, 1), ScorerConfig(max_token_len=max_token_len), "value")


# scoring


def seen(_: nn.Module, batch: ModelInputs) -> Tensor:
    """A number that tells the token, the one before it and the place in the row."""
    before = batch.input_ids.flatten()[batch.logit_index]
    return (batch.targets * 512 + before).float() + batch.logit_index % batch.input_ids.shape[1] / 64


def wanted(table: pa.Table) -> list[list[float]]:
    found = []
    for prompt, response in zip(table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist(), strict=True):
        ids = prompt + response
        found.append([float(ids[t] * 512 + ids[t - 1]) + (t - 1) / 64 for t in range(len(prompt), len(ids))])
    return found


@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=9),
    budget=st.integers(18, 80),
    cut=st.integers(0, 9),
)
def test_every_token_gets_its_own_number_in_row_order(lengths: list, budget: int, cut: int) -> None:
    whole = generated(lengths)
    table = pa.concat_tables([whole.slice(0, cut), whole.slice(cut)])  # in chunks
    padded: list[int] = []

    def forward(module: nn.Module, batch: ModelInputs) -> Tensor:
        padded.append(batch.input_ids.numel())
        return seen(module, batch)

    column = replica(budget).score(table, forward)
    assert column.type == pa.list_(pa.float32()) and column.to_pylist() == wanted(table)
    assert all(size <= budget for size in padded)


def test_numbers_are_made_without_a_graph_and_kept_in_float32() -> None:
    made = replica()
    assert not made.module.training and not any(p.requires_grad for p in made.module.parameters())

    def forward(module: nn.Module, batch: ModelInputs) -> Tensor:
        assert not torch.is_grad_enabled()
        return torch.full((len(batch.logit_index),), 0.5, dtype=torch.bfloat16)

    assert made.score(generated(), forward).flatten().to_pylist() == [0.5] * len(flat(generated(), "response_ids")[0])


def test_a_row_that_does_not_fit_and_an_empty_prompt_are_refused() -> None:
    message = r"row 1 has 12 tokens .* more than the 11 .* scoring.value.max_token_len to at least 12"
    with pytest.raises(ValueError, match=message):
        replica(11).score(generated([(2, 2), (6, 6)]), seen)
    with pytest.raises(ValueError, match="empty prompt"):
        replica().score(generated([(2, 2), (0, 6)]), seen)


@pytest.mark.parametrize(("threads", "cpus", "set_to"), [(0, 2, 2), (3, 1, 3), (0, 0.25, 1)])
def test_compute_threads(threads: int, cpus: float, set_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    Replica(lambda: nn.Linear(1, 1), ScorerConfig(num_threads=threads, num_cpus=cpus), "value")
    assert calls == [set_to]


# weights


class Model(nn.Module):
    """Parameters in several buckets, one of them shared by two layers."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first, self.tied, self.last = nn.Linear(40, 90), nn.Linear(40, 90), nn.Linear(90, 60)
        self.tied.weight = self.first.weight
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)

    def values(self) -> set[float]:
        return {float(x) for parameter in self.parameters() for x in parameter.detach().unique()}


def follow(store: LocalStore, module: nn.Module, admission: float = 30.0, **options: Any) -> StoreWeights:
    return StoreWeights(module, store, "critic", DeadlineConfig(admission=admission, publish=7.0), **options)


def bring(weights: StoreWeights, version: int) -> int:
    """Bring the weights to a row of this version."""
    return weights.bring_to(generated([(1, 1)], version=version))


def test_follows_the_versions_and_asks_only_for_newer_ones(local_store: LocalStore) -> None:
    module = Model(-1.0)
    weights = follow(local_store, module)
    local_store.publish(0, critic=shard_of(Model(10.0)))
    assert bring(weights, 0) == 0 and module.values() == {10.0}
    assert bring(weights, 0) == 0 and len(local_store.asked) == 1
    local_store.publish(1, critic=shard_of(Model(11.0)))
    local_store.publish(2, critic=shard_of(Model(12.0)))
    assert bring(weights, 0) == 0 and module.values() == {10.0}
    # Version 1 is no longer published: the newest serves the rows of both.
    assert bring(weights, 1) == 2 and module.values() == {12.0}
    assert bring(weights, 2) == bring(weights, 1) == 2
    assert local_store.asked == [(local_store.attempt, "critic", version, 30.0) for version in (0, 1)]


def test_names_are_the_published_ones_and_types_are_the_modules(local_store: LocalStore) -> None:
    local_store.publish(0, critic=shard_of(Model(0.5), lambda name: f"model.{name}", torch.bfloat16))
    module = Model(-1.0)
    bring(follow(local_store, module, published_name=lambda name: f"model.{name}"), 0)
    assert module.values() == {0.5} and {p.dtype for p in module.parameters()} == {torch.float32}
    assert module.tied.weight is module.first.weight


class Lacking(Model):
    def __init__(self) -> None:
        super().__init__(1.0)
        del self.last


def test_what_is_not_the_modules_is_refused(local_store: LocalStore) -> None:
    local_store.publish(0, critic=shard_of(Lacking()))
    with pytest.raises(ValueError, match=r"critic weights: version 0 lacks 2 of 5 tensors: last.bias, last.weight;"):
        bring(follow(local_store, Model(0.0)), 0)
    local_store.publish(1, critic=shard_of(Model(1.0)))
    with pytest.raises(ValueError, match=r"'last.weight' with shape \(60, 90\), which this replica does not know"):
        bring(follow(local_store, Lacking()), 1)


def test_a_load_that_failed_half_way_is_not_taken_for_a_version(local_store: LocalStore) -> None:
    module = Model(-1.0)
    weights = follow(local_store, module)
    local_store.publish(0, critic=shard_of(Model(10.0)))
    bring(weights, 0)
    other = Model(11.0)
    other.last = nn.Linear(90, 1)  # its one row would be copied into any number of rows
    local_store.publish(1, critic=shard_of(other))
    with pytest.raises(ValueError, match=r"'last.weight' .*\(1, 90\), which this replica has with shape \(60, 90\)"):
        bring(weights, 1)
    assert module.values() == {10.0, 11.0}
    local_store.publish(2, critic=shard_of(Model(12.0)))
    assert bring(weights, 0) == 2 and module.values() == {12.0}


def test_waits_end_with_phase_version_and_party(local_store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = follow(local_store, Model(0.0), admission=0.05)
    with pytest.raises(StoreTimeout, match=r"critic weights: .* policy version 3 from train rank 0"):
        bring(weights, 3)
    local_store.publish(0)
    with pytest.raises(ValueError, match="the train workers publish no critic"):
        bring(weights, 0)

    def late(refs: Any, timeout: float) -> Any:
        if isinstance(refs, list):
            raise ray.exceptions.GetTimeoutError
        return refs

    local_store.publish(1, critic=shard_of(Model(1.0)))
    monkeypatch.setattr(ray, "get", late)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    message = r"weights: a bucket of the 1 train ranks did not arrive within 7 s \(trainer.deadlines.publish"
    with pytest.raises(TimeoutError, match=message):
        bring(weights, 1)
