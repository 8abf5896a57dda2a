"""The reference as a second model in the train workers, for a KL in the loss if no GPU can hold it whole.

    rows ─► micro-batches of the actor's size ─► gather a layer ─► compute ─► free it ─► ... ─► `ref_log_probs`

The model is frozen and in the type of the computation, so that P parameters in bfloat16 are 2 P bytes, divided over the
actor's mesh. With `scoring.reference.offload` they wait in host memory.
"""

from dataclasses import dataclass

import torch

from pipeline.config.learner import FSDPConfig
from pipeline.config.model import ModelConfig
from pipeline.models.fsdp import shard
from pipeline.models.mesh import Mesh
from pipeline.models.policy import Policy, load_reference
from pipeline.models.sharing import Passes


@dataclass
class ShardedReference:
    """A frozen model, and the passes of rows through it."""

    module: Policy
    passes: Passes

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        trained: ModelConfig,
        device: torch.device,
        mesh: Mesh,
        offload: bool,
        longest: int | None = None,
    ) -> "ShardedReference":
        """Load the model of `config`; a collective.

        Args:
            config: path, and the type of weights and computation (`derived.scoring_model`).
            trained: the policy, for its vocabulary and `share_prompts`.
            device: this rank's device.
            mesh: the ranks that divide the weights.
            offload: whether the weights stay in host memory.
            longest: tokens of the longest row; None for the model's own limit.

        Raises ValueError as `load_reference`, and if prompts must be shared and the model cannot.
        """
        module = load_reference(config, trained, mesh, longest)
        passes = Passes.of(module, trained.share_prompts, mesh.sequence_ranks)
        # Weights that stayed gathered would be a whole model on every GPU.
        fsdp = FSDPConfig(reshard_after_forward=True, param_dtype=config.dtype, offload="all" if offload else "none")
        return cls(shard(module, fsdp, device, mesh), passes)
