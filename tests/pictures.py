"""Pictures, and tiny models that read them."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

VOCABULARY = 320


def picture(number: int, width: int = 60, height: int = 60, form: str = "PNG") -> bytes:
    """An encoded picture of noise."""
    pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), form)


def encoded(image: Any, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def save_tiny(folder: Path, family: str, tie: bool = True) -> None:
    """Save a tiny model of `family` with its processor."""
    from jobs.tiny import build_tokenizer, decoder_sizes
    from jobs.tiny_vision import QUESTIONS, build_vision_model, prepare_tokenizer, save_vision

    tokenizer = prepare_tokenizer(build_tokenizer(QUESTIONS, VOCABULARY), family)
    sizes = decoder_sizes(tokenizer, hidden=64, layers=2, heads=2, kv_heads=2, tie=tie)
    save_vision(folder, build_vision_model(tokenizer, family, sizes, seed=0), tokenizer, family)
