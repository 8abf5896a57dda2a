"""Which passes a model can take, by its configuration; nothing here loads torch."""

from typing import Any


def why_padded(config: Any) -> str | None:
    """Why a decoder cannot attend over packed rows; None if nothing in its `transformers` configuration speaks against
    it."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        return f"its layers are not all of full attention ({', '.join(sorted(kinds)) or 'sliding_window'})"
    return None
