"""The images of an episode, in its prompt and in observations."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.agent.tokens.context import Context
from pipeline.conversations import with_images
from pipeline.generation import PromptImages
from pipeline.models.processor import MOST_IMAGES, Vision

Source = tuple[Sequence[dict[str, Any]], Sequence[bytes]]
"""Messages, and the encoded images for which `<image>` stands in them; without images it is plain text."""


@dataclass(frozen=True)
class Pictures:
    """The processor of a run with images, and the images of an episode's prompt."""

    vision: Vision
    most_bytes: int
    """Maximum size of all encoded images of an episode together (`data.max_image_bytes`)."""
    prompt: Sequence[bytes] = ()
    """Encoded images of the row's prompt."""

    def check(self, before: Sequence[bytes], images: Sequence[bytes]) -> None:
        """Raise ValueError if `images` after the images `before` are too many or too large."""
        count, size = len(before) + len(images), sum(map(len, (*before, *images)))
        if count > MOST_IMAGES:
            raise ValueError(f"the episode shows {count} images, and at most {MOST_IMAGES} are read")
        if size > self.most_bytes:
            raise ValueError(
                f"the episode shows {size} bytes of images, more than data.max_image_bytes={self.most_bytes}; scale "
                "them down, or raise data.max_image_bytes"
            )

    async def prepare(self, before: Sequence[bytes], images: Sequence[bytes]) -> None:
        """Compute the tokens of images, in a thread, so that other episodes go on.

        Raises ValueError as `check` does, and for an image that cannot be read.
        """
        self.check(before, images)
        for image in images:
            await asyncio.to_thread(self.vision.expansion, image)

    def of(self, context: Context) -> PromptImages | None:
        """Return the images of a context as a request needs them; None for a context with text only."""
        if not context.images:
            return None
        assert context.sent is not None
        return PromptImages(tuple(context.images), tuple(context.image_hashes), list(context.sent))

    def show(self, context: Context, images: Sequence[bytes]) -> None:
        """Add images to a context."""
        context.images += images
        context.image_hashes += map(self.vision.hash, images)

    def was_sampled(self, ids: Sequence[int]) -> bool:
        """Return True if the placeholder of images is in a turn of the policy."""
        return self.vision.placeholder in ids


def written(sources: Sequence[Source]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return all messages as a chat template reads them, with a part in place of each image, and all images.

    Raises ValueError if the messages of a source have more or fewer marks than images.
    """
    messages: list[dict[str, Any]] = []
    images: list[bytes] = []
    for part, shown in sources:
        messages += with_images(list(part), len(shown), "the messages of the episode")
        images += shown
    return messages, images


def decoded(images: Sequence[str]) -> list[bytes]:
    """Return encoded images from their texts in base64. Raises ValueError for other texts."""
    try:
        return [base64.b64decode(image, validate=True) for image in images]
    except ValueError as error:
        raise ValueError(f"an image of an observation is not in base64 ({error}); give the bytes of a file") from error
