"""Settings of supervised fine-tuning (`python -m jobs.sft`)."""

from dataclasses import dataclass, field

from pipeline.train.supervised_config import SupervisedConfig, SupervisedDataConfig, SupervisedTrainerConfig


@dataclass
class SFTDataConfig(SupervisedDataConfig):
    """Which conversations are learnt (`data.*`)."""

    messages_key: str = "messages"
    """Column that holds the conversation as chat messages; the assistant's are learnt."""

    truncation: str = "error"
    """What happens to a longer one: `error`, or `right` (keep its start)."""


@dataclass
class SFTTrainerConfig(SupervisedTrainerConfig):
    """How long, how wide, where to (`trainer.*`)."""

    logits_chunk_tokens: int = 1024
    """Tokens whose logits are held at a time; bounds the memory of large vocabularies."""


@dataclass
class SFTConfig(SupervisedConfig):
    """All settings of a supervised run."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    """Which conversations are learnt."""

    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    """How long, how wide."""
