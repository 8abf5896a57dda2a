"""The critic's update against a formula written out on padded tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.config import Config
from pipeline.losses import AGG_MODES
from pipeline.models.fsdp import full_state_dict
from pipeline.rows import flat
from pipeline.stats import reduce
from pipeline.train.critic import Critic
from pipeline.train.setup import build_critic
from tests.train import updates
from tests.train.plain import aggregate, gradient_norm, padded, sequences
from tests.train.updates import CPU, assert_same, masked, moved, update, with_column, with_values

pytestmark = pytest.mark.usefixtures("one_rank")


def table(seed: int = 0) -> pa.Table:
    return with_values(updates.table(seed), seed)


def make_config(model: Path | str, **changes: Any) -> Config:
    """The actor's run; `changes` are settings of the critic."""
    config = updates.make_config(model)
    for name, value in changes.items():
        setattr(config.critic, name, value)
    return config


def head_weights(width: int) -> Tensor:
    return torch.randn(1, width, generator=torch.Generator().manual_seed(2)) * 0.3


def make_critic(config: Config, device: torch.device = CPU, iterations: int = 100) -> Critic:
    """A critic whose head is not 0, so that its decoder has a gradient."""
    critic = build_critic(config, device, iterations)
    weight: Any = critic.module.head.weight.detach()
    if weight.to_local().numel():  # the one row is on rank 0
        weight.to_local().copy_(head_weights(weight.shape[1]))
    return critic


def trained(config: Config, *tables: pa.Table) -> tuple[dict[str, float], dict[str, Tensor]]:
    return updates.trained(config, *tables, build=make_critic)


def plain_values(model: Path, rows: list[dict[str, Any]]) -> tuple[Any, Tensor, Tensor]:
    """`transformers`' own model, a head, and values [B, T] of the responses, one forward pass per context."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    head = torch.nn.Linear(lm.config.hidden_size, 1)
    head.weight.data, head.bias.data = head_weights(lm.config.hidden_size), torch.zeros(1)
    width, values = max(len(row["response_ids"]) for row in rows), []
    for row in rows:
        parts = []
        for prompt, response in sequences(row):
            hidden = lm(input_ids=torch.tensor([prompt + response]), output_hidden_states=True).hidden_states[-1][0]
            parts.append(head(hidden[len(prompt) - 1 : len(prompt) - 1 + len(response)])[:, 0])
        values.append(torch.nn.functional.pad(torch.cat(parts), (0, width - len(row["response_ids"]))))
    return lm, head, torch.stack(values)


@pytest.mark.parametrize("mode", AGG_MODES)
def test_loss_and_gradient_are_those_of_the_written_out_formula(tiny_model: Path, mode: str) -> None:
    rows = table().to_pylist()
    lm, head, values = plain_values(tiny_model, rows)
    mask, old, returns = (padded(rows, name) for name in ("response_mask", "values", "returns"))
    near = torch.minimum(torch.maximum(values, old - 0.4), old + 0.4)
    unclipped, clipped = (values - returns) ** 2, (near - returns) ** 2
    loss = aggregate(0.5 * torch.maximum(unclipped, clipped), mask, mode, 12.0)
    loss.backward()

    config = make_config(tiny_model, loss_agg_mode=mode, cliprange_value=0.4, grad_clip=1e9)
    metrics, _ = trained(config, table())
    assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["critic/grad_norm"] == pytest.approx(gradient_norm(lm, head), rel=1e-4)
    share_clipped = ((clipped > unclipped) * mask).sum() / mask.sum()
    assert 0.1 < share_clipped < 0.9
    assert metrics["critic/vf_clipfrac"] == pytest.approx(share_clipped.item(), rel=1e-6)
    assert metrics["critic/vpred_mean"] == pytest.approx(((values * mask).sum() / mask.sum()).item(), rel=1e-4)
    assert metrics["critic/lr"] == pytest.approx(1e-2) and metrics["critic/skipped_steps"] == 0


def test_the_loss_is_aggregated_as_the_actors_unless_the_critic_has_its_own_mode(tiny_model: Path) -> None:
    follows, own = make_config(tiny_model), make_config(tiny_model, loss_agg_mode="token-sum")
    follows.actor.loss_agg_mode = "token-sum"
    shown = [trained(config, table())[0]["critic/vf_loss"] for config in (follows, own, make_config(tiny_model))]
    assert shown[0] == pytest.approx(shown[1], rel=1e-6) and shown[0] > 2 * shown[2]


def test_explained_variance_is_that_of_all_trained_tokens_before_the_update(tiny_model: Path) -> None:
    rows = table()
    mask, values, returns = (flat(rows, name)[0].astype(float) for name in ("response_mask", "values", "returns"))
    kept = mask > 0
    wanted = 1 - np.var((returns - values)[kept]) / np.var(returns[kept])
    metrics, _ = trained(make_config(tiny_model, ppo_epochs=2, ppo_mini_batch_size=4), rows)
    assert metrics["critic/vf_explained_var"] == pytest.approx(wanted, rel=1e-9)
    # A large offset in both takes nothing away.
    far = with_column(with_column(rows, "values", values + 4096), "returns", returns + 4096)
    metrics, _ = trained(make_config(tiny_model), far)
    assert metrics["critic/vf_explained_var"] == pytest.approx(wanted, abs=1e-3)
    metrics, _ = trained(make_config(tiny_model), with_column(rows, "returns", np.where(kept, 0.1, returns)))
    assert "critic/vf_explained_var" not in metrics


@pytest.mark.parametrize(
    ("critic", "actor", "steps"),
    [({}, {}, 1), ({}, {"ppo_epochs": 2, "ppo_mini_batch_size": 4}, 4), ({"ppo_epochs": 3}, {"ppo_epochs": 2}, 3)],
)
def test_steps_are_the_actors_unless_the_critic_has_its_own(
    tiny_model: Path, critic: dict[str, Any], actor: dict[str, Any], steps: int
) -> None:
    config = make_config(tiny_model, **critic)
    for name, value in actor.items():
        setattr(config.actor, name, value)
    config.critic.optim.lr_warmup_steps = 10
    made = make_critic(config)
    metrics = reduce([update(made, table())])
    assert made.scheduler.last_epoch == steps
    assert metrics["critic/lr"] == pytest.approx(1e-2 * steps / 10)


def test_advantages_do_not_matter(tiny_model: Path) -> None:
    rows = table()
    zero = with_column(rows, "advantages", np.zeros(len(flat(rows, "response_ids")[0])))
    assert_same(trained(make_config(tiny_model), rows)[1], trained(make_config(tiny_model), zero)[1], tolerance=0)


def test_masked_rows_take_no_step(tiny_model: Path) -> None:
    before = full_state_dict(make_critic(make_config(tiny_model)).module)
    metrics, after = trained(make_config(tiny_model), masked(table()))
    assert moved(before, after) == 0
    assert metrics["critic/skipped_steps"] == 1 and metrics["critic/vf_loss"] == 0
    assert "critic/vf_explained_var" not in metrics and "critic/vpred_mean" not in metrics


def test_rows_without_values_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="the rows have no values"):
        trained(make_config(tiny_model), updates.table())
