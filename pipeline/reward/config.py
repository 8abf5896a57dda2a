"""Settings of the reward stage (`reward.*`)."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.reward.sandbox.config import SandboxConfig


@dataclass
class CustomRewardConfig:
    """A reward function of your own (`reward.custom_reward_function.*`)."""

    path: str | None = None
    """Python file (`/code/my_reward.py`) or module (`package.module`) that holds the function; null uses the rule of
    the row's `data_source`."""

    name: str = "compute_score"
    """Name of the function: `f(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)`, plain or
    `async def`, which returns a number or a dict with the key `score`."""

    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the function."""


@dataclass
class FunctionConfig:
    """One of several rewards (`reward.functions.NAME.*`)."""

    path: str | None = None
    """As `reward.custom_reward_function.path`; null is the rule of the row's `data_source`."""

    name: str = "compute_score"
    """Name of the function in it."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the function."""

    weight: float = 1.0
    """What its score is multiplied by in the sum."""

    batch: bool = False
    """Whether it is called once for all rows of a chunk, with `data_sources`, `solution_strs`, `ground_truths` and
    `extra_infos` (or with one Arrow table, where it has a parameter `table`), and returns a list."""

    timeout_s: float | None = None
    """Seconds of one call; null is `reward.timeout_s`."""


@dataclass
class OverlongBufferConfig:
    """DAPO's soft penalty on responses that come close to the longest one allowed (`reward.overlong_buffer.*`)."""

    enable: bool = False
    """Whether `min(0, -(L - (data.max_response_length - len)) / len * penalty_factor)` is added to the score of a
    response of L tokens."""

    len: int = 0
    """Tokens at the end of `data.max_response_length` over which the penalty grows from 0 to `penalty_factor`."""

    penalty_factor: float = 1.0
    """Penalty of a response of `data.max_response_length` tokens."""


@dataclass
class RepetitionPenaltyConfig:
    """A penalty on responses that repeat themselves (`reward.repetition_penalty.*`)."""

    factor: float = 0.0
    """Penalty of a response all of whose n-grams are the same one: `factor` times the share of its n-grams of tokens
    that stood in it before is taken from the score."""

    ngram: int = 4
    """Tokens of an n-gram."""


@dataclass
class RateLimitConfig:
    """How often functions of your own may be called, counted over the whole run (`reward.rate_limit.*`). Rules are not
    counted. With a limit the reward stage is a single actor."""

    max_concurrent: int | None = None
    """Calls that may be under way at a time; null sets no limit."""

    max_per_minute: int | None = None
    """Calls that may begin in any 60 seconds; null sets no limit."""

    @property
    def used(self) -> bool:
        """Whether anything is limited."""
        return self.max_concurrent is not None or self.max_per_minute is not None


@dataclass
class RewardModelConfig:
    """A model that scores responses (`reward.model.*`); `scoring.reward_model` says where it runs."""

    path: str | None = None
    """Hugging Face sequence-classification model with one label: a local folder or a hub name. Its number is the score.
    Rules are then called only where `reward.functions` asks for them, and what functions give is added. Null: none."""

    weight: float = 1.0
    """What its number is multiplied by."""


@dataclass
class RewardConfig:
    """The stage that scores responses."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    """A reward function of your own, used for every row."""

    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Several rewards, whose weighted sum is the score: `reward.functions.NAME.KEY=value` with the keys `path`, `name`,
    `kwargs`, `weight` (1.0), `batch` (false) and `timeout_s`, as explained in docs/rewards.md. A `path` of null is the
    rule of the row's `data_source`. The score of each is kept in the column `score_NAME`."""

    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A reward model."""

    rule_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keyword arguments of rules, by `data_source`: `reward.rule_kwargs.gsm8k.method=strict`."""

    timeout_s: float = 60.0
    """Seconds that one call of a rule or function may take on the clock; it is then ended and its row counts as
    failed."""

    max_processes: int = 8
    """Most processes for plain functions that one reward task may have. It begins with one and adds another when none
    of them has become free for a while (`async def` functions share one more)."""

    num_cpus: float = 1
    """Ray CPUs of one reward task; Ray Data runs as many tasks as fit."""

    max_error_rate: float = 0.1
    """Largest share of an iteration's rows whose reward may fail; the run stops beyond it."""

    source_scale: dict[str, float] = field(default_factory=dict)
    """Factor of the score, by `data_source`; 1 for others. Training rows only, as everything below."""

    normalize: dict[str, list[float]] = field(default_factory=dict)
    """Mean and standard deviation, by `data_source`, with which the score becomes `(score - mean) / std`:
    `reward.normalize.my_source=[2.5,0.8]`. Numbers that you measured before, not running ones: see docs/rewards.md."""

    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    """DAPO's soft penalty on overlong responses."""

    length_penalty: float = 0.0
    """Taken from the score of a response of `data.max_response_length` tokens; a shorter one pays its share."""

    repetition_penalty: RepetitionPenaltyConfig = field(default_factory=RepetitionPenaltyConfig)
    """A penalty on repetition."""

    clip: list[float] | None = None
    """Lowest and highest score, `[low, high]`, held to after the penalties; null leaves scores as they are."""

    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Where the code of responses runs, for data whose rule runs it."""

    rate_limit: RateLimitConfig = field(default_factory=RateLimitConfig)
    """Limits for functions that call services."""
