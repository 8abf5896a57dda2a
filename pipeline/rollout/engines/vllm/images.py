"""Images of prompts in vLLM.

1. vLLM expands placeholders itself, so it gets prompts with one placeholder for each image. The expanded prompt is
   compared with the one that the trainer reads.
2. An image is named by its hash, so that the processor runs once per image and engine.
3. The fused normalisation of pixels is a buffer that is in no checkpoint and that no update fills. It is right only if
   the engine has read its weights from the disk once (`engine_args`).
"""

import functools
from typing import TYPE_CHECKING, Any

from pipeline.config.model import ModelConfig
from pipeline.errors import FinalError
from pipeline.generation import EngineRequest
from pipeline.models.processor import MOST_IMAGES, decode, load_vision

if TYPE_CHECKING:
    from PIL.Image import Image


def engine_args(model: ModelConfig) -> dict[str, Any]:
    """Return vLLM's arguments for a model that reads images; {} for a run with text only."""
    if model.vision == "none":
        return {}
    return {
        "load_format": "hf",
        "limit_mm_per_prompt": {"image": MOST_IMAGES, "video": 0},
        "mm_processor_kwargs": load_vision(model).options,
    }


# The samples of a prompt come one after another.
@functools.lru_cache(maxsize=2)
def _decoded(images: tuple[bytes, ...]) -> "list[Image]":
    return [decode(image) for image in images]


def prompt_of(llm: Any, request: EngineRequest, cache_salt: str) -> Any:
    """Return vLLM's form of a request's prompt with images.

    Args:
        llm: vLLM's engine.
        request: the request.
        cache_salt: salt of the prefix cache.

    Raises:
        ValueError: an image cannot be decoded.
        FinalError: vLLM expands a placeholder to other tokens than the processor of the run.
    """
    images = request.images
    assert images is not None
    prompt = {
        "prompt_token_ids": images.prompt_ids,
        "multi_modal_data": {"image": _decoded(images.encoded)},
        "multi_modal_uuids": {"image": [name.hex() for name in images.hashes]},
        "cache_salt": cache_salt,
    }
    made = llm.renderer.render_cmpl([prompt])[0]
    found = list(made["prompt_token_ids"])
    if found != request.prompt_ids:
        raise FinalError(
            f"vLLM expands the {len(images.encoded)} images of a prompt to other tokens than the processor of "
            f"model.path ({len(found)} tokens in all, not {len(request.prompt_ids)}), so it would not read the trained "
            "prompt; leave rollout.engine_kwargs.mm_processor_kwargs out, and use the versions that requirements/ names"
        )
    return made
