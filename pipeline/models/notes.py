"""Notes on the choices made while a model was loaded, which the job that loads it shows its user."""

from typing import Any

NAME = "load_notes"
"""Attribute of a model."""


def add_notes(lm: Any, *texts: str | None) -> None:
    """Add the texts that are not None to a model of `transformers`, and to its decoder, which may outlive it."""
    notes = [*getattr(lm, NAME, ()), *filter(None, texts)]
    for part in (lm, lm.base_model, lm.get_decoder() if hasattr(lm, "get_decoder") else None):
        if part is not None:
            setattr(part, NAME, notes)


def notes_of(module: Any) -> list[str]:
    """Return the notes on the model in `module`."""
    return next((notes for part in module.modules() if (notes := vars(part).get(NAME))), [])
