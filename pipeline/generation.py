"""Requests to an engine, and their results."""

from dataclasses import dataclass

import numpy as np

from pipeline.sampling import Sampling


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt, in order."""

    encoded: tuple[bytes, ...]
    """The images as in their files."""
    hashes: tuple[bytes, ...]
    """Hash of each image with the processor's settings."""
    prompt_ids: list[int]
    """Token ids of the prompt with one placeholder for each image."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One response for an engine to generate."""

    prompt_ids: list[int]
    """Token ids of the prompt, with a placeholder for each feature of an image. Engines keep this list, so it must not
    be changed."""
    sampling: Sampling
    seed: int | None = None
    """Seed of the response, below 2^63; None leaves it to the engine."""
    ends: tuple[int, ...] = ()
    """Ids of tokens that end the response, in addition to the end tokens in the model's files."""
    ignore_eos: bool = False
    """True to go on generating past all of them."""
    images: PromptImages | None = None
    """Images of the prompt; None if it has only text."""
    for_training: bool = False
    """True to return what the trainer needs to compute the same numbers: the tokens from which each token was sampled,
    and, with `rollout.replay_routes`, the experts of all tokens."""


@dataclass(frozen=True)
class Generation:
    """Tokens that the policy sampled: ids [T] int32, their log-probs [T] float32, and the reason why sampling ended."""

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    version_runs: tuple[tuple[int, int], ...]
    """(Policy version, number of tokens that it generated), in the order of the tokens."""
    support: tuple[np.ndarray, np.ndarray] | None = None
    """The columns `support` [M] int32 and `support_sizes` [T] int32; None if no token had a support that is smaller
    than the vocabulary, or the request does not ask for them."""
    routes: np.ndarray | None = None
    """[P + T, W] int16, the experts of each token of prompt and response, layer after layer; `UNROUTED` for the last
    one. None if the request does not ask for them."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """A finished request of an engine."""

    request_id: str
    generation: Generation
