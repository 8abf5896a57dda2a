"""The cursor: a position in the sequence of training prompts, from which a restarted prompt source or a resumed run
continues."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class PromptCursor:
    """A position in the sequence of training prompts. `progress.json` of a checkpoint holds it as JSON."""

    epoch: int = 0
    """Number of the epoch (pass over the files), from 0."""
    offset: int = 0
    """Number of prompts of this epoch before the position."""
    orders: dict[str, Any] = field(default_factory=dict)
    """Data source to the position in its own order; empty unless sources are mixed by weight."""
    sampler: dict[str, Any] = field(default_factory=dict)
    """State of `data.sampler`."""
    generator: dict[str, Any] = field(default_factory=dict)
    """State of `data.generator`."""
    learnt: int = 0
    """Number of the last iteration whose outcomes were given to the sampler and the generator."""
    batch: int = 1
    """Number of the batch that begins at the position, counted over the whole run from 1."""
    skip: int = 0
    """Number of prompts of this batch that are used already; only with dynamic sampling."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        default = PromptCursor()
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(default, name)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "PromptCursor":
        """Parse the result of `to_json`."""
        return cls(**values)
