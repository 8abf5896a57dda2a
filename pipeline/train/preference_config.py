"""Settings of reward-model training (`python -m jobs.reward_model`)."""

from dataclasses import dataclass, field

from pipeline.train.supervised_config import SupervisedConfig, SupervisedDataConfig


@dataclass
class PreferenceDataConfig(SupervisedDataConfig):
    """Which pairs are learnt (`data.*`)."""

    prompt_key: str | None = "prompt"
    """Column that holds the prompt, as chat messages or as the user's text. Without such a column, or with null, the
    two sides hold whole conversations."""

    chosen_key: str = "chosen"
    """Column that holds the preferred side, as chat messages or as the assistant's text."""

    rejected_key: str = "rejected"
    """Column that holds the other side, like `chosen_key`."""

    margin_key: str | None = None
    """Column of numbers: how much higher than the other side's the reward of the preferred one should be. Null: 0."""

    truncation: str = "error"
    """What happens to a pair with a longer conversation: `error`; `left`, which keeps the end of that conversation,
    where the reward is read; or `drop`, which leaves the pair out and counts it."""


@dataclass
class PreferenceConfig(SupervisedConfig):
    """All settings of a reward model's training."""

    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    """Which pairs are learnt."""
