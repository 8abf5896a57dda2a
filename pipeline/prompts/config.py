"""Settings of the prompt source (`data.*`)."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DataConfig:
    """Which prompts are read and how they become tokens."""

    train_files: Any = None
    """Parquet files of training prompts: one path, folder or glob, or a list of them. Local or any fsspec URL."""

    val_files: Any = None
    """Parquet files of validation prompts, like `train_files`. Null: no validation."""

    prompt_key: str = "prompt"
    """Column that holds the chat messages."""

    train_batch_size: int = 1024
    """Prompts per iteration; each is sampled `rollout.n` times."""

    max_prompt_length: int = 512
    """Longest prompt in tokens after the chat template."""

    max_response_length: int = 512
    """Most tokens the policy may generate for one prompt."""

    filter_overlong_prompts: bool = False
    """Leave out prompts longer than `max_prompt_length` (counted) instead of applying `truncation`."""

    truncation: str = "error"
    """What happens to an overlong prompt that is not filtered: `error`, `left` (keep its end), `right` (keep its
    start) or `middle` (keep both ends)."""

    shuffle: bool = True
    """Shuffle the training prompts anew in each epoch."""

    shuffle_window_rows: int = 65536
    """Rows shuffled together: row groups are drawn in random order and mixed in windows of about this many rows, so
    memory is bounded by the window and not by the data."""

    train_max_samples: int = -1
    """Use only the first so many training rows; -1 uses all."""

    val_max_samples: int = -1
    """Use only the first so many validation rows; -1 uses all."""

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments for the tokenizer's `apply_chat_template`, for example `{enable_thinking: false}`."""
