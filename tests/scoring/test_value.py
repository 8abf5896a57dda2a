"""The value stage against the value model itself, with weights of several versions."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pipeline.config.learner import CriticConfig, FSDPConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ScorerConfig
from pipeline.config.trainer import DeadlineConfig
from pipeline.models.value import ValueModel
from pipeline.rows import FLOATS, VALUE
from pipeline.scoring.value import Value
from tests.scoring.generated import assert_near, generated
from tests.scoring.published import LocalStore, shard_of

DEADLINES = DeadlineConfig(admission=20.0)


def settings(model: Path, scorer: str | None = None, critic: CriticConfig | None = None) -> tuple[Any, ...]:
    return ModelConfig(path=str(model)), ScorerConfig(max_token_len=30, dtype=scorer), critic or CriticConfig()


def trained(model: Path, version: int) -> ValueModel:
    """A critic as `version` iterations might leave it: decoder and head have moved."""
    torch.manual_seed(version)
    critic = ValueModel(AutoModelForCausalLM.from_pretrained(model))
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return critic


@torch.no_grad()
def expected(critic: ValueModel, table: pa.Table) -> list[Tensor]:
    """Values of every row by itself, without padding."""
    values = []
    for prompt, response in zip(table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist(), strict=True):
        select = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        values.append(critic(torch.tensor([prompt + response]), select).double())
    return values


def test_values_are_those_of_the_critic_of_the_newest_row(local_store: LocalStore, tiny_model: Path) -> None:
    stage = Value(*settings(tiny_model), local_store, DEADLINES)
    before = trained(tiny_model, 9)
    for version in (0, 1, 3):
        critic = trained(tiny_model, version)
        table = pa.concat_tables([generated(seed=version, version=version), generated(version=0)])
        local_store.publish(version, critic=shard_of(critic))
        done = stage(table)
        assert done.schema.equals(pa.schema([*table.schema, *VALUE]))
        assert done.select(table.column_names).equals(table)
        assert_near(done["values"], expected(critic, table))
        assert done["value_version"].to_pylist() == [version] * len(table)
        # The comparison would see the weights of the version before.
        assert (torch.cat(expected(before, table)) - torch.cat(expected(critic, table))).abs().max() > 0.1
        before = critic
    assert local_store.asked == [(local_store.attempt, "critic", version, DEADLINES.admission) for version in (0, 1, 3)]


def test_no_rows_wait_for_nothing(local_store: LocalStore, tiny_model: Path) -> None:
    done = Value(*settings(tiny_model), local_store, DEADLINES)(generated().slice(0, 0))
    assert len(done) == 0 and done.schema.field("values").type == FLOATS and "value_version" in done.column_names
    assert local_store.asked == []


@pytest.mark.parametrize(("scorer", "fsdp"), [("bfloat16", None), (None, "bfloat16")])
def test_type_of_the_computation(
    local_store: LocalStore, tiny_model: Path, scorer: str | None, fsdp: str | None
) -> None:
    config = CriticConfig(fsdp=FSDPConfig(param_dtype=fsdp))
    critic, table = trained(tiny_model, 0), generated()
    local_store.publish(0, critic=shard_of(critic))
    done = Value(*settings(tiny_model, scorer, config), local_store, DEADLINES)(table)
    exact = torch.cat(expected(critic, table))
    gap = (torch.tensor(done["values"].combine_chunks().flatten().to_pylist()).double() - exact).abs().max()
    assert 1e-4 < gap < 0.1 * exact.abs().max()


def test_the_critics_own_model(local_store: LocalStore, tiny_model: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(tiny_model)
    other.model.layers = nn.ModuleList(other.model.layers[:1])
    other.config.num_hidden_layers, other.config.layer_types = 1, other.config.layer_types[:1]
    other.save_pretrained(tmp_path)
    critic, table = trained(tmp_path, 0), generated()
    local_store.publish(0, critic=shard_of(critic))
    stage = Value(*settings(tiny_model, critic=CriticConfig(path=str(tmp_path))), local_store, DEADLINES)
    assert_near(stage(table)["values"], expected(critic, table))
