"""The values that a setting may take, declared beside its field.

    n: int = setting(1, at_least=1)
    update: str = setting("in_flight", choices=("between_chunks", "in_flight"))

`violations` compares a tree of settings with its bounds. Bounds concern one setting alone; checks of several settings
together are in `plan/checks.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """The values that one setting may take. A setting whose type includes null may also be null."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[str | None, ...] = ()
    or_value: float | None = None
    """A value outside the bounds that is allowed too, such as -1 for "no limit"."""
    infinite: bool = False
    """Whether the value may be infinite."""

    def allow(self, value: Any) -> bool:
        """Whether one value lies within the bounds."""
        if self.choices:
            return value in self.choices
        if self.or_value is not None and value == self.or_value:
            return True
        if isinstance(value, list | tuple):
            return all(self.allow(part) for part in value)
        if isinstance(value, float) and not math.isfinite(value):
            return self.infinite and value > 0
        if self.at_least is not None and value < self.at_least:
            return False
        if self.above is not None and value <= self.above:
            return False
        if self.at_most is not None and value > self.at_most:
            return False
        return self.below is None or value < self.below

    def words(self) -> str:
        """The bounds as they read behind "must be"."""
        if self.choices:
            return "one of " + ", ".join("null" if choice is None else choice for choice in self.choices)
        limits = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        parts = [f"{name} {limit:g}" for name, limit in limits.items() if limit is not None]
        text = " and ".join(parts) or "a number"
        return text if self.or_value is None else f"{text}, or {self.or_value:g}"


FINITE = Bounds()
"""The bounds of a number without other bounds."""


def setting(default: Any, **bounds: Any) -> Any:
    """A dataclass field with a default value and `Bounds`."""
    choices: Sequence[str | None] = bounds.pop("choices", ())
    declared = Bounds(choices=tuple(choices), **bounds)
    return field(default=default, metadata={"bounds": declared})


def bounds_of(owner: type, name: str) -> Bounds:
    """The bounds of the field `name` of the dataclass `owner`; `FINITE` where the field declares none."""
    fields = {item.name: item for item in dataclasses.fields(owner)}
    return fields[name].metadata.get("bounds", FINITE)


def violations(tree: Any, prefix: str = "") -> Iterator[str]:
    """One sentence per setting of the dataclass instance `tree` that lies outside its bounds.

    Args:
        tree: the settings.
        prefix: dotted name of `tree` with a trailing dot; empty for the root.
    """
    for item in dataclasses.fields(tree):
        key = prefix + item.name
        value = getattr(tree, item.name)
        if dataclasses.is_dataclass(value):
            yield from violations(value, key + ".")
            continue
        bounds = item.metadata.get("bounds", FINITE)
        if value is None or isinstance(value, bool | dict):
            if value is None and bounds.choices and None not in bounds.choices:
                yield f"{key}=null must be {bounds.words()}"
            continue
        if isinstance(value, str | list) and bounds is FINITE:
            continue
        if isinstance(value, float) and not math.isfinite(value) and not bounds.infinite:
            yield f"{key}={value} must be a finite number"
        elif not bounds.allow(value):
            shown = list(value) if isinstance(value, tuple) else value
            null = ", or null" if item.default is None and not bounds.choices else ""
            yield f"{key}={shown} must be {bounds.words()}{null}"
