"""The tree of all settings of a training run; the other files of this package hold its sections."""

from dataclasses import dataclass, field

from pipeline.config.algorithm import AlgorithmConfig
from pipeline.config.data import DataConfig
from pipeline.config.learner import ActorConfig, CriticConfig
from pipeline.config.model import ModelConfig
from pipeline.config.reward import RewardConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.config.scoring import ScoringConfig
from pipeline.config.trainer import TrainerConfig


@dataclass
class Config:
    """All settings of a training run."""

    data: DataConfig = field(default_factory=DataConfig)
    """Which prompts are read and how they become tokens."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The language model that is trained."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """The engine pool that turns prompts into responses."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    """The stage that scores responses."""

    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    """The pools of model replicas that score finished rows."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """How rewards become advantages."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy update."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model and its update."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run: how long, how wide, what is kept."""
