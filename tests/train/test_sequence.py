"""Sequence parallelism under the settings that could tell it from one process: whole rows, choices among all tokens,
shared prompts, contexts, adapters. `test_mesh.py` has the meshes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.config.learner import ParallelConfig
from pipeline.models.fsdp import full_state_dict
from pipeline.stats import reduce
from pipeline.train.setup import build_actor, build_critic
from tests.train.test_mesh import save_model, settings, step
from tests.train.updates import (
    CPU,
    assert_same,
    assert_same_metrics,
    moved,
    spawn,
    table,
    with_contexts,
    with_values,
    worlds,
)


def of_whole_rows(config: Config) -> None:
    """A loss of the ratio of whole responses, over rows in several contexts, of which some share their prompt."""
    config.actor.policy_loss.loss_mode = "gspo"
    config.actor.loss_agg_mode = "seq-mean-token-mean"
    config.actor.ppo_max_token_len_per_gpu *= 2
    config.model.share_prompts = "always"


def of_chosen_tokens(config: Config) -> None:
    """A loss that chooses among the tokens of the mini-batch, behind old log-probs that are weighed by rows."""
    loss = config.actor.policy_loss
    loss.loss_mode, loss.clip_cov_ratio, loss.clip_cov_lb, loss.clip_cov_ub = "clip_cov", 0.3, -9.0, 9.0
    config.actor.old_log_probs = "recompute"
    config.algorithm.rollout_correction.rollout_is = "sequence"


def of_adapters(config: Config) -> None:
    """Adapters, the KL to the base, layers that are computed again."""
    config.model.lora.rank, config.model.enable_gradient_checkpointing = 4, True
    config.actor.use_kl_loss, config.actor.kl_loss_coef = True, 0.5


def of_values(config: Config) -> None:
    """A critic, over rows that share their prompt."""
    config.model.share_prompts = "always"


VARIANTS: dict[str, tuple[Callable[[Config], None], Callable[..., Any]]] = {
    change.__name__: (change, build_critic if change is of_values else build_actor)
    for change in (of_whole_rows, of_chosen_tokens, of_adapters, of_values)
}


def work(rank: int, folder: str) -> None:
    """Two updates under each setting, by one process and by two that divide the positions."""
    for world in worlds(rank, folder):
        for name, (change, build) in VARIANTS.items():
            config = settings(f"{folder}/model", ParallelConfig(sequence=world))
            change(config)
            learner = build(config, CPU, 100)
            start = full_state_dict(learner.module)
            rows = [table(seed) if name == "of_chosen_tokens" else with_contexts(table(seed)) for seed in (0, 1)]
            shown = [reduce(step(learner, with_values(part))) for part in rows][-1]
            state = full_state_dict(learner.module)
            if dist.get_rank() == 0:
                assert moved(start, state) > 1e-4
                torch.save({"metrics": shown, "state": state}, f"{folder}/{name} {world}.pt")


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequence")
    save_model(folder / "model", key_heads=1)
    spawn(work, str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VARIANTS))
def test_two_ranks_that_divide_the_positions_train_as_one_process(updates: Path, name: str) -> None:
    one, two = (torch.load(updates / f"{name} {world}.pt") for world in (1, 2))
    assert_same_metrics(one["metrics"], two["metrics"])
    assert_same(one["state"], two["state"])
