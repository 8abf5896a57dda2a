"""Settings of the scoring stages: reference, value and policy forward passes over finished rows (`scoring.*`)."""

from dataclasses import dataclass, field

from pipeline.config.bounds import setting

REPLICAS, TRAIN_WORKERS = "replicas", "train_workers"
"""Places of the reference policy."""


@dataclass
class ScorerConfig:
    """One pool of model replicas."""

    num_workers: int = setting(1, at_least=1)
    """Replicas, each a Ray actor with a whole model."""

    num_cpus: float = setting(1, at_least=0)
    """Ray CPUs of a replica."""

    num_gpus: float = setting(0, at_least=0, at_most=1)
    """Ray GPUs of a replica: 0 is a CPU replica, below 1 shares a GPU."""

    num_threads: int = setting(0, at_least=0)
    """Compute threads of a CPU replica. 0 takes `num_cpus`."""

    dtype: str | None = setting(None, choices=(None, "float32", "bfloat16", "float16"))
    """Type of the replica's computation. Null takes `fsdp.param_dtype`; if that is null too, bfloat16 on GPUs and
    `model.dtype` on CPUs."""

    max_token_len: int = 16384
    """Most tokens in one forward pass; padding counts, in models that cannot attend over packed rows."""


@dataclass
class ReferenceConfig(ScorerConfig):
    """Frozen reference policy."""

    path: str | None = setting(None, path="model")
    """Hugging Face model: a folder or a hub name. Null takes `model.path`."""

    placement: str | None = setting(None, choices=(None, REPLICAS, TRAIN_WORKERS))
    """Place of the reference. `replicas`: whole models in Ray actors, which score rows before the advantages.
    `train_workers`, for a KL in the loss: one model, sharded like the policy; with adapters and no `path`, the policy
    without its adapter. Null: train workers if that needs no second model, else replicas."""

    offload: bool = False
    """Keep the sharded model of `placement=train_workers` in host memory; each layer visits the GPU when it is used."""


@dataclass
class ScoringConfig:
    """Pools of scoring replicas. A pool exists only if a setting uses its output."""

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    reward_model: ScorerConfig = field(default_factory=ScorerConfig)

    value: ScorerConfig = field(default_factory=ScorerConfig)

    policy: ScorerConfig = field(default_factory=ScorerConfig)
