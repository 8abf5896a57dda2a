"""Images in the passes of a policy: they pass through the vision tower, and their features into the decoder.

    images ─► processor ─► tower and projector ─► features [n, H] ─┐ at the prompts' placeholders
    tokens ─► embedding [1, T, H] ──────────────────────────────────┴─► decoder over packed rows

1. Features take the places of the first placeholders of a context, by their positions. A policy may sample the
   placeholder token; after all images it is a token like any other, as in the engine. Images in a response are in
   observations of an episode, before its last turn.
2. Families whose positions have three axes (time, height, width) compute the axes of a context with images themselves.
   Text continues after the largest position before it, as in `transformers`.
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

MISFIT = "the row was cut, or made with another processor or other settings of it"
"""Reasons why images and tokens of a row do not fit to each other."""


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
        self,
        rows: TokenBatch,
        packs: Sequence[Sequence[int]],
        starts: np.ndarray,
        response_starts: np.ndarray,
        fed: np.ndarray,
        positions: Tensor,
    ) -> tuple[ImageInputs, Tensor]:
        """Return the images of packed rows, and the positions of all tokens.

        Args:
            rows: the rows.
            packs: context numbers of each pack; the contexts of a pack have the same prompt with the same images.
            starts: [B] first position of each pack.
            response_starts: [C] first position of each context's response, in the order of the packs.
            fed: [C] number of each response's tokens that are in the sequence.
            positions: [1, T] int64, positions in each context.

        Returns:
            the images, and positions [3, 1, T] if the family has three axes, else `positions`.

        Raises ValueError if the placeholders of a context do not fit to its images.
        """
        assert rows.images is not None
        model = self.lm.base_model
        if has_axes := hasattr(model, "get_rope_index"):
            positions = positions.expand(3, *positions.shape).clone()
        places: list[np.ndarray] = []
        shown: list[bytes] = []

        def axes(tokens: np.ndarray, found: np.ndarray, images: Sequence[bytes]) -> Tensor:
            """[3, tokens] positions of a prompt, or of a prompt and its response."""
            kinds = torch.zeros(1, len(tokens), dtype=torch.int32)
            kinds[0, found] = 1
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            grids = join([self.vision.pixels(image) for image in images])["image_grid_thw"]
            made: Tensor = model.get_rope_index(ids, kinds, image_grid_thw=grids)[0][:, 0]
            return made

        contexts = zip(response_starts.tolist(), fed.tolist(), strict=True)
        for members, start in zip(packs, starts.tolist(), strict=True):
            prompt = rows.prompt_ids[slice(*rows.prompt_offsets[members[0] : members[0] + 2])]
            own, found = self._in_prompt(prompt, rows.images[members[0]])
            places.append(start + found)
            shown += own
            end = len(prompt)
            if has_axes and own:
                made = axes(prompt, found, own)
                positions[:, 0, start : start + len(prompt)] = made
                end = int(made.max()) + 1
            for context in members:
                place, count = next(contexts)
                further = rows.images[context][len(own) :]
                if has_axes and own:
                    positions[:, 0, place : place + count] += end - len(prompt)
                if not further:
                    continue
                begin = int(rows.response_offsets[context])
                response = rows.response_ids[begin : begin + count]
                later = self._located(response, further)
                places.append(place + later)
                shown += further
                if has_axes:
                    both = np.concatenate([found, len(prompt) + later])
                    made = axes(np.concatenate([prompt, response]), both, [*own, *further])
                    positions[:, 0, place : place + count] = made[:, len(prompt) :]
        index = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *places]))
        return ImageInputs(index, join([self.vision.pixels(image) for image in shown])), positions

    def _in_prompt(self, prompt: np.ndarray, images: Sequence[bytes]) -> tuple[list[bytes], np.ndarray]:
        """Return the first images, which are a prompt's, and the indices of their features in it."""
        left = int((prompt == self.vision.placeholder).sum())
        own: list[bytes] = []
        for image in images if left else ():
            own.append(image)
            left -= self.vision.expansion(image).count(self.vision.placeholder)
            if left <= 0:
                break
        if left:
            raise ValueError(
                f"a prompt has {int((prompt == self.vision.placeholder).sum())} placeholders of features, and they are "
                f"not those of its {len(own)} images: {MISFIT}"
            )
        return own, self._located(prompt, own)

    def _located(self, tokens: np.ndarray, images: Sequence[bytes]) -> np.ndarray:
        """Return the indices of the features of `images` in `tokens`, int64: the expansions stand there in order."""
        placeholder = self.vision.placeholder
        left = np.flatnonzero(tokens == placeholder)
        found = [np.empty(0, np.int64)]
        for image in images:
            expansion = np.array(self.vision.expansion(image))
            marks = np.flatnonzero(expansion == placeholder)
            begin = int(left[0] - marks[0]) if len(left) else -1
            if begin < 0 or not np.array_equal(tokens[begin : begin + len(expansion)], expansion):
                raise ValueError(f"the features of an image do not stand in the tokens of its row: {MISFIT}")
            found.append(begin + marks)
            left = left[len(marks) :]
        return np.concatenate(found)

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
        if images is not None and shown and len(found) != len(images.index):
            raise ValueError(
                f"the vision tower of {self.lm.name_or_path} gives {len(found)} features for images whose prompts have "
                f"{len(images.index)} placeholders; take a model whose towers are those of model.path"
            )
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
