"""Images in the passes of a policy: they pass through the vision tower, and their features into the decoder.

    images ─► processor ─► tower and projector ─► features [n, H] ─┐ at the prompts' placeholders
    tokens ─► embedding [1, T, H] ──────────────────────────────────┴─► decoder over packed rows

1. Features take the places of the placeholders of the prompts, by their positions. A policy may sample the placeholder
   token; in a response it is a token like any other, as in the engine.
2. Families whose positions have three axes (time, height, width) compute the axes of a prompt themselves. Responses
   continue after its largest position, as in `transformers`.
3. Responses that share a prompt share its images, which pass through the tower once.
4. A sharded tower is gathered by all ranks, so a rank without images passes a blank one through it, times 0.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from pipeline.models.attention import Layout, hidden_states
from pipeline.models.batch import TokenBatch
from pipeline.models.packing import ImageInputs
from pipeline.models.processor import Vision


class ImageReader:
    """Reads the images of prompts with the tower of a vision-language model.

    Args:
        lm: model with a decoder, and with `get_image_features` in its base model.
        vision: the model's processor.
        trained: whether tower and projector are trained; else they are frozen here.
    """

    def __init__(self, lm: Any, vision: Vision, trained: bool) -> None:
        self.lm, self.vision, self.trained = lm, vision, trained
        if not trained:
            for parameter in tower(lm):
                parameter.requires_grad_(False)

    def place(
        self, rows: TokenBatch, contexts: np.ndarray, starts: np.ndarray, lengths: np.ndarray, positions: Tensor
    ) -> tuple[ImageInputs, Tensor]:
        """Return the images of packed rows, and the positions of all tokens.

        Args:
            rows: the rows.
            contexts: [B] a context of each pack; it has the pack's prompt.
            starts: [B] first position of each pack.
            lengths: [B] number of tokens of each pack.
            positions: [1, T] int64, positions in each context.

        Returns:
            the images, and positions [3, 1, T] if the family has three axes, else `positions`.

        Raises ValueError if the placeholders of a prompt do not fit to its images.
        """
        assert rows.images is not None
        model = self.lm.base_model
        if has_axes := hasattr(model, "get_rope_index"):
            positions = positions.expand(3, *positions.shape).clone()
        places: list[Tensor] = []
        pixels: list[dict[str, Tensor]] = []
        for context, start, length in zip(contexts, starts, lengths, strict=True):
            images = rows.images[context]
            own = slice(*rows.prompt_offsets[context : context + 2])
            prompt = torch.from_numpy(rows.prompt_ids[own].astype(np.int64))
            shown = prompt == self.vision.placeholder
            self._check(int(shown.sum()), images)
            if not images:
                continue
            made = join([self.vision.pixels(image) for image in images])
            pixels.append(made)
            places.append(start + torch.nonzero(shown)[:, 0])
            if has_axes:
                kinds, end = shown.int()[None], start + len(prompt)
                axes, _ = model.get_rope_index(prompt[None], kinds, image_grid_thw=made["image_grid_thw"])
                positions[:, 0, start:end] = axes[:, 0]
                positions[:, 0, end : start + length] += int(axes.max()) + 1 - len(prompt)
        return ImageInputs(torch.cat([torch.empty(0, dtype=torch.int64), *places]), join(pixels)), positions

    def _check(self, placeholders: int, images: Sequence[bytes]) -> None:
        features = sum(self.vision.expansion(image).count(self.vision.placeholder) for image in images)
        if placeholders != features:
            raise ValueError(
                f"a prompt has {placeholders} placeholders of features and its {len(images)} images have {features}: "
                "the prompt was cut, or made with another processor or other settings of it"
            )

    def embed(self, input_ids: Tensor, images: ImageInputs | None, sharded: bool) -> dict[str, Any] | None:
        """Return the arguments of the decoder in place of `input_ids`; None without images.

        Args:
            input_ids: [B, T] int64.
            images: images of the prompts.
            sharded: whether the tower is divided over ranks; each of them must then call it.
        """
        shown = {} if images is None else images.pixels
        if not shown and not sharded:
            return None
        pixels = shown or self.vision.pixels(self.vision.blank)
        embeds = self.lm.get_input_embeddings()(input_ids)
        found, deep = self._features({name: values.to(input_ids.device) for name, values in pixels.items()})
        if images is None or not shown:
            nothing = 0 * torch.stack([part.sum() for part in (found, *deep)]).sum()
            return {"inputs_embeds": embeds + nothing.to(embeds.dtype)}
        filled = embeds.flatten(0, 1).index_copy(0, images.index, found.to(embeds.dtype))
        given: dict[str, Any] = {"inputs_embeds": filled.view_as(embeds)}
        if deep:
            mask = torch.zeros_like(input_ids, dtype=torch.bool)
            mask.view(-1)[images.index] = True
            given |= {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}
        return given

    def _features(self, pixels: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return features [n, H] of images, and features that further layers of the decoder add, each [n, H]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trained):
            output = self.lm.base_model.get_image_features(**pixels, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or []
        return _flat(output.pooler_output), [_flat(part) for part in deep]


def read(
    module: Any,
    input_ids: Tensor,
    index: Tensor,
    positions: Tensor | None,
    packing: Layout | None,
    images: ImageInputs | None,
) -> Tensor:
    """[N, H] last hidden states of the decoder of `module`, which reads text, or images too.

    Args:
        module: has a `decoder` and an `image_reader`, None for text.
        input_ids, index, positions, packing: as in `hidden_states`.
        images: images of the prompts, if packed; None for text.
    """
    reader: ImageReader | None = module.image_reader
    given = None if reader is None else reader.embed(input_ids, images, sharded=isinstance(module, FSDPModule))
    return hidden_states(module.decoder, input_ids, index, positions, packing, given)


def _flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    """[n, H] from features [images, n per image, H], or from a list of each image's features."""
    return features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat([*features])


def join(pixels: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the tower's inputs for several images; {} without any.

    Patches and grids [n, ...] are put end to end. Tiles [1, n, C, H, W] of a family with tiles are, too.
    """
    names = pixels[0] if pixels else ()
    by_tiles = "image_grid_thw" not in names
    return {name: torch.cat([one[name] for one in pixels], 1 if by_tiles else 0) for name in names}


def tower(lm: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of tower and projector: all outside of decoder and head."""
    others = [lm.get_decoder(), lm.get_output_embeddings()]
    known = {id(parameter) for part in others for parameter in part.parameters()}
    return [parameter for parameter in lm.parameters() if id(parameter) not in known]
