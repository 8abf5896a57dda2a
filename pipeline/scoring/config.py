"""Settings of the scoring stages: reference, value and policy forward passes over finished rows (`scoring.*`)."""

from dataclasses import dataclass, field


@dataclass
class ScorerConfig:
    """One pool of model replicas."""

    num_workers: int = 1
    """Replicas in the pool, each one Ray actor that holds a whole model."""

    num_cpus: float = 1
    """Ray CPUs of one replica."""

    num_gpus: float = 0
    """Ray GPUs of one replica, at most 1."""

    num_threads: int = 0
    """Compute threads of one CPU replica; 0 takes `num_cpus`."""

    dtype: str | None = None
    """Type the replica computes in; null computes as the trainer does (`fsdp.param_dtype`, else `model.dtype`)."""

    max_token_len: int = 16384
    """Most tokens (padding counted) in one forward pass."""


@dataclass
class ReferenceConfig(ScorerConfig):
    """The frozen reference policy (`scoring.reference.*`)."""

    path: str | None = None
    """Hugging Face model: a local folder or a hub name; null takes `model.path`, the policy before training."""


@dataclass
class ScoringConfig:
    """The pools, each of which exists only where something reads what it writes."""

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """Log-probs of the reference policy, for a KL in reward or loss."""

    reward_model: ScorerConfig = field(default_factory=ScorerConfig)
    """Scores of the reward model, where `reward.model.path` names one."""

    value: ScorerConfig = field(default_factory=ScorerConfig)
    """Values of the critic, for `gae`."""

    policy: ScorerConfig = field(default_factory=ScorerConfig)
    """Sum of squared probabilities of the policy, for the optimal token baselines."""
