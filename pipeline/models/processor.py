"""The processor of a vision-language model: the one place that turns encoded images into tokens and pixels.

Prompt stage, engine and trainer use it with the same settings, so that no two of them resize an image differently.

A chat template writes one placeholder token for each image. The processor replaces it by the expansion: one placeholder
for each feature of the image, in some families with further tokens between them.
"""

import hashlib
import importlib.util
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.config.model import ModelConfig
from pipeline.errors import short_reason

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

BY_PIXELS = ("qwen2_5_vl", "qwen3_vl")
"""Families (`model_type` in `config.json`) that give an image tokens by its number of pixels."""
FAMILIES = (*BY_PIXELS, "smolvlm")
"""Families of vision-language models that can be trained."""
WHY_NOT = {
    "gemma3": "its image tokens attend to later ones, which packed rows cannot",
    "llava": "the engine does not know the names of its weights",
}
"""Reasons why other families cannot be trained, by the beginning of `model_type`."""
PACKAGES = {"torchvision": "torchvision", "num2words": "num2words", "PIL": "pillow"}
"""Modules that processors import, and the packages that have them."""
MOST_PIXELS = 1 << 25
"""Maximum number of pixels of an encoded image; a small file can hold more than fit in memory."""
MOST_IMAGES = 64
"""Maximum number of images of a prompt, or of an episode."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of images that are read. Others may start programs, as EPS does."""
MOST_EXPANSIONS = 10_000
"""Maximum number of images whose tokens a `Vision` keeps."""
CACHED_BYTES = 256 << 20
"""Maximum size of the pixels that a `Vision` keeps, in bytes."""


class Vision:
    """The processor of a model, with the settings of a run."""

    def __init__(self, processor: Any, size: Mapping[str, int] | None = None, kept_bytes: int | None = None) -> None:
        """Store the processor.

        Args:
            processor: processor of `transformers` for images and text.
            size: entries of the image processor's `size` that replace its own.
            kept_bytes: maximum size of the pixels that are kept, in bytes; None for `CACHED_BYTES`.
        """
        self.processor = processor
        self._kept_bytes = kept_bytes
        self._processing = threading.Lock()
        self.options: dict[str, Any] = {"size": {**processor.image_processor.to_dict()["size"], **size}} if size else {}
        """Arguments of each call of the processor, here and in an engine."""
        self._expansions: dict[bytes, list[int]] = {}
        self._pixels: OrderedDict[bytes, dict[str, Tensor]] = OrderedDict()
        self._bytes = 0

    @cached_property
    def placeholder(self) -> int:
        """Id of the placeholder token."""
        return int(self.processor.tokenizer.convert_tokens_to_ids(self.processor.image_token))

    @cached_property
    def blank(self) -> bytes:
        """A small encoded image."""
        from PIL import Image

        return _png(Image.new("RGB", (64, 64)))

    def noise(self, seed: int) -> bytes:
        """Return an encoded image of 96 x 64 random pixels, always the same for a seed."""
        import numpy as np
        from PIL import Image

        return _png(Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)))

    @cached_property
    def _settings(self) -> bytes:
        settings = json.dumps([self.processor.image_processor.to_dict(), self.options], sort_keys=True, default=str)
        return hashlib.blake2b(settings.encode(), digest_size=16).digest()

    def hash(self, image: bytes) -> bytes:
        """Return a hash (16 bytes) of an encoded image and the settings of the processor."""
        return hashlib.blake2b(image, digest_size=16, key=self._settings).digest()

    def expand(self, ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Return the tokens of a prompt with the expansion of each image in place of its placeholder.

        Args:
            ids: tokens of the prompt, with one placeholder for each image.
            images: the encoded images, in order.

        Raises:
            ValueError: the number of placeholders is not the number of images, the features of two images stand next
                to each other, or an image cannot be read.
        """
        if len(images) > MOST_IMAGES:
            raise ValueError(f"there are {len(images)} images in one sequence, and at most {MOST_IMAGES} are read")
        found = sum(token == self.placeholder for token in ids)
        if found != len(images):
            raise ValueError(
                f"the chat template writes the placeholder {self.processor.image_token} {found} times for "
                f"{len(images)} images; use the chat template of the model's processor"
            )
        left = iter(images)
        expanded: list[int] = []
        for token in ids:
            if token != self.placeholder:
                expanded.append(token)
                continue
            tokens = self.expansion(next(left))
            if self.placeholder == tokens[0] and expanded[-1:] == [self.placeholder]:
                # Models would take them for one image.
                raise ValueError(
                    f"the chat template writes {self.processor.image_token} twice without a token between them; use "
                    "the chat template of the model's processor"
                )
            expanded += tokens
        return expanded

    def expansion(self, image: bytes) -> list[int]:
        """Return the tokens that stand for an encoded image in a prompt. Raises ValueError if it cannot be read."""
        name = self.hash(image)
        # Known images do not wait for the lock.
        if (found := self._expansions.get(name)) is not None:
            return found
        with self._processing:
            if name not in self._expansions:
                self._process(name, image)
            return self._expansions[name]

    def pixels(self, image: bytes) -> dict[str, "Tensor"]:
        """Return the input of the model's tower for an encoded image. Raises ValueError if it cannot be read."""
        name = self.hash(image)
        with self._processing:
            if name not in self._pixels:
                return self._process(name, image)
            self._pixels.move_to_end(name)
            return self._pixels[name]

    def describe(self, image: bytes) -> str:
        """Return the size of an encoded image and its number of tokens as text. Raises ValueError if it cannot be
        read."""
        width, height = decode(image).size
        return f"{width} x {height} pixels, {len(self.expansion(image))} tokens"

    def _process(self, name: bytes, image: bytes) -> dict[str, "Tensor"]:
        decoded = decode(image)
        try:
            made = self.processor(
                text=[self.processor.image_token],
                images=[[decoded]],
                add_special_tokens=False,
                return_tensors="pt",
                **self.options,
            )
        # Processors have limits of their own, such as on the ratio of the sides.
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
            raise ValueError(f"an image cannot be processed: {short_reason(error)}") from error
        if len(self._expansions) >= MOST_EXPANSIONS:
            # The oldest; environments may show new images without end.
            del self._expansions[next(iter(self._expansions))]
        self._expansions[name] = made["input_ids"][0].tolist()
        pixels = {key: value for key, value in made.items() if key in INPUTS}
        self._bytes += _size(pixels) - _size(self._pixels.pop(name, {}))
        self._pixels[name] = pixels
        while self._bytes > (CACHED_BYTES if self._kept_bytes is None else self._kept_bytes):
            self._bytes -= _size(self._pixels.popitem(last=False)[1])
        return pixels


INPUTS = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
"""Names of the inputs of towers among the results of a processor."""


def _png(image: "Image") -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _size(pixels: Mapping[str, "Tensor"]) -> int:
    return sum(values.nbytes for values in pixels.values())


def decode(image: bytes) -> "Image":
    """Decode an image, as RGB and upright.

    Raises:
        ValueError: the bytes are not a whole image of a known format, or it has more pixels than `MOST_PIXELS`.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(image), formats=FORMATS)
        width, height = opened.size
        if width * height <= MOST_PIXELS:
            opened.load()
            return ImageOps.exif_transpose(opened).convert("RGB")
    except UnidentifiedImageError as error:
        raise ValueError(f"an image of {len(image)} bytes cannot be decoded: it begins as no known format") from error
    # Each format has errors of its own for damaged files.
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image of {len(image)} bytes cannot be decoded: {short_reason(error)}") from error
    raise ValueError(f"an image has {width} x {height} pixels, more than {MOST_PIXELS}; scale it down")


def missing_package(family: str) -> str | None:
    """Return the name of a package that the processor of `family` needs and that is not installed; None if all are."""
    for module, package in PACKAGES.items():
        if (module != "num2words" or family == "smolvlm") and importlib.util.find_spec(module) is None:
            return package
    return None


def why_not(family: str) -> str | None:
    """Return why models of the family `family` (`model_type`) cannot be trained on images; None if they can."""
    if family in FAMILIES:
        if (package := missing_package(family)) is not None:
            return f"its processor needs the Python package {package} on every node: pip install {package}"
        return None
    reason = next((reason for name, reason in WHY_NOT.items() if family.startswith(name)), "it was not tried")
    return f"{reason}; take a model of {', '.join(FAMILIES)}"


def load_vision(model: ModelConfig, kept_bytes: int | None = None) -> Vision:
    """Load the processor of `model.path`. `kept_bytes` is as in `Vision`.

    Raises:
        ValueError: the family of the model cannot be trained on images, or the processor cannot be loaded.
    """
    from transformers import AutoConfig, AutoProcessor

    path = model.path or ""
    # Damaged files raise errors of many kinds.
    try:
        family = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code).model_type
        processor = (
            None if why_not(family) else AutoProcessor.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        )
    except Exception as error:
        raise ValueError(f"model.path={path}: the processor cannot be loaded: {short_reason(error)}") from error
    if reason := why_not(family):
        raise ValueError(f"model.path={path} is of the family {family}, which cannot be trained on images: {reason}")
    if not hasattr(processor, "image_token"):
        raise ValueError(f"model.path={path} has no processor of images; save preprocessor_config.json there")
    given = {"shortest_edge": model.min_pixels, "longest_edge": model.max_pixels}
    size = {name: number for name, number in given.items() if number is not None}
    if size and family not in BY_PIXELS:
        raise ValueError(
            f"model.min_pixels and model.max_pixels do nothing with model.path={path} of the family {family}, which "
            "sizes images by their longest edge; leave them out, and change preprocessor_config.json"
        )
    return Vision(processor, size, kept_bytes)
