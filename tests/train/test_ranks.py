"""One rank with all rows at once, and two ranks with small micro-batches or streamed chunks, give the same update."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from pipeline.losses import AGG_MODES
from pipeline.train import ranks
from pipeline.train.learner import Learner
from pipeline.train.setup import build_actor
from tests.scoring.test_reference import other_model
from tests.train import test_actor_losses, test_contexts, test_critic
from tests.train.test_actor_losses import LOSSES
from tests.train.test_contexts import EXACT, SCALE, SMALL, Plain, distance, watch
from tests.train.test_update import CASES as STREAMED
from tests.train.test_update import OWN_LOSS, configured
from tests.train.updates import (
    CPU,
    assert_same,
    assert_same_metrics,
    in_chunks,
    masked,
    save_update,
    spawn,
    table,
    update,
    with_reference,
    with_values,
    without_advantage,
    worlds,
)

# Mini-batches, sequences and a small token budget in each; the losses' own settings reach each of their branches.
SPLIT: dict[str, dict[str, Any]] = {loss: {"loss": loss} for loss in LOSSES} | {
    "kl loss": {"loss": "vanilla", "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl+"},
    "decoupled": {
        "loss": "vanilla",
        "old_log_probs": "recompute",
        "ppo_epochs": 2,
        "correction": {
            "rollout_is": "token",
            "rollout_is_threshold": "1.2",
            "rollout_is_batch_normalize": True,
            "rollout_rs": "token_k1,seq_max_k2",
            "rollout_rs_threshold": "0.7_1.6,0.1",
        },
    },
    # Not KL-Cov: its penalty |log r| has a gradient of either sign, by rounding, where the policy has not moved yet.
    "decoupled, sequences": {
        "loss": "clip_cov",
        "old_log_probs": "recompute",
        "correction": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    },
    "bypass": {
        "loss": "reinforce",
        "correction": {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.3"},
    },
}
CHUNKED: dict[str, dict[str, Any]] = {
    "one step": {"ppo_max_token_len_per_gpu": 20, **OWN_LOSS},
    "sequences": {"loss_agg_mode": "seq-mean-token-sum", **STREAMED["recomputed"]},
    "weights": STREAMED["weights"],
    "mini-batches": STREAMED["mini-batches, recomputed"],
    "uneven": {"loss_agg_mode": "seq-mean-token-mean", "ppo_max_token_len_per_gpu": 20},
}
CONTEXTS: dict[str, dict[str, Any]] = {
    f"contexts, {loss}": {"loss": loss, "loss_agg_mode": AGG_MODES[number % len(AGG_MODES)]}
    for number, loss in enumerate(("clip_cov", "dro", "geo_mean"))
} | {
    "contexts, bypass": SPLIT["bypass"],
    "contexts, decoupled": SPLIT["decoupled, sequences"],
}
AGGREGATED: dict[str, dict[str, Any]] = {
    f"contexts, {loss}, {mode}": {"loss": loss, "loss_agg_mode": mode, "loss_scale_factor": SCALE}
    for loss in ("vanilla", "gspo")
    for mode in AGG_MODES
}
CONTEXTS |= AGGREGATED
CRITIC: dict[str, dict[str, Any]] = {
    "critic, one step": {"ppo_max_token_len_per_gpu": 40},
    "critic, four steps": {"ppo_epochs": 2, "ppo_mini_batch_size": 4, "loss_agg_mode": "seq-mean-token-mean"},
    "critic, uneven": {"loss_agg_mode": "seq-mean-token-sum", "ppo_max_token_len_per_gpu": 20},
}

OTHER = "kl to another model, computed by the ranks"

CRITIC_CONTEXTS = [f"critic, contexts, {mode}" for mode in AGG_MODES]


def rows_of(name: str) -> pa.Table:
    rows = with_values(with_reference(without_advantage(table(), every=3)))
    if "uneven" in name:
        # Nothing to train on in every second chunk: of two ranks, one has none.
        chunks = enumerate(in_chunks(rows))
        return pa.concat_tables([chunk if number % 2 == 0 else masked(chunk) for number, chunk in chunks])
    return rows


def save_gradient(learner: Learner, rank: int, world: int, path: str) -> None:
    """Write the whole gradient on this rank's share of rows of several contexts, as each rank has it."""
    gradient = watch(learner)
    update(learner, pa.concat_tables(in_chunks(test_contexts.rows_of())[rank::world]))
    torch.save(gradient, f"{path}-{world}-{rank}.pt")


def work(rank: int, folder: str, model: str) -> None:
    for world in worlds(rank, folder):
        for name, case in SPLIT.items():
            budget = 16384 if world == 1 else 40
            options = {"ppo_mini_batch_size": 4, "loss_agg_mode": "seq-mean-token-mean"} | case
            config = test_actor_losses.make_config(model, **options, ppo_max_token_len_per_gpu=budget)
            save_update(build_actor(config, CPU, 100), rows_of(name), f"{folder}/{name}-{world}.pt")
        for name, case in CONTEXTS.items():
            options = {
                "ppo_max_token_len_per_gpu": 16384 if world == 1 else SMALL,
                "loss_agg_mode": "token-mean",
            } | case
            actor = build_actor(test_actor_losses.make_config(model, **options), CPU, 100)
            save_gradient(actor, rank, world, f"{folder}/{name}")
        for name, mode in zip(CRITIC_CONTEXTS, AGG_MODES, strict=True):
            budget = 16384 if world == 1 else SMALL
            options = {"loss_agg_mode": mode, "cliprange_value": 0.4, "ppo_max_token_len_per_gpu": budget}
            config = test_critic.make_config(model, **options)
            config.actor.loss_scale_factor = SCALE
            save_gradient(test_critic.make_critic(config), rank, world, f"{folder}/{name}")
        for name, case in CHUNKED.items():
            actor = build_actor(configured(model, case), CPU, 100)
            save_update(actor, rows_of(name), f"{folder}/{name}-{world}.pt", streamed=world == 2)
        config = test_actor_losses.make_config(model, "vanilla", **OWN_LOSS, ppo_max_token_len_per_gpu=40)
        config.scoring.reference.placement, config.scoring.reference.path = "train_workers", f"{folder}/other"
        save_update(build_actor(config, CPU, 100), rows_of(OTHER), f"{folder}/{OTHER}-{world}.pt")
        for name, case in CRITIC.items():
            critic = test_critic.make_critic(test_critic.make_config(model, **case))
            save_update(critic, rows_of(name), f"{folder}/{name}-{world}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    other_model(folder / "other", 320)
    spawn(work, str(folder), str(tiny_model))
    return folder


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Plain:
    return Plain(tiny_model)


@pytest.mark.parametrize("name", [*SPLIT, *CHUNKED, OTHER, *CRITIC])
def test_two_ranks_train_as_one(results: Path, name: str) -> None:
    one, two = (torch.load(results / f"{name}-{world}.pt", weights_only=True) for world in (1, 2))
    metrics = one["metrics"]
    assert_same_metrics(metrics, two["metrics"])
    assert_same(one["state"], two["state"], tolerance=1e-4)
    assert metrics["critic/grad_norm" if name in CRITIC else "actor/grad_norm"] > 0
    assert name not in CRITIC or metrics["critic/vf_explained_var"] > 0
    assert name not in ("clip_cov", "kl_cov") or metrics["actor/cov_frac"] > 0.1
    assert not name.startswith("decoupled") or metrics["rollout_corr/rollout_is_batch_norm_factor"] != 1


def gradients(results: Path, name: str) -> list[dict[str, torch.Tensor]]:
    """Of one rank, and of each of two."""
    return [torch.load(results / f"{name}-{part}.pt", weights_only=True) for part in ("1-0", "2-0", "2-1")]


@pytest.mark.parametrize("name", [*CONTEXTS, *CRITIC_CONTEXTS])
def test_two_ranks_have_the_gradient_of_one_on_rows_of_several_contexts(results: Path, name: str) -> None:
    one, *two = gradients(results, name)
    assert all(distance(gradient, one) < EXACT for gradient in two)


@pytest.mark.parametrize("name", AGGREGATED)
def test_on_any_ranks_contexts_are_sequences_that_share_their_rows_normalisation(
    results: Path, tiny_model: Path, plain: Plain, name: str
) -> None:
    """The gradient is that of `transformers`' own model and one forward pass per context."""
    _, _, wanted = plain.pg_loss_and_gradient(test_actor_losses.make_config(tiny_model, **AGGREGATED[name]))
    assert all(distance(gradient, wanted) < EXACT for gradient in gradients(results, name))


def test_objects_have_a_backend_beside_that_of_the_gpus() -> None:
    parsed = dist.distributed_c10d.BackendConfig(dist.Backend(ranks.backend(use_gpu=True)))
    assert parsed.get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}
    assert ranks.backend(use_gpu=False) == "gloo"
