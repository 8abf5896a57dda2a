"""The tree of all settings of a training run; the other files of this package hold its sections."""

from dataclasses import dataclass, field

from pipeline.config.agent import AgentConfig
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.config.data import DataConfig
from pipeline.config.learner import ActorConfig, CriticConfig
from pipeline.config.model import ModelConfig
from pipeline.config.reward import RewardConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.config.scoring import ScoringConfig
from pipeline.config.teacher import TeacherConfig
from pipeline.config.trainer import TrainerConfig


@dataclass
class Config:
    """All settings of a training run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
