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

    image_key: str = "images"
    """Column of the prompt's images with `model.vision`: encoded images, or structs `{bytes, path}` with a path
    relative to the file. Each `<image>` in the prompt's text stands for the next one."""

    max_image_bytes: int = setting(1_000_000, at_least=1)
    """Maximum size of the encoded images of a prompt together, or of an episode, in bytes. Each of the `rollout.n`
    samples has a copy."""

    train_batch_size: int = setting(1024, at_least=1)
    """Number of prompts per iteration. Each prompt is sampled `rollout.n` times."""

    max_prompt_length: int = setting(512, at_least=1)
    """Maximum prompt length in tokens, with the tokens of the chat template. For longer prompts see `truncation` and
    `filter_overlong_prompts`."""

    max_response_length: int = setting(512, at_least=1)
    """Maximum response length, in tokens. In a multi-turn episode, the model's turns and the tool and environment
    messages between them count together."""

    filter_overlong_prompts: bool = False
    """Leave out prompts longer than `max_prompt_length`, instead of applying `truncation`."""

    truncation: str = setting("error", choices=("error", "left", "right", "middle"))
    """Treatment of a prompt longer than `max_prompt_length`: `error` ends the run, `left` keeps the prompt's end,
    `right` its start, `middle` both ends."""

    shuffle: bool = True
    """Shuffle the training prompts in each epoch."""

    shuffle_window_rows: int = setting(65536, at_least=1)
    """Number of rows in a shuffle window. Row groups of the files are read in random order, and rows are shuffled
    within a window. One window is in memory."""

    train_max_samples: int = setting(-1, at_least=1, or_value=-1)
    """Number of training rows to use, from the first on. -1: all."""

    val_max_samples: int = setting(-1, at_least=1, or_value=-1)
    """Number of validation rows to use, from the first on. -1: all."""

    sampler: str = setting("uniform", path="code")
    """Sampler of training prompts: `uniform` (each once per epoch), `weighted` (by `source_weights`), `solve_rate`
    (prompts that are always or never solved come less often), or a class of your own as `package.module:Class`."""

    sampler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the sampler. `solve_rate` takes `least`, the smallest probability with which a prompt is
    drawn (default 0.1), and `decay`, the weight of earlier solve rates in the running average (default 0.5)."""

    source_weights: dict[str, float] = field(default_factory=dict)
    """Weight of each data source for `sampler=weighted`, such as `{gsm8k: 2, math: 1}`. The sum need not be 1; 0 leaves
    the source out."""

    generator: str | None = setting(None, path="code")
    """Class of your own that makes prompts during training, as `package.module:Class`. If it makes too few for an
    iteration, prompts of `train_files` fill it up."""

    generator_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor of `generator`."""

    max_bad_rows: int = setting(0, at_least=0)
    """Maximum number of [unusable prompts](data.md#unusable-rows). Up to this number they are left out and recorded in
    the folder `quarantine/`; one more ends the run."""

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the tokenizer's `apply_chat_template`, such as `{enable_thinking: false}`."""

    recorded_run: str | None = setting(None, path="files")
    """Folder of an earlier run. This run then trains on the rows recorded there and generates none
    ([after_training.md](after_training.md#replay-train-on-recorded-rows))."""

    recorded_iterations: str | None = None
    """Iterations of `recorded_run` to train on: a range such as `3-10`, or one number such as `3`. Null: all."""

    @property
    def longest_row(self) -> int:
        """Maximum number of tokens of a prompt and its response together."""
        return self.max_prompt_length + self.max_response_length
