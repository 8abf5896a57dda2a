"""Bounds of settings, declared with their fields.

    n: int = setting(1, at_least=1)
    update: str = setting("in_flight", choices=("between_chunks", "in_flight"))

`violations` compares each setting with its bounds. `sentences` reads tables of settings that exclude each other. The
method `problems` of a section returns the table for settings of that section; `plan/checks.py` has the tables for
settings of several sections.
"""

import copy
import dataclasses
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.renamed import VALUES
from pipeline.config.schema import value_of

_KEY = re.compile(r"\{([a-z_]+(?:\.[a-z_]+)+)(:key)?\}")


@dataclass(frozen=True)
class Bounds:
    """Values that one setting may have. A setting with a type such as `int | None` may also be null."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[str | None, ...] = ()
    or_value: float | None = None
    """One more allowed value outside the bounds, such as -1 for "no limit"."""
    infinite: bool = False
    """True if the value may be infinite."""

    def allow(self, value: Any) -> bool:
        """Return True if the value lies within the bounds."""
        if self.choices:
            return value in self.choices
        if self.or_value is not None and value == self.or_value:
            return True
        if isinstance(value, list | tuple):
            return all(self.allow(part) for part in value)
        if isinstance(value, float) and not math.isfinite(value):
            return self.infinite and value > 0
        return all(compare(value, limit) for _, limit, compare in self._limits())

    def words(self) -> str:
        """Return the bounds as text that fits after "must be", such as "at least 0 and below 1"."""
        if self.choices:
            return "one of " + ", ".join("null" if choice is None else choice for choice in self.choices)
        text = " and ".join(f"{name} {limit:g}" for name, limit, _ in self._limits()) or "a number"
        return text if self.or_value is None else f"{text}, or {self.or_value:g}"

    def _limits(self) -> list[tuple[str, float, Callable[[Any, Any], bool]]]:
        limits = (
            ("at least", self.at_least, operator.ge),
            ("above", self.above, operator.gt),
            ("at most", self.at_most, operator.le),
            ("below", self.below, operator.lt),
        )
        return [(name, limit, compare) for name, limit, compare in limits if limit is not None]


FINITE = Bounds()
"""Bounds of a number without other bounds."""


def setting(default: Any, path: str | None = None, **bounds: Any) -> Any:
    """Declare a dataclass field with a default value and `Bounds`.

    Args:
        default: the default value; a list or a mapping is copied for each instance.
        path: kind of path that the setting holds (a key of `places.KINDS`); None if it holds none.
        bounds: fields of `Bounds`, such as `at_least=1`.
    """
    metadata = ({"bounds": Bounds(**bounds)} if bounds else {}) | ({"path": path} if path else {})
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def bounds_of(owner: type, name: str) -> Bounds:
    """Return the bounds of the field `name` of the dataclass `owner`; `FINITE` if it declares none."""
    fields = {item.name: item for item in dataclasses.fields(owner)}
    return fields[name].metadata.get("bounds", FINITE)


def violations(tree: Any, prefix: str = "", spelled: Callable[[str], str] = str) -> Iterator[str]:
    """Yield one sentence for each setting of the dataclass instance `tree` that lies outside its bounds.

    Args:
        tree: the settings.
        prefix: dotted name of `tree` with a trailing dot; empty for the root.
        spelled: function from a key to its name in the sentence; see `AgentConfig.spelling`.
    """
    for item in dataclasses.fields(tree):
        key = spelled(prefix + item.name)
        value = getattr(tree, item.name)
        if dataclasses.is_dataclass(value):
            yield from violations(value, f"{prefix}{item.name}.", spelled)
            continue
        bounds = item.metadata.get("bounds", FINITE)
        if isinstance(value, bool | dict) or (value is None and not bounds.choices):
            continue
        if isinstance(value, str | list) and bounds is FINITE:
            continue
        if isinstance(value, float) and not math.isfinite(value) and not bounds.infinite:
            yield f"{key}={value} must be a finite number"
        elif isinstance(item.default, tuple) and len(value) != len(item.default):
            yield f"{key}={as_argument(value)} must be {len(item.default)} numbers"
        elif not bounds.allow(value):
            null = ", or null" if item.default is None and not bounds.choices else ""
            _, removed = VALUES.get(prefix + item.name, {}).get(value, ("", "")) if isinstance(value, str) else ("", "")
            why = f"; {value} no longer exists: {removed}" if removed else ""
            yield f"{key}={as_argument(value)} must be {bounds.words()}{null}{why}"


def sentences(config: Any, table: Mapping[str, object], spelled: Callable[[str], str] = str) -> Iterator[str]:
    """Return the sentences of `table` with a true value, and fill in their settings.

    `{rollout.n}` in a sentence becomes key and value, `rollout.n=8`; `{rollout.n:key}` becomes `rollout.n`.

    Args:
        config: the settings, from the root.
        table: sentence to whether it applies.
        spelled: function from a key to its name in the sentence; see `AgentConfig.spelling`.
    """

    def filled(match: re.Match[str]) -> str:
        key = spelled(match[1])
        try:
            return key if match[2] else f"{key}={as_argument(value_of(config, match[1]))}"
        except AttributeError:
            # Braces in the user's own text.
            return match[0]

    return (_KEY.sub(filled, sentence) for sentence, applies in table.items() if applies)


def as_argument(value: Any) -> str:
    """Format a value like the right side of a `key=value` argument: `null`, `true`, `0.5`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(list(value) if isinstance(value, tuple) else value)
