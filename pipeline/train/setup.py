"""Builds what the train loop needs from the run's configuration."""

import ray
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
    """The actor of a run with so many iterations that update it, sharded over all ranks."""
    return Actor(
        config.actor,
        config.model,
        UpdateShape.of(config, config.actor),
        device,
        iterations,
        correction=rollout_correction(config),
        temperature=config.rollout.temperature,
        max_response_length=config.data.max_response_length,
        seed=config.trainer.seed,
        guards_gap=config.trainer.max_log_prob_gap is not None,
    )


def build_critic(config: Config, device: torch.device, iterations: int) -> Critic:
    """The critic of a run with so many iterations, sharded over all ranks."""
    return Critic(
        config.critic,
        config.model,
        UpdateShape.of(config, config.critic),
        device,
        iterations,
        agg_mode=config.critic.loss_agg_mode or config.actor.loss_agg_mode,
        scale_factor=config.actor.loss_scale_factor or float(config.data.max_response_length),
    )


def build_publishers(
    config: Config, actor: Actor, critic: Critic | None, rank: int, device: torch.device
) -> dict[str, WeightPublisher]:
    """What publishes this rank's part of each trained model's weights, by the model's name in the store."""
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
