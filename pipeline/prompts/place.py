"""Places in the prompts as checkpoints name them: epoch, offset, and more by name, as JSON can hold it."""

from collections.abc import Sequence
from typing import Any


def with_more(place: Sequence[Any], **more: Any) -> tuple[Any, ...]:
    """`place`, with more by name."""
    epoch, offset, *rest = place
    return epoch, offset, (rest[0] if rest else {}) | more


def without(place: Sequence[Any], *names: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`place` without what `with_more` gave it by these names, and that, as far as there is any."""
    epoch, offset, *rest = place
    more = dict(rest[0]) if rest else {}
    taken = {name: more.pop(name) for name in names if name in more}
    return ((epoch, offset, more) if more else (epoch, offset)), taken
