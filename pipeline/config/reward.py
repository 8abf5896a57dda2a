"""Settings of the reward stage (`reward.*`)."""

import math
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting
from pipeline.config.sandbox import SandboxConfig


@dataclass
class CustomRewardConfig:
    """A reward function of your own."""

    path: str | None = setting(None, path="script")
    """Python file (`/code/my_reward.py`) or module (`package.module`) with the function. Null: the built-in rule for
    the row's `data_source` scores it."""

    name: str = "compute_score"
    """Name of the function `f(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)`. It is a plain or
    an `async def` function, and returns a number or a dict with `score`."""

    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of the function."""


@dataclass
class FunctionConfig:
    """One of several reward functions (`reward.functions.NAME.*`)."""

    path: str | None = None
    """Python file or module, given like `reward.custom_reward_function.path`."""

    name: str = "compute_score"
    """Name of the function."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of the function."""

    weight: float = 1.0
    """Weight of this function's score in the sum of all."""

    batch: bool = False
    """Call the function once for all rows of a chunk, with lists `data_sources`, `solution_strs`, `ground_truths` and
    `extra_infos` (or with one Arrow table, if it has a parameter `table`). It returns a list with one result per
    row."""

    timeout_s: float | None = None
    """Time limit of one call, in seconds. Null takes `reward.timeout_s`."""


@dataclass
class OverlongBufferConfig:
    """DAPO's soft penalty on responses near the length limit."""

    enable: bool = False
    """Add `min(0, -(L - (data.max_response_length - len)) / len * penalty_factor)` to the score of each response; L is
    its length in tokens."""

    len: int = 0
    """Number of tokens before `data.max_response_length` over which the penalty grows from 0 to `penalty_factor`."""

    penalty_factor: float = setting(1.0, at_least=0)
    """Penalty of a response of `data.max_response_length` tokens."""


@dataclass
class RepetitionPenaltyConfig:
    """Penalty on responses that repeat themselves."""

    factor: float = setting(0.0, at_least=0)
    """Penalty of a response in which every n-gram is a repetition. In other responses the penalty is in proportion to
    the share of repeated n-grams. 0: no penalty."""

    ngram: int = setting(4, at_least=1)
    """Length of an n-gram in tokens."""


@dataclass
class RateLimitConfig:
    """Limits on calls of your own reward functions, for the whole run; calls of built-in rules do not count. With a
    limit, the reward stage is a single actor."""

    max_concurrent: int | None = setting(None, at_least=1)
    """Maximum number of calls at the same time. Null: no limit."""

    max_per_minute: int | None = setting(None, at_least=1)
    """Maximum number of calls that begin within 60 seconds. Null: no limit."""

    @property
    def used(self) -> bool:
        """True if a limit is set."""
        return self.max_concurrent is not None or self.max_per_minute is not None


@dataclass
class RewardModelConfig:
    """Reward model, which scores responses. Its resources are set in `scoring.reward_model`."""

    path: str | None = setting(None, path="model")
    """Hugging Face sequence-classification model with one label: a folder or a hub name. The output of the model is the
    score, to which the scores of `reward.functions` are added."""

    weight: float = 1.0
    """Weight of the model's output in the score."""


@dataclass
class RewardConfig:
    """Scores of responses."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)

    functions: dict[str, dict[str, Any]] = setting({}, path="scripts")
    """Several rewards, whose weighted sum is the score: `reward.functions.NAME.KEY=value` with the keys `path`, `name`,
    `kwargs`, `weight`, `batch` and `timeout_s` ([rewards.md](rewards.md#several-rewards))."""

    model: RewardModelConfig = field(default_factory=RewardModelConfig)

    rule_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keyword arguments of built-in rules, by `data_source`: `reward.rule_kwargs.gsm8k.method=strict`."""

    timeout_s: float = setting(60.0, above=0)
    """Time limit of one call of a reward function, in seconds. If it is exceeded, the worker process of the call is
    killed and the row is an error."""

    max_processes: int = setting(8, at_least=1)
    """Maximum number of worker processes for plain functions in one reward task. All `async def` functions share one
    further process."""

    worker_memory_mb: int = setting(4096, at_least=1)
    """Limit of a worker process's resident memory, in MiB. If it is exceeded, the process is killed and the row is an
    error. Linux only."""

    num_cpus: float = setting(1, at_least=0)
    """Ray CPUs of one reward task. Ray Data runs as many tasks at the same time as the CPUs allow."""

    max_error_rate: float = setting(0.1, at_least=0, at_most=1)
    """Maximum fraction of an iteration's rows that may be errors of the reward. If more are, the run ends."""

    source_scale: dict[str, float] = field(default_factory=dict)
    """Factor of the score for each `data_source`; sources that are not named have 1. This key and the keys below act on
    training rows only."""

    normalize: dict[str, list[Any]] = field(default_factory=dict)
    """Mean and standard deviation of the scores for each `data_source`: with `reward.normalize.my_source=[2.5,0.8]` the
    score of rows of `my_source` becomes `(score - 2.5) / 0.8`."""

    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)

    length_penalty: float = setting(0.0, at_least=0)
    """Penalty of a response of `data.max_response_length` tokens. The penalty of a shorter response is in proportion to
    its length."""

    repetition_penalty: RepetitionPenaltyConfig = field(default_factory=RepetitionPenaltyConfig)

    clip: list[float] | None = None
    """Bounds `[low, high]` to which the score is clipped after all penalties. Null: no bounds."""

    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    rate_limit: RateLimitConfig = field(default_factory=RateLimitConfig)

    def problems(self) -> dict[str, object]:
        """Sentences on settings that exclude each other, and whether each applies (see `sentences`)."""
        clip, url = self.clip, self.sandbox.url
        table: dict[str, object] = {
            "{reward.model.weight} must be a number other than 0; without a reward model, unset reward.model.path": (
                self.model.path is not None and self.model.weight == 0
            ),
            "reward.functions and {reward.custom_reward_function.path} are both set; write the one function as another "
            "entry of reward.functions, or remove the others": self.functions and self.custom_reward_function.path,
            "{reward.clip} must be two numbers, the lower one first, or null": (
                clip is not None and (len(clip) != 2 or not clip[0] < clip[1])
            ),
            "{reward.sandbox.url} must begin with http:// or https://": (
                url is not None and not url.startswith(("http://", "https://"))
            ),
        }
        for source, pair in self.normalize.items():
            numbers = len(pair) == 2 and all(isinstance(number, int | float) for number in pair)
            usable = numbers and math.isfinite(pair[0]) and 0 < pair[1] < math.inf
            sentence = f"reward.normalize.{source}={pair} must be a mean and a standard deviation above 0 of its scores"
            table[sentence] = not usable
        for source, factor in self.source_scale.items():
            table[f"reward.source_scale.{source}={factor} must be a finite number"] = not math.isfinite(factor)
        return table
