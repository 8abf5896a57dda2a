"""Notes: sentences for the user on choices made while a model was loaded, which the loading job shows."""

from typing import Any

NAME = "load_notes"
"""Attribute of a model with its list of notes."""


def add_notes(lm: Any, *texts: str | None) -> None:
    """Add each of `texts` that is not None as a note to `lm`, to its base model and to its decoder.

    The decoder may be kept without `lm`.
    """
    notes = [*getattr(lm, NAME, ()), *filter(None, texts)]
    for part in (lm, lm.base_model, lm.get_decoder() if hasattr(lm, "get_decoder") else None):
        if part is not None:
            setattr(part, NAME, notes)


def notes_of(module: Any) -> list[str]:
    """Return the notes on the `transformers` model that `module` is or contains."""
    return next((notes for part in module.modules() if (notes := vars(part).get(NAME))), [])
