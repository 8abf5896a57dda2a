"""Requests for the samples of prompts."""

from collections.abc import Sequence

import pyarrow as pa

from pipeline.generation import EngineRequest, PromptImages
from pipeline.rollout.seeds import seed_of
from pipeline.rows import IMAGES
from pipeline.sampling import Sampling


def requests(
    prompts: Sequence[list[int]],
    uids: Sequence[str],
    settings: Sequence[Sampling],
    n: int,
    *,
    seed: int | None,
    ends: Sequence[int] = (),
    ignore_eos: bool = False,
    greedy: bool = False,
    images: Sequence[PromptImages | None] | None = None,
    for_training: bool = False,
) -> list[EngineRequest]:
    """Make `n` requests for each prompt, prompt by prompt; with `greedy`, followed by one of greedy decoding.

    With a `seed`, every request has its own seed, made from the run's seed, the prompt's uid and the sample's number,
    so that the greedy request changes no sample.

    Args:
        prompts: token ids; engines keep these lists, so they must not be changed.
        uids: identifiers of the prompts.
        settings: sampling settings of each prompt.
        n: number of samples of a prompt.
        seed: seed of the run; None leaves requests without seeds.
        ends: ids of tokens that end a response, in addition to the end tokens in the model's files.
        ignore_eos: true to go on generating past all of them.
        greedy: true if each prompt has a greedy request.
        images: images of each prompt; None if no prompt has any.
        for_training: true if engines return what the trainer needs (`EngineRequest.for_training`).
    """
    made, also = [], tuple(ends)
    shown = images or [None] * len(prompts)
    for ids, uid, chosen, pictures in zip(prompts, uids, settings, shown, strict=True):
        for sample, sampling in enumerate([chosen] * n + [chosen.greedy()] * greedy):
            drawn = seed is not None and sampling.temperature > 0
            own = seed_of(f"{seed}/{uid}/{sample}") if drawn else None
            made.append(EngineRequest(ids, sampling, own, also, ignore_eos, pictures, for_training))
    return made


def prompt_images(table: pa.Table) -> list[PromptImages | None] | None:
    """Return the images of each row's prompt, None for a prompt with text only; None without the columns `IMAGES`."""
    if IMAGES.names[0] not in table.column_names:
        return None
    columns = (table[name].to_pylist() for name in IMAGES.names)
    return [
        PromptImages(tuple(encoded), tuple(hashes), ids) if encoded else None
        for encoded, hashes, ids in zip(*columns, strict=True)
    ]
