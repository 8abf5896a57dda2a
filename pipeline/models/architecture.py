"""Which passes a model can take, by its configuration; nothing here loads torch."""

from collections.abc import Mapping
from typing import Any

ROPES = ("dynamic", "longrope")
"""Kinds of position embedding that depend on the longest row of a pass."""


def why_padded(config: Any) -> str | None:
    """Why a decoder cannot attend over packed rows; None if nothing in its `transformers` configuration speaks against
    it."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        return f"its layers are not all of full attention ({', '.join(sorted(kinds)) or 'sliding_window'})"
    return None


def why_whole(config: Any) -> str | None:
    """Why ranks cannot divide the positions of packed rows among them; None as in `why_padded`."""
    ropes = getattr(config, "rope_parameters", None) or {}
    # Some families have one for each kind of layer.
    kinds = [part.get("rope_type") for part in (ropes, *ropes.values()) if isinstance(part, Mapping)]
    if found := [kind for kind in kinds if kind in ROPES]:
        return f"its position embedding depends on the longest row ({found[0]}), which is not on every rank"
    return why_padded(config)
