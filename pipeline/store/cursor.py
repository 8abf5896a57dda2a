"""The cursor: a place in the training prompts, with all that a restarted prompt source or a resumed run needs."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class PromptCursor:
    """A place in the training prompts. `progress.json` of a checkpoint holds it as JSON."""

    epoch: int = 0
    """Pass over the files, from 0."""
    offset: int = 0
    """Number of prompts of that pass before the place."""
    orders: dict[str, Any] = field(default_factory=dict)
    """By data source, the place in its order; empty unless sources are mixed by weight."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """State of `data.sampler`."""
    generator: dict[str, Any] = field(default_factory=dict)
    """State of `data.generator`."""
    learnt: int = 0
    """Last iteration whose outcomes the sampler and the generator know."""
    batch: int = 1
    """Number of the batch that begins here, counted over the whole run from 1."""
    skip: int = 0
    """Number of prompts of that batch that are already used; only with dynamic sampling."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        default = PromptCursor()
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(default, name)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "PromptCursor":
        """Parse the result of `to_json`."""
        return cls(**values)
