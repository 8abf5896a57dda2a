"""Settings of `python -m jobs.dpo`."""

from dataclasses import dataclass, field
from typing import Any

from pipeline.config.bounds import setting
from pipeline.config.learner import OptimConfig
from pipeline.config.supervised import PreferenceDataConfig, SFTTrainerConfig, SupervisedConfig

MARGIN_LOSSES = ("sigmoid", "hinge")
"""Built-in losses that read the margin of a pair."""
BUILT_IN_LOSSES = (*MARGIN_LOSSES, "ipo", "kto")
"""Names of `loss.type` that are registered in `pipeline.losses.preference`."""


def _optim() -> OptimConfig:
    return OptimConfig(lr=1e-6, lr_scheduler_type="cosine", lr_warmup_steps_ratio=0.1, min_lr_ratio=0.1)


@dataclass
class PreferenceLossConfig:
    """How preferences become a loss. Rewards are `beta` times the log ratio of policy and start model."""

    type: str = setting("sigmoid", path="code")
    """`sigmoid` (DPO), `hinge` (SLiC), `ipo`, `kto`, or a loss of your own as `package.module:function`
    ([algorithms.md](algorithms.md#preference-learning))."""

    beta: float = setting(0.1, above=0)
    """Scale of the rewards: how strongly the policy is held to the start model."""

    label_smoothing: float = setting(0.0, at_least=0, below=0.5)
    """`sigmoid`: share of pairs that are taken to be labelled the wrong way round (cDPO)."""

    rpo_alpha: float = setting(0.0, at_least=0)
    """Weight of an SFT term beside the loss of pairs: the mean negative log-prob per token of the chosen answers."""

    desirable_weight: float = setting(1.0, above=0)
    """`kto`: weight of the good answers."""

    undesirable_weight: float = setting(1.0, above=0)
    """`kto`: weight of the bad answers."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of a loss of your own."""


@dataclass
class DPODataConfig(PreferenceDataConfig):
    """The preferences to learn from."""

    completion_key: str = "completion"
    """`kto`: column that holds one answer, like `chosen_key`. Files without it hold pairs, whose sides are a good and
    a bad answer."""

    label_key: str = "label"
    """`kto`: column that says whether the answer of `completion_key` is good: true or false, or 1 or 0."""

    margin_key: str | None = None
    """Column of numbers: by how much the reward of the preferred side should exceed the other's (`sigmoid`, `hinge`).
    Null: 0."""

    truncation: str = setting("error", choices=("error", "left", "drop"))
    """A longer conversation is an error (`error`), loses the beginning of its prompt (`left`), or makes its row be left
    out and counted (`drop`)."""


@dataclass
class DPOConfig(SupervisedConfig):
    """Settings of preference learning (`python -m jobs.dpo`)."""

    optim: OptimConfig = field(default_factory=_optim)
    """Optimiser and schedule."""

    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)

    data: DPODataConfig = field(default_factory=DPODataConfig)

    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)

    def problems(self) -> dict[str, object]:
        """Sentences on settings that exclude each other, and whether each applies (see `sentences`)."""
        loss, data = self.loss, self.data
        built_in = loss.type in BUILT_IN_LOSSES
        kto = loss.type == "kto"
        return {
            "{loss.label_smoothing} is of loss.type=sigmoid alone; set it to 0 with {loss.type}": (
                built_in and loss.label_smoothing > 0 and loss.type != "sigmoid"
            ),
            "{data.margin_key} with {loss.type}, which reads no margin; set it to null, or take loss.type=sigmoid": (
                built_in and data.margin_key is not None and loss.type not in MARGIN_LOSSES
            ),
            "{loss.rpo_alpha} weighs an SFT term over the chosen sides of pairs, and {loss.type} reads single answers; "
            "set it to 0": kto and loss.rpo_alpha > 0,
            "{loss.desirable_weight} and {loss.undesirable_weight} are of loss.type=kto alone; set both to 1 with "
            "{loss.type}": built_in and not kto and (loss.desirable_weight != 1 or loss.undesirable_weight != 1),
            "{loss.kwargs}: no built-in loss reads it; leave it out, or name a loss of your own": (
                built_in and loss.kwargs
            ),
            "{data.prompt_key} with loss.type=kto, which sets answers behind the prompts of other rows; name the "
            "column of the prompt": kto and not data.prompt_key,
        }
