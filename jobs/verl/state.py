"""A conversion on its way: what verl is given, what has become of it, and how a rule changes that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobs.verl.settings import Setting
from pipeline.config import Config, expected, keys
from pipeline.scoring.config import ScorerConfig
from pipeline.stages import scorers

OURS = keys(Config)
"""Our keys."""

GPUS_PER_NODE, NODES = 8, 1
"""verl's defaults."""


@dataclass(frozen=True)
class Left:
    """A key of verl that is not converted."""

    key: str
    text: str
    reason: str


@dataclass
class Conversion:
    """What became of verl's settings."""

    values: dict[str, Any] = field(default_factory=dict)
    """Our keys."""
    defaults: set[str] = field(default_factory=set)
    """Those of them that verl was not given: its defaults, where ours differ."""
    converted: list[str] = field(default_factory=list)
    """verl's keys that were converted."""
    left: list[Left] = field(default_factory=list)
    """verl's keys that were not."""
    notes: list[str] = field(default_factory=list)
    """What means something else here."""


class State:
    """What the rules read and write."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self.settings = settings
        self.given = {key: setting.value for key, setting in settings.items() if setting.problem is None}
        """Values of verl's keys, as far as they are known."""
        self.values: dict[str, Any] = {}
        """Our keys so far."""
        self.defaults: set[str] = set()
        self.notes: list[str] = []
        self.reasons = {key: setting.problem for key, setting in settings.items() if setting.problem}
        """Why keys of verl are not converted."""
        self._schema = OmegaConf.structured(Config)

    def get(self, ours: str) -> Any:
        """The value of one of our keys as it stands, or its default."""
        return self.values.get(ours, OURS[ours].default)

    def set(self, ours: str, value: Any) -> None:
        """Give one of our keys a value, unless it has that already."""
        if value != self.get(ours):
            self.values[ours] = value
            self.defaults.discard(ours)

    def drop(self, ours: str) -> None:
        """Leave one of our keys at its default."""
        self.values.pop(ours, None)
        self.defaults.discard(ours)

    def note(self, text: str) -> None:
        """Say what means something else here."""
        self.notes.append(text)

    def leave(self, key: str, reason: str) -> None:
        """Say why a key of verl is not converted, if it is given."""
        if key in self.given:
            self.reasons[key] = reason

    def whole(self, key: str, default: int | None = None) -> int | None:
        """The whole number from 0 on that verl is given for `key`, or `default`."""
        value = self.given.get(key)
        if value is None:
            return default
        if type(value) is not int or value < 0:
            self.leave(key, "its value is not a whole number")
            return default
        return value

    def take(self, key: str, ours: str, value: Any) -> None:
        """Give our key the value of verl's `key` if it has the right type; else the key is left."""
        kind = OURS[ours].type
        try:
            if "${" in str(value):
                # An environment variable, which is text, and is looked up where the run starts.
                if kind not in (str, str | None, Any):
                    raise OmegaConfBaseException
                self.values[ours] = value
                return
            OmegaConf.update(self._schema, ours, value, merge=False)
            fitted = OmegaConf.select(self._schema, ours)
        except OmegaConfBaseException:
            self.leave(key, f"its value does not fit {ours}: expected {expected(kind)}")
            return
        self.values[ours] = OmegaConf.to_container(fitted) if OmegaConf.is_config(fitted) else fitted

    @property
    def scorers(self) -> dict[str, ScorerConfig]:
        """The scoring pools that the run has; none where the advantage estimator is not known here."""
        config = Config()
        config.algorithm.adv_estimator = self.get("algorithm.adv_estimator")
        config.algorithm.use_kl_in_reward = self.get("algorithm.use_kl_in_reward")
        config.actor.use_kl_loss = self.get("actor.use_kl_loss")
        config.critic.enable = self.get("critic.enable")
        try:
            return scorers(config)
        except ValueError:
            return {}

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained."""
        return "value" in self.scorers

    @property
    def gpus(self) -> int:
        """verl's GPUs on all nodes."""
        per_node = self.whole("trainer.n_gpus_per_node", GPUS_PER_NODE)
        nodes = self.whole("trainer.nnodes", NODES)
        return (per_node or 0) * (nodes or 0)

    @property
    def steps_per_iteration(self) -> dict[str, int]:
        """Optimiser steps that actor and critic make in one iteration."""
        steps = {}
        batch = self.get("data.train_batch_size")
        for learner in ("actor", "critic"):
            mini = self.get(f"{learner}.ppo_mini_batch_size") or self.get("actor.ppo_mini_batch_size") or batch
            epochs = self.get(f"{learner}.ppo_epochs") or self.get("actor.ppo_epochs")
            steps[learner] = max(1, batch // max(mini, 1)) * epochs
        return steps
