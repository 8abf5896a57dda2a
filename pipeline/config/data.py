"""Settings of the prompt source (`data.*`)."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting


@dataclass
class DataConfig:
    """Prompts: their files, their order and their tokens."""

    train_files: Any = setting(None, path="files")
    """Parquet files of training prompts: a path, folder, glob or URL, or a list of them. May be null if a `generator`
    makes all prompts."""

    val_files: Any = setting(None, path="files")
    """Parquet files of validation prompts, given like `train_files`. Null: no validation."""

    prompt_key: str = "prompt"
    """Column of the prompt: chat messages."""

    train_batch_size: int = setting(1024, at_least=1)
    """Prompts per iteration. Each is sampled `rollout.n` times."""

    max_prompt_length: int = setting(512, at_least=1)
    """Longest prompt, in tokens after the chat template. Longer ones: see `truncation` and
    `filter_overlong_prompts`."""

    max_response_length: int = setting(512, at_least=1)
    """Longest response, in tokens. In an episode, all answers and replies count."""

    filter_overlong_prompts: bool = False
    """Leave out prompts longer than `max_prompt_length`, instead of applying `truncation`."""

    truncation: str = setting("error", choices=("error", "left", "right", "middle"))
    """Treatment of a prompt longer than `max_prompt_length`: `error` ends the run, `left` keeps the prompt's end,
    `right` its start, `middle` both ends."""

    shuffle: bool = True
    """Shuffle the training prompts in each epoch."""

    shuffle_window_rows: int = setting(65536, at_least=1)
    """Rows of a shuffle window. Row groups of the files are read in random order, and rows are mixed within a window.
    One window is in memory."""

    train_max_samples: int = setting(-1, at_least=1, or_value=-1)
    """Training rows to use, from the first on. -1: all."""

    val_max_samples: int = setting(-1, at_least=1, or_value=-1)
    """Validation rows to use, from the first on. -1: all."""

    sampler: str = setting("uniform", path="code")
    """Sampler of training prompts: `uniform` (each once per epoch), `weighted` (by `source_weights`), `solve_rate`
    (prompts that are always or never solved come less often), or a class of your own as `package.module:Class`."""

    sampler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the sampler. `solve_rate` takes `least`, the smallest chance of a prompt (0.1), and `decay`, the
    weight of older tries (0.5)."""

    source_weights: dict[str, float] = field(default_factory=dict)
    """Share of each data source for `sampler=weighted`, such as `{gsm8k: 2, math: 1}`. The sum need not be 1; 0 leaves
    the source out."""

    generator: str | None = setting(None, path="code")
    """Class of your own that makes prompts during training, as `package.module:Class`. If it makes too few for an
    iteration, prompts of `train_files` fill it up."""

    generator_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the generator."""

    max_bad_rows: int = setting(0, at_least=0)
    """Limit of unusable prompts ([which](data.md#unusable-rows)). Up to this number they are set aside in
    `quarantine/`; one more ends the run."""

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the tokenizer's `apply_chat_template`, such as `{enable_thinking: false}`."""

    recorded_run: str | None = setting(None, path="files")
    """Folder of a run whose recorded rows take the place of prompts and engines
    ([after_training.md](after_training.md#replay-train-on-recorded-rows))."""

    recorded_iterations: str | None = None
    """Iterations of `recorded_run`: a range such as `3-10`, or one such as `3`. Null: all."""

    @property
    def longest_row(self) -> int:
        """Most tokens of a prompt with its response."""
        return self.max_prompt_length + self.max_response_length
