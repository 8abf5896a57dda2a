"""Where the prompts of a batch begin: all that a restarted prompt source or a resumed run needs to go on."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class PromptCursor:
    """A place in the training prompts. `progress.json` of a checkpoint holds it as JSON."""

    epoch: int = 0
    """Pass over the files, from 0."""
    offset: int = 0
    """Prompts of that pass that lie before the place."""
    orders: dict[str, Any] = field(default_factory=dict)
    """Places in the orders of data sources that are mixed by weight, by source."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """State of `data.sampler`."""
    generator: dict[str, Any] = field(default_factory=dict)
    """State of `data.generator`."""
    learnt: int = 0
    """Last iteration whose outcomes the sampler and the generator know."""
    batch: int = 1
    """Number of the run's batch that begins here, from 1."""
    skip: int = 0
    """Prompts of that batch that are used up; only with dynamic sampling."""

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        default = PromptCursor()
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(default, name)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "PromptCursor":
        """The cursor that `to_json` wrote."""
        return cls(**values)
