"""Builds actor, critic and weight publishers from the run's configuration."""

import torch

from pipeline.config import Config
from pipeline.derived import UpdateShape, rollout_correction
from pipeline.models.fsdp import torch_dtype
from pipeline.store.versions import CRITIC, POLICY
from pipeline.train.actor import Actor
from pipeline.train.critic import Critic
from pipeline.weights.direct import PublishedMemory
from pipeline.weights.publish import WeightPublisher


def build_actor(config: Config, device: torch.device, iterations: int) -> Actor:
    """The actor, sharded over all ranks; `iterations` of the run update it."""
    return Actor(
        config.actor,
        config.model,
        UpdateShape.of(config, config.actor),
        device,
        iterations,
        correction=rollout_correction(config),
        temperature=config.rollout.temperature,
        seed=config.trainer.seed,
        guards_gap=config.trainer.max_log_prob_gap is not None,
    )


def build_critic(config: Config, device: torch.device, iterations: int) -> Critic:
    """The critic, sharded over all ranks; `iterations` of the run update it."""
    return Critic(config.critic, config.model, UpdateShape.of(config, config.critic), device, iterations)


def build_publishers(
    config: Config, actor: Actor, critic: Critic | None, rank: int, device: torch.device
) -> dict[str, WeightPublisher]:
    """Publishers of this rank's part of the trained models' weights, by the model's name in the store."""
    # Imported here because building a learner needs no Ray (benchmarks/gpu).
    import ray

    limit = config.trainer.weight_bucket_mb * 2**20
    transport = config.trainer.weight_transport
    memory = PublishedMemory(rank, config.algorithm.max_staleness + 2, device) if transport == "nixl" else None
    dtype = torch_dtype(config.rollout.dtype, "rollout.dtype")
    delta = transport == "delta"
    publishers = {POLICY: WeightPublisher(rank, dtype, limit, ray.put, actor.module.hf_name, delta, memory)}
    if critic:
        dtype = torch_dtype(config.model.dtype, "model.dtype")
        publishers[CRITIC] = WeightPublisher(rank, dtype, limit, ray.put)
    return publishers
