"""Responses that are generated in several goes (`rollout.partial_tokens`).

A go is a request of its own: the prompt with the tokens so far, for so many tokens more. Between two goes nothing of
the response is in the engine, so weights may change without it: each go has the newest ones of its time, and the
response says which tokens are of which version. A new go of a sampled response begins other random numbers.
"""

import copy
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.rollout import vllm
from pipeline.rollout.engine import EngineLoop
from pipeline.rollout.group import Group, Requests, by_prompt
from pipeline.rollout.vllm import Generation

INTERRUPTED = "length"
"""Why a go ends that its response goes on from; the last one may end so, too."""


@dataclass(frozen=True, eq=False)
class PartialGroup(Group):
    """A group whose responses are interrupted; `outputs` are of the present go, of the responses that have one."""

    asked: tuple[tuple[Any, Any], ...] = ()
    """The requests, as if for one go."""
    parts: tuple[tuple[Generation, ...], ...] = ()
    """Of each response, what earlier goes gave."""
    most: int = 0
    """Tokens of a go."""
    now: int = 0
    """The version that the engine had when this go began."""

    @property
    def interrupted(self) -> bool:
        """Whether the go is over, and some response is not."""
        if not self.outputs.done() or self.outputs.exception() is not None:
            return False
        return any(
            _cut(output.outputs[0], self._left(place) - len(output.outputs[0].token_ids))
            for place, output in zip(self._open(), self.outputs.result(), strict=True)
        )

    def read(self) -> list[Generation]:
        return [joined(own) for own in self._so_far()]

    def again_by(self, engine: EngineLoop, version: int) -> "PartialGroup":
        """The next go of a group that was interrupted, by an engine that holds `version`."""
        return replace(self, parts=self._so_far(), now=version).handed_to(engine)

    def handed_to(self, engine: EngineLoop) -> "PartialGroup":
        """The same with its next go under way."""
        return replace(self, outputs=engine.submit([self._request(place) for place in self._open()]))

    def _so_far(self) -> tuple[tuple[Generation, ...], ...]:
        parts = list(self.parts)
        for place, output in zip(self._open(), self.outputs.result(), strict=True):
            parts[place] = *parts[place], vllm.read(output, self.now)
        return tuple(parts)

    def _open(self) -> list[int]:
        """Which responses are part of the present go."""
        return [place for place, own in enumerate(self.parts) if not own or _cut(own[-1], self._left(place))]

    def _left(self, place: int) -> int:
        """Tokens that a response may have beyond those of earlier goes."""
        return self.asked[place][1].max_tokens - sum(len(part.token_ids) for part in self.parts[place])

    def _request(self, place: int) -> tuple[Any, Any]:
        prompt, params = self.asked[place]
        so_far = [token for part in self.parts[place] for token in part.token_ids.tolist()]
        params = copy.copy(params)
        params.max_tokens = self._left(place)
        # vLLM looks for a text in the tokens of a request, and would miss one that began in an earlier go.
        if not params.stop:
            params.max_tokens = min(self.most, params.max_tokens)
        if so_far:
            prompt = prompt | {
                "prompt_token_ids": prompt["prompt_token_ids"] + so_far,
                "cache_salt": vllm.salt(self.now),
            }
            params.min_tokens = max(0, params.min_tokens - len(so_far))
            params.seed = None if params.seed is None else vllm.seed_of(f"{params.seed}/{len(so_far)}")
        # A go of fewer is refused where vLLM hands requests to other processes.
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        return prompt, params


def begin(engine: EngineLoop, prompts: pa.Table, version: int, requests: Requests, most: int) -> list[Group]:
    """Each prompt's requests are handed to the engine, which holds `version`, for `most` tokens each."""
    return [
        PartialGroup(prompt, version, Future(), False, tuple(asked), ((),) * len(asked), most, version).handed_to(
            engine
        )
        for prompt, asked in by_prompt(prompts, version, requests)
    ]


def _cut(part: Any, left: int) -> bool:
    """Whether a response was interrupted by the end of a go, which gave `part` and left it so many tokens."""
    return part.finish_reason == INTERRUPTED and left > 0


def joined(parts: Sequence[Generation]) -> Generation:
    """One response of what its goes gave."""
    if len(parts) == 1:
        return parts[0]
    return Generation(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.log_probs for part in parts]),
        parts[-1].finish_reason,
        tuple(_merged(run for part in parts for run in part.version_runs)),
    )


def _merged(runs: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    for version, own in groupby(runs, key=lambda run: run[0]):
        yield version, sum(tokens for _, tokens in own)
