"""The state of a conversion: the settings of verl, our settings, and the changes that a rule can make."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobs.verl.keys import RENAMED
from jobs.verl.launch import Setting
from pipeline.config import Config
from pipeline.config.schema import expected, keys
from pipeline.config.scoring import ScorerConfig
from pipeline.derived import scorers

OURS = keys(Config)
"""Our keys."""

_TARGETS = dict(RENAMED)
_NAMES = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir")


@dataclass(frozen=True)
class Left:
    """A key of verl that is not converted."""

    key: str
    text: str
    reason: str
    cannot: bool = False
    """True if the run means something else without it; else only speed, memory or a name is lost."""


class State:
    """A conversion: settings of verl, and our settings so far."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self.settings = settings
        self.given = {key: setting.value for key, setting in settings.items() if setting.problem is None}
        """Values of verl's keys, as far as they are known."""
        self.values: dict[str, Any] = {}
        """Our settings by key."""
        self.defaults: set[str] = set()
        """Our keys that hold a default of verl's, because it differs from our default."""
        self.reasons: dict[str, tuple[str, bool]] = {}
        """Keys of verl that are not converted, each with its reason and True if its loss changes the run."""
        self.also: set[str] = set()
        """Keys of verl that a rule has converted, and that no table names."""
        self.converted: list[str] = []
        """verl's keys that were converted, once all rules were applied."""
        self.left: list[Left] = []
        """verl's keys that were not converted."""
        self.cannot: list[str] = []
        """Sentences about settings that are lost, and that have no key."""
        self.notes: list[str] = []
        """Sentences about settings that mean something else here."""
        for key, setting in settings.items():
            if setting.problem:
                advice = f"; give {_TARGETS[key]}" if key in _TARGETS else ""
                self.reasons[key] = setting.problem + advice, key not in _NAMES
        self._schema = OmegaConf.structured(Config)

    def get(self, ours: str) -> Any:
        """Return the value of one of our keys so far, or its default."""
        return self.values.get(ours, OURS[ours].default)

    def set(self, ours: str, value: Any) -> None:
        """Give one of our keys a value, unless it has that already."""
        if value != self.get(ours):
            self.values[ours] = value
            self.defaults.discard(ours)

    def drop(self, *names: str) -> None:
        """Leave our keys at their defaults."""
        for ours in names:
            self.values.pop(ours, None)
            self.defaults.discard(ours)

    def leave(self, key: str, reason: str, cannot: bool = False) -> None:
        """Say why a key of verl is not converted, if it is given."""
        if key in self.given:
            self.reasons[key] = reason, cannot

    def whole(self, key: str, default: int) -> int:
        """Return the whole number, at least 0, that verl is given for `key`, or `default`."""
        value = self.given.get(key)
        if value is None or (type(value) is int and value >= 0):
            return default if value is None else value
        self.leave(key, f"its value is not a whole number; {default} is assumed", cannot=True)
        return default

    def take(self, key: str, ours: str, value: Any) -> None:
        """Give our key the value of verl's `key` if it has the right type; else the key is left."""
        try:
            OmegaConf.update(self._schema, ours, value, merge=False)
            fitted = OmegaConf.select(self._schema, ours)
        except OmegaConfBaseException:
            self.leave(key, f"its value does not fit {ours}: expected {expected(OURS[ours].type)}", cannot=True)
            return
        self.values[ours] = OmegaConf.to_container(fitted) if OmegaConf.is_config(fitted) else fitted

    @property
    def scorers(self) -> dict[str, ScorerConfig]:
        """The scoring pools of the run; none if the advantage estimator is not known here."""
        config = Config()
        config.algorithm.adv_estimator = self.get("algorithm.adv_estimator")
        config.algorithm.use_kl_in_reward = self.get("algorithm.use_kl_in_reward")
        config.actor.use_kl_loss = self.get("actor.use_kl_loss")
        config.critic.enable = self.get("critic.enable")
        config.model.lora.rank = self.get("model.lora.rank")
        config.scoring.reference.placement = self.get("scoring.reference.placement")
        try:
            return scorers(config)
        except ValueError:
            return {}
