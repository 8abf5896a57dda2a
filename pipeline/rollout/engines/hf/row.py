"""A request in the engine hf, with what is generated so far."""

from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from pipeline.generation import EngineOutput, EngineRequest, Generation
from pipeline.models.support import SupportWriter
from pipeline.rows import UNROUTED


class RouteWriter:
    """The experts of a row's tokens, as passes through the model note them.

    Args:
        width: number of experts of a token in all layers.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._parts: list[np.ndarray] = []

    def begin(self, routes: np.ndarray) -> None:
        """Take the experts [t, W] of all tokens so far: a pass has read the row from its beginning."""
        self._parts = [routes]

    def add(self, routes: np.ndarray) -> None:
        """Take the experts [1, W] of one more token."""
        self._parts.append(routes)

    def column(self, tokens: int) -> np.ndarray:
        """Return the experts [tokens, W] int16, `UNROUTED` for tokens that did not pass."""
        made = np.full((tokens, self._width), UNROUTED, np.int16)
        noted = np.concatenate(self._parts) if self._parts else made[:0]
        made[: len(noted)] = noted
        return made


@dataclass(eq=False)
class PartialRow:
    """A request and what is generated so far."""

    id: str
    request: EngineRequest
    uniforms: np.ndarray
    """[max_tokens] float64, the number that decides each token."""
    ends: frozenset[int]
    """Ids of tokens that end the response."""
    support: SupportWriter | None = None
    """The supports of the tokens; None if not wanted."""
    routes: RouteWriter | None = None
    """The experts of the tokens; None if not wanted."""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str = ""
    """The reason why the response has ended; "" before."""

    @property
    def tokens(self) -> list[int]:
        """All tokens of the row."""
        return self.request.prompt_ids + self.ids

    @property
    def content(self) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """All that the row's next token depends on: tokens, and hashes of images, whose placeholders are all alike."""
        images = self.request.images
        return tuple(self.tokens), images.hashes if images else ()

    @property
    def longest(self) -> int:
        """Number of tokens that the row may have."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    @property
    def plain(self) -> bool:
        """True if each token was sampled from the whole vocabulary, by one policy version."""
        own = self.request.sampling
        whole = not (own.temperature and own.truncated)
        return whole and own.min_tokens == 0 and len(set(self.versions)) == 1

    def note_support(self, log_probs: Tensor) -> None:
        """Note the support of the next token; `log_probs` [V] are minus infinity outside of it."""
        assert self.support is not None
        own = self.request.sampling
        if (own.temperature and own.truncated) or len(self.ids) < own.min_tokens:
            self.support.inside(torch.isfinite(log_probs).nonzero()[:, 0].cpu().numpy())
        else:
            self.support.whole()

    def output(self) -> EngineOutput:
        """Return the result."""
        runs = tuple((version, len(list(run))) for version, run in groupby(self.versions))
        ids, log_probs = np.array(self.ids, np.int32), np.array(self.log_probs, np.float32)
        support = self.support.columns() if self.support else None
        routes = self.routes.column(len(self.tokens)) if self.routes else None
        return EngineOutput(self.id, Generation(ids, log_probs, self.reason, runs, support, routes))
