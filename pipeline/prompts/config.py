"""Settings of the prompt source (`data.*`)."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DataConfig:
    """Which prompts are read and how they become tokens."""

    train_files: Any = None
    """Files of training prompts: one path, folder or glob, or a list of them. Local or any fsspec URL. Parquet, JSON
    (`.json`, `.jsonl`, `.ndjson`, each also with `.gz`), or a folder that Hugging Face `datasets` saved. Null where a
    `generator` makes all prompts."""

    val_files: Any = None
    """Files of validation prompts, like `train_files`. Null: no validation."""

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

    sampler: str = "uniform"
    """Which training prompts are taken: `uniform` (each once per epoch), `weighted` (each data source its share, see
    `source_weights`), `solve_rate` (those that are always or never solved less often), or a class of one's own as
    `package.module:Class`."""

    sampler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the sampler. `solve_rate` has `least`, the smallest chance of a prompt to be taken (0.1), and `decay`,
    the weight of older tries (0.5)."""

    source_weights: dict[str, float] = field(default_factory=dict)
    """For `sampler=weighted`: the share of each data source in the prompts, whatever its number of rows; 0 leaves it
    out. The weights need not sum to 1."""

    generator: str | None = None
    """Class of one's own that makes prompts as training goes, as `package.module:Class`. Each iteration takes its
    prompts first and fills up from `train_files`."""

    generator_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the generator."""

    max_bad_rows: int = 0
    """Most prompts that may be unusable (no chat messages, no data source, not JSON, too long where that is an error).
    They are set aside in the run's folder, as `quarantine/*.parquet` with place and reason; one more ends the run. 0
    ends it at the first."""

    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments for the tokenizer's `apply_chat_template`, for example `{enable_thinking: false}`."""

    recorded_run: str | None = None
    """Folder of a run whose recorded rows are trained on, in the place of prompts and engines; null generates.
    `python -m jobs.replay` sets it, see docs/replay.md."""

    recorded_iterations: str | None = None
    """Which iterations of `recorded_run`: `3-10`, or `3` alone; null takes all."""
