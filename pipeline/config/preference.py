"""Settings of `python -m jobs.dpo`."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting
from pipeline.config.learner import OptimConfig
from pipeline.config.supervised import PairDataConfig, SFTTrainerConfig, SupervisedConfig

BUILT_IN_LOSSES = ("sigmoid", "ipo")
"""Values of `loss.type` that `pipeline.losses.preference` registers."""
REMOVED_LOSSES = ("hinge", "kto")


def _optim() -> OptimConfig:
    return OptimConfig(lr=1e-6, lr_scheduler_type="cosine", lr_warmup_steps_ratio=0.1, min_lr_ratio=0.1)


@dataclass
class PreferenceLossConfig:
    """Preference loss. The implicit reward of a response is `beta` times its log ratio of policy and start model."""

    type: str = setting("sigmoid", path="code")
    """Loss: `sigmoid` (DPO), `ipo`, or a function of your own as `package.module:function`
    ([supervised.md](supervised.md#dpo-and-ipo))."""

    beta: float = setting(0.1, above=0)
    """Factor of the log ratio in the implicit reward. A larger one keeps the policy closer to the start model."""

    label_smoothing: float = setting(0.0, at_least=0, below=0.5)
    """Fraction of pairs that `sigmoid` assumes to have `chosen` and `rejected` swapped (cDPO)."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a loss of your own."""


@dataclass
class DPODataConfig(PairDataConfig):
    """Data of preference pairs for DPO: files, columns and limits."""

    truncation: str = setting("error", choices=("error", "left", "drop"))
    """Treatment of a conversation longer than `max_length`: `error` ends the run, `left` cuts the start of the prompt,
    `drop` leaves the pair out and counts it."""


@dataclass
class DPOConfig(SupervisedConfig):
    """Settings of preference learning (`python -m jobs.dpo`)."""

    optim: OptimConfig = field(default_factory=_optim)
    """Optimiser and schedule."""

    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)

    data: DPODataConfig = field(default_factory=DPODataConfig)

    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)

    def problems(self) -> dict[str, object]:
        """Return sentences on settings that exclude each other, each with a true value if it applies."""
        loss = self.loss
        built_in = loss.type in BUILT_IN_LOSSES
        return super().problems() | {
            "{loss.type} was removed; take sigmoid or ipo, or write the loss as package.module:function": (
                loss.type in REMOVED_LOSSES
            ),
            "{loss.label_smoothing} is an option of loss.type=sigmoid only; set it to 0 with {loss.type}": (
                built_in and loss.label_smoothing > 0 and loss.type != "sigmoid"
            ),
            "{loss.kwargs}: no built-in loss reads it; leave it out, or name a loss of your own": (
                built_in and loss.kwargs
            ),
        }
