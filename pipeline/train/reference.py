"""A frozen model, the reference or the teacher, sharded over the train workers, if it fits no single GPU.

    rows ─► micro-batches of the actor's size ─► gather a layer ─► compute ─► free it ─► ... ─► log-probs

The model is frozen, and its weights have the dtype of the computation: P parameters in bfloat16 are 2 P bytes, divided
over the actor's mesh. With `offload` the weights are kept in host memory between passes.
"""

from dataclasses import dataclass

import torch

from pipeline.config.learner import FSDPConfig
from pipeline.config.model import ModelConfig
from pipeline.models.backend import FsdpBackend
from pipeline.models.fsdp import shard
from pipeline.models.mesh import Mesh
from pipeline.models.policy import Policy, load_frozen
from pipeline.models.schedule import make_backend
from pipeline.models.sharing import Passes


@dataclass
class ShardedReference:
    """A frozen model, and the form in which rows pass through it."""

    module: Policy
    """The model, sharded."""
    passes: Passes
    """Whether rows are packed, and whether samples share their prompt."""
    backend: FsdpBackend
    """Passes of the model."""

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        trained: ModelConfig,
        device: torch.device,
        mesh: Mesh,
        offload: bool,
        longest: int | None = None,
        key: str = "scoring.reference.path",
    ) -> "ShardedReference":
        """Load the model of `config`; a collective.

        Args:
            config: settings of the reference: path, and dtype of weights and computation (`derived.scoring_model`).
            trained: settings of the policy, for the size of its vocabulary and `share_prompts`.
            device: this rank's device.
            mesh: the ranks that divide the weights.
            offload: whether the weights are kept in host memory between passes.
            longest: length of the longest row in tokens; None for the model's own limit.
            key: configuration key of the model's path, for errors.

        Raises ValueError as `load_frozen` does, and if `share_prompts` is `always` and the model cannot pack rows.
        """
        module = load_frozen(config, trained, mesh, longest, key)
        passes = Passes.of(module, trained.share_prompts, mesh.sequence_ranks)
        # Weights that stayed gathered would be a whole model on every GPU.
        fsdp = FSDPConfig(reshard_after_forward=True, param_dtype=config.dtype, offload="all" if offload else "none")
        sharded = shard(module, fsdp, device, mesh)
        return cls(sharded, passes, make_backend(sharded, None, mesh, device))
