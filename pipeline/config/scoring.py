"""Settings of the scoring stages: reference, value and policy forward passes over finished rows (`scoring.*`)."""

from dataclasses import dataclass, field

from pipeline.config.bounds import setting

REPLICAS, TRAIN_WORKERS = "replicas", "train_workers"
"""Where log-probs of the reference may be computed."""


@dataclass
class ScorerConfig:
    """One pool of model replicas."""

    num_workers: int = setting(1, at_least=1)
    """Replicas, each one Ray actor with a whole model."""

    num_cpus: float = setting(1, at_least=0)
    """Ray CPUs of a replica."""

    num_gpus: float = setting(0, at_least=0, at_most=1)
    """Ray GPUs of a replica."""

    num_threads: int = setting(0, at_least=0)
    """Compute threads of a CPU replica; 0 takes `num_cpus`."""

    dtype: str | None = setting(None, choices=(None, "float32", "bfloat16", "float16"))
    """Type in which the replica computes; null takes `fsdp.param_dtype`, which null makes bfloat16 on GPUs and
    `model.dtype` on CPUs."""

    max_token_len: int = 16384
    """Most tokens in one forward pass; padding counts, in models that cannot attend over packed rows."""


@dataclass
class ReferenceConfig(ScorerConfig):
    """The frozen reference policy."""

    path: str | None = setting(None, path="model")
    """Hugging Face model, a folder or hub name; null takes `model.path`."""

    placement: str | None = setting(None, choices=(None, REPLICAS, TRAIN_WORKERS))
    """`replicas`: a whole model in each, which score rows before the advantages. `train_workers`: one model, sharded
    over them as the policy is, or with adapters and no `path` the policy without them; for a KL in the loss. null: in
    the train workers if that takes no second model, else in replicas."""

    offload: bool = False
    """Leave the sharded model of `placement=train_workers` in host memory, from which each layer visits the GPU."""


@dataclass
class ScoringConfig:
    """The pools, each of which exists only where something reads what it writes."""

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    reward_model: ScorerConfig = field(default_factory=ScorerConfig)

    value: ScorerConfig = field(default_factory=ScorerConfig)

    policy: ScorerConfig = field(default_factory=ScorerConfig)
