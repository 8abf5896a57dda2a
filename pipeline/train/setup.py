"""Builds actor, critic and weight publishers from the run's configuration."""

import torch

from pipeline.config import Config
from pipeline.config.scoring import ReferenceConfig
from pipeline.config.teacher import TeacherConfig
from pipeline.derived import (
    UpdateShape,
    rollout_correction,
    scoring_model,
    shards_reference,
    shards_teacher,
    trains_beside_reference,
)
from pipeline.models import adapter
from pipeline.models.mesh import Mesh, make_mesh
from pipeline.models.precision import torch_dtype
from pipeline.store.versions import CRITIC, POLICY
from pipeline.train.actor import Actor
from pipeline.train.critic import Critic
from pipeline.train.reference import ShardedReference
from pipeline.weights.direct import PublishedMemory
from pipeline.weights.publish import WeightPublisher


def build_actor(config: Config, device: torch.device, iterations: int) -> Actor:
    """Build the actor and, if it is in the train workers, the reference, sharded over all ranks.

    Args:
        config: the run's configuration.
        device: this rank's device.
        iterations: number of iterations that update the actor, for the learning-rate schedule.
    """
    mesh = make_mesh(device, config.actor.parallel)
    return Actor(
        config.actor,
        config.model,
        UpdateShape.of(config, config.actor),
        device,
        iterations,
        mesh,
        correction=rollout_correction(config),
        temperature=config.rollout.temperature,
        seed=config.trainer.seed,
        guards_gap=config.trainer.max_log_prob_gap is not None,
        own_reference=trains_beside_reference(config),
        reference=_build_frozen(config, config.scoring.reference, device, mesh) if shards_reference(config) else None,
        teacher=_build_frozen(config, config.teacher, device, mesh, "teacher.path") if shards_teacher(config) else None,
        teacher_coef=config.algorithm.teacher_coef,
    )


def _build_frozen(
    config: Config,
    settings: ReferenceConfig | TeacherConfig,
    device: torch.device,
    mesh: Mesh,
    key: str = "scoring.reference.path",
) -> ShardedReference:
    model = scoring_model(config.model, settings, config.actor.fsdp, settings.path, gpu=device.type == "cuda")
    return ShardedReference.load(model, config.model, device, mesh, settings.offload, config.data.longest_row, key)


def build_critic(config: Config, device: torch.device, iterations: int, mesh: Mesh | None = None) -> Critic:
    """Build the critic, sharded over all ranks.

    Args:
        config: the run's configuration.
        device: this rank's device.
        iterations: number of iterations that update the critic, for the learning-rate schedule.
        mesh: the actor's mesh; None makes one.
    """
    mesh = mesh or make_mesh(device, config.actor.parallel)
    return Critic(config.critic, config.model, UpdateShape.of(config, config.critic), device, iterations, mesh)


def build_publishers(
    config: Config, actor: Actor, critic: Critic | None, rank: int, device: torch.device
) -> dict[str, WeightPublisher]:
    """Build the publishers of this rank's part of the weights, by model name: `POLICY` and, with a critic, `CRITIC`."""
    # Imported here because building a learner needs no Ray (benchmarks/gpu).
    import ray

    limit = config.trainer.weight_bucket_mb * 2**20
    nixl = config.trainer.weight_transport == "nixl"
    memory = PublishedMemory(rank, config.algorithm.max_staleness + 2, device) if nixl else None
    dtype = torch_dtype(config.rollout.dtype, "rollout.dtype")
    lora, alone = config.model.lora, None
    if lora.alone:
        names = [adapter.peft_name(name) for name, _ in actor.module.named_parameters() if ".lora_" in name]
        alone = adapter.settings_of(lora, config.model.path, names)
    name = actor.module.hf_name
    publishers = {POLICY: WeightPublisher(rank, dtype, limit, ray.put, name, memory, alone, actor.mesh)}
    if critic:
        replica = scoring_model(config.model, config.scoring.value, config.critic.fsdp)
        dtype = torch_dtype(replica.dtype, "scoring.value.dtype")
        publishers[CRITIC] = WeightPublisher(rank, dtype, limit, ray.put)
    return publishers
