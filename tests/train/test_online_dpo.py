"""Online DPO through the whole update: against DPO by autograd, however work is split."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pipeline.config import Config
from pipeline.models.batch import TrainBatch
from pipeline.models.fsdp import full_state_dict
from pipeline.rows import flat
from pipeline.stats import reduce
from pipeline.train.setup import build_actor
from tests.train import updates
from tests.train.plain import padded, plain_log_probs
from tests.train.updates import (
    CPU,
    N,
    assert_same,
    assert_same_metrics,
    in_chunks,
    moved,
    save_update,
    spawn,
    table,
    trained,
    update,
    with_column,
    with_contexts,
    with_reference,
    worlds,
)

BETA = 0.4


def marked(seed: int = 0, none: tuple[int, ...] = (3,)) -> pa.Table:
    """Rows with a reference, whose groups are pairs; those of the groups `none` are of equal reward.

    Group 2 has a row without tokens, group 4 one that is masked as a whole: they are no pairs either.
    """
    rows = with_reference(table(seed))
    offsets = flat(rows, "advantages")[1]
    row = np.repeat(np.arange(len(rows)), np.diff(offsets))
    signs = np.where((row % N == 0) ^ (row // N % 3 == 1), 1.0, -1.0)
    return with_column(rows, "advantages", np.where(np.isin(row // N, none), 0.0, signs))


def make_config(model: Path | str, **changes: Any) -> Config:
    config = updates.make_config(model, loss_agg_mode="seq-mean-token-sum", **changes)
    config.actor.policy_loss.loss_mode, config.actor.policy_loss.dpo_beta = "online_dpo", BETA
    return config


def direct(model: Path, rows: list[dict[str, Any]]) -> tuple[Any, Tensor, Tensor]:
    """`transformers`' own model with the gradient of DPO's loss, that loss, and the margins of the pairs."""
    lm, log_probs, _ = plain_log_probs(model, rows)
    ratios = ((log_probs - padded(rows, "ref_log_probs")) * padded(rows, "response_mask")).sum(1)
    margins = []
    for group in range(len(rows) // N):
        trained = [row for row in range(group * N, group * N + N) if any(rows[row]["response_mask"])]
        if len(trained) < N or not any(rows[trained[0]]["advantages"]):
            continue
        better = trained[0] if rows[trained[0]]["advantages"][0] > 0 else trained[1]
        (worse,) = set(trained) - {better}
        margins.append(ratios[better] - ratios[worse])
    loss = -logsigmoid(BETA * torch.stack(margins)).mean()
    loss.backward()
    return lm, loss.detach(), torch.stack(margins).detach()


@pytest.mark.usefixtures("one_rank")
def test_pairs_are_the_groups_with_a_better_and_a_worse_row() -> None:
    batch = TrainBatch.from_table(marked())
    pairs = batch.pairs(list(range(len(batch))))
    # Rows 5 (no tokens) and 9 (masked) are of groups 2 and 4; group 3 has equal rewards.
    assert pairs.tolist() == [[0, 1], [3, 2], [10, 11], [12, 13], [15, 14]]
    assert batch.pairs([0, 2, 3, 10]).tolist() == [[3, 2]]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("budget", "old", "contexts"),
    [(16, "engine", False), (40, "recompute", False), (4096, "engine", False), (90, "engine", True)],
)
def test_loss_and_gradient_are_those_of_dpo(tiny_model: Path, budget: int, old: str, contexts: bool) -> None:
    config = make_config(tiny_model, ppo_max_token_len_per_gpu=budget, old_log_probs=old, grad_clip=1e9)
    rows = with_contexts(marked()) if contexts else marked()
    actor = build_actor(config, CPU, 100)
    metrics = reduce([update(actor, rows)])
    lm, loss, margins = direct(tiny_model, rows.to_pylist())
    assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["actor/reward_margin"] == pytest.approx(BETA * margins.mean().item(), rel=1e-4)
    assert metrics["actor/reward_accuracy"] == pytest.approx((margins > 0).float().mean().item())
    wanted = {f"lm.{name}": parameter.grad for name, parameter in lm.named_parameters()}
    for name, parameter in actor.module.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("share", ["always", "never"])
@pytest.mark.parametrize("changes", [{}, {"ppo_mini_batch_size": 4, "ppo_epochs": 2}], ids=["one step", "four steps"])
def test_splits_change_nothing(tiny_model: Path, changes: dict[str, Any], share: str) -> None:
    def run(budget: int, parts: list[pa.Table]) -> tuple[dict[str, float], dict[str, Tensor]]:
        config = make_config(tiny_model, ppo_max_token_len_per_gpu=budget, **changes)
        config.model.share_prompts = share
        actor = build_actor(config, CPU, 100)
        return reduce([update(actor, *parts)]), full_state_dict(actor.module)

    whole = run(4096, [marked()])
    # A step changes the margins of the next one.
    assert moved(whole[1], trained(make_config(tiny_model, grad_clip=1e-9), marked())[1]) > 1e-4
    for budget, parts in ((20, [marked()]), (4096, in_chunks(marked())), (20, in_chunks(marked()))):
        metrics, state = run(budget, parts)
        assert_same_metrics(metrics, whole[0])
        assert_same(state, whole[1])


@pytest.mark.usefixtures("one_rank")
def test_other_rows_and_batches_without_a_pair_change_nothing(tiny_model: Path) -> None:
    config = make_config(tiny_model)
    rows = marked()
    _, state = trained(config, rows)
    alone = rows.take([row for pair in TrainBatch.from_table(rows).pairs(list(range(len(rows)))) for row in pair])
    assert_same(trained(config, alone)[1], state)
    metrics, still = trained(config, marked(none=tuple(range(8))))
    assert metrics["actor/skipped_steps"] == 1
    assert moved(still, full_state_dict(build_actor(config, CPU, 100).module)) == 0


def _on_ranks(rank: int, folder: str, model: str) -> None:
    for world in worlds(rank, folder):
        for name, streamed in (("whole", False), ("streamed", True)):
            config = make_config(model, ppo_mini_batch_size=4, ppo_max_token_len_per_gpu=40)
            actor = build_actor(config, CPU, 100)
            save_update(actor, marked(), f"{folder}/{world}-{name}.pt", streamed)


@pytest.mark.slow
def test_two_ranks_take_the_same_steps_as_one(tmp_path: Path, tiny_model: Path) -> None:
    spawn(_on_ranks, str(tmp_path), str(tiny_model))
    one = torch.load(tmp_path / "1-whole.pt")
    for name in ("2-whole", "1-streamed", "2-streamed"):
        other = torch.load(tmp_path / f"{name}.pt")
        assert_same_metrics(other["metrics"], one["metrics"])
        assert_same(other["state"], one["state"])
