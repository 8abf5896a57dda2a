"""Settings of the scoring stages: reference, value and policy forward passes over finished rows (`scoring.*`)."""

from dataclasses import dataclass, field

from pipeline.config.bounds import setting

REPLICAS, TRAIN_WORKERS = "replicas", "train_workers"
"""Values of `scoring.reference.placement`: in replicas of the scoring stage, or in the train workers."""


@dataclass
class ScorerConfig:
    """One pool of model replicas that score rows."""

    num_workers: int = setting(1, at_least=1)
    """Number of replicas; each is a Ray actor with a whole model."""

    num_cpus: float = setting(1, at_least=0)
    """Ray CPUs of one replica."""

    num_gpus: float = setting(0, at_least=0, at_most=1)
    """Ray GPUs of one replica. 0: the replica runs on CPUs. Below 1: it shares a GPU."""

    num_threads: int = setting(0, at_least=0)
    """Number of compute threads of a CPU replica. 0 takes `num_cpus`."""

    dtype: str | None = setting(None, choices=(None, "float32", "bfloat16", "float16"))
    """Type of the replica's computation. Null takes `fsdp.param_dtype` of the actor or critic; if that is null too,
    bfloat16 on GPUs and `model.dtype` on CPUs."""

    max_token_len: int = 16384
    """Maximum number of tokens in one forward pass. Padding counts too, if the model cannot attend over packed rows."""


@dataclass
class ReferenceConfig(ScorerConfig):
    """Reference policy, which is not trained."""

    path: str | None = setting(None, path="model")
    """Hugging Face model: a folder or a hub name. Null takes `model.path`."""

    placement: str | None = setting(None, choices=(None, REPLICAS, TRAIN_WORKERS))
    """Processes that run the reference policy. `replicas`: Ray actors, each with a whole model, which score rows before
    advantages are computed. `train_workers`, for a KL in the loss: one model, sharded like the policy; with adapters
    and no `path`, it is the policy without its adapter. Null: train workers if that needs no second model, else
    replicas."""

    offload: bool = False
    """With `placement=train_workers`: keep the sharded model in host memory, and copy each layer to the GPU when it is
    used."""


@dataclass
class ScoringConfig:
    """Pools of scoring replicas. A pool exists only if a setting uses its output."""

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    reward_model: ScorerConfig = field(default_factory=ScorerConfig)

    value: ScorerConfig = field(default_factory=ScorerConfig)

    policy: ScorerConfig = field(default_factory=ScorerConfig)
