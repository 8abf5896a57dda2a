"""The ways to train a model: FSDP2 for every model, or Megatron's layers for few (`actor.strategy`)."""

from dataclasses import dataclass
from typing import Any

import torch

from pipeline.config.learner import ActorConfig, CriticConfig
from pipeline.config.model import ModelConfig
from pipeline.models.backend import FsdpBackend
from pipeline.models.fsdp import shard
from pipeline.models.mesh import Mesh
from pipeline.models.precision import torch_dtype
from pipeline.models.repeatable import check_repeatable
from pipeline.models.schedule import make_backend
from pipeline.models.sharing import Passes
from pipeline.train.optim import build_optimizer, build_scheduler


@dataclass(frozen=True)
class ReadyModel:
    """A model that is ready to train."""

    module: Any
    passes: Passes
    """The form in which rows pass through the model."""
    optimizer: Any
    scheduler: Any
    backend: FsdpBackend


def fsdp(
    module: Any,
    config: ActorConfig | CriticConfig,
    steps: int,
    device: torch.device,
    share_prompts: str,
    mesh: Mesh,
) -> ReadyModel:
    """Shard a model with FSDP2, in place; a collective.

    Args:
        module: the model, with a `decoder`.
        config: the section `actor` or `critic`.
        steps: number of optimiser steps of the run, for the learning-rate schedule.
        device: this rank's device.
        share_prompts: `model.share_prompts`.
        mesh: the ranks that loaded slices of the model.
    """
    passes = Passes.of(module, share_prompts, mesh.sequence_ranks)
    shard(module, config.fsdp, device, mesh)
    check_repeatable(module, device)
    optimizer = build_optimizer(module, config.optim, config.fsdp.offload)
    scheduler = build_scheduler(optimizer, config.optim, steps)
    backend = make_backend(module, optimizer, mesh, device, not config.fsdp.reshard_after_forward)
    return ReadyModel(module, passes, optimizer, scheduler, backend)


def megatron(model: ModelConfig, config: ActorConfig, steps: int, device: torch.device, mesh: Mesh) -> ReadyModel:
    """Load a policy into Megatron's layers; a collective.

    Args:
        model: settings of the model.
        config: the section `actor`.
        steps: number of optimiser steps of the run, for the learning-rate schedule.
        device: this rank's device.
        mesh: the ranks.

    Raises ValueError as `load_megatron` does.
    """
    # The package is there only if this strategy is used.
    from pipeline.megatron.backend import MegatronBackend
    from pipeline.megatron.policy import load_megatron

    dtype = torch_dtype(config.fsdp.compute_dtype(model.dtype, device.type == "cuda"), "actor.fsdp.param_dtype")
    policy = load_megatron(model, config.parallel, mesh, device, dtype)
    backend = MegatronBackend(policy, config.optim, device)
    scheduler = build_scheduler(backend.optimizer, config.optim, steps)
    return ReadyModel(policy, Passes(True, model.share_prompts != "never"), backend.optimizer, scheduler, backend)
