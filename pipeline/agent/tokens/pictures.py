"""The images of an episode, in its prompt and in observations."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.agent.tokens.context import Context
from pipeline.conversations import with_images
from pipeline.generation import PromptImages
from pipeline.models.processor import Vision


@dataclass(frozen=True)
class Pictures:
    """The processor of a run with images, and the images of an episode's prompt."""

    vision: Vision
    most_bytes: int
    """Maximum size of all encoded images of an episode together (`data.max_image_bytes`)."""
    prompt: Sequence[bytes] = ()
    """Encoded images of the row's prompt."""

    def written(self, messages: list[dict[str, Any]], images: Sequence[bytes], before: int) -> list[dict[str, Any]]:
        """Return messages in the form in which the chat template writes a placeholder for each image.

        Args:
            messages: messages with `<image>` in the place of each image.
            images: the encoded images.
            before: size of the episode's earlier images in bytes.

        Raises:
            ValueError: there are more or fewer marks than images, or the images are too large.
        """
        if (size := before + sum(map(len, images))) > self.most_bytes:
            raise ValueError(
                f"the episode shows {size} bytes of images, more than data.max_image_bytes={self.most_bytes}; scale "
                "them down, or raise data.max_image_bytes"
            )
        return with_images(messages, len(images), "the messages of the episode")

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


def decoded(images: Sequence[str]) -> list[bytes]:
    """Return encoded images from their texts in base64. Raises ValueError for other texts."""
    try:
        return [base64.b64decode(image, validate=True) for image in images]
    except ValueError as error:
        raise ValueError(f"an image of an observation is not in base64 ({error}); give the bytes of a file") from error
