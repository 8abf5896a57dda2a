"""Settings of the prompt source (`data.*`)."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting


@dataclass
class DataConfig:
    """Which prompts are read and how they become tokens."""

    train_files: Any = setting(None, path="files")
    """Parquet files of training prompts: a path, folder, glob or URL, or a list of them. Null if a `generator` makes
    all."""

    val_files: Any = setting(None, path="files")
    """Files of validation prompts. Null: no validation."""

    prompt_key: str = "prompt"
    """Column with the chat messages."""

    train_batch_size: int = setting(1024, at_least=1)
    """Prompts per iteration; each is sampled `rollout.n` times."""

    max_prompt_length: int = setting(512, at_least=1)
    """Longest prompt in tokens, after the chat template."""

    max_response_length: int = setting(512, at_least=1)
    """Most tokens of a response."""

    filter_overlong_prompts: bool = False
    """Leave out prompts longer than `max_prompt_length`, instead of applying `truncation`."""

    truncation: str = setting("error", choices=("error", "left", "right", "middle"))
    """Treatment of an overlong prompt: `error`, `left` (keep its end), `right` (keep its start) or `middle` (keep both
    ends)."""

    shuffle: bool = True
    """Shuffle the training prompts in each epoch."""

    shuffle_window_rows: int = setting(65536, at_least=1)
    """Rows of a shuffle window, the only one in memory. Row groups are drawn in random order and mixed within
    windows."""

    train_max_samples: int = setting(-1, at_least=1, or_value=-1)
    """Use only this many of the first training rows; -1: all."""

    val_max_samples: int = setting(-1, at_least=1, or_value=-1)
    """Use only this many of the first validation rows; -1: all."""

    sampler: str = setting("uniform", path="code")
    """Choice of training prompts: `uniform` (each once per epoch), `weighted` (by `source_weights`), `solve_rate`
    (fewer that are always or never solved), or your class `package.module:Class`."""

    sampler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the sampler. `solve_rate` has `least`, the smallest chance of a prompt (0.1), and `decay`, the weight
    of older tries (0.5)."""

    source_weights: dict[str, float] = field(default_factory=dict)
    """For `sampler=weighted`: share of each data source; 0 leaves it out. The sum need not be 1."""

    generator: str | None = setting(None, path="code")
    """Your class that makes prompts during training, `package.module:Class`. `train_files` fill up an iteration."""

    generator_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the generator."""

    max_bad_rows: int = setting(0, at_least=0)
    """Unusable prompts that are set aside in `quarantine/` ([which](your_data.md#unusable-rows)); one more ends the
    run."""

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the tokenizer's `apply_chat_template`, such as `{enable_thinking: false}`."""

    recorded_run: str | None = setting(None, path="files")
    """Folder of a run whose recorded rows replace prompts and engines ([replay.md](replay.md))."""

    recorded_iterations: str | None = None
    """Iterations of `recorded_run`: `3-10`, or `3` alone; null: all."""

    @property
    def longest_row(self) -> int:
        """Most tokens of a prompt with its response."""
        return self.max_prompt_length + self.max_response_length
