"""The handshake: a check before training that trainer and engine compute the same log-probs for the same rows.

Engine and trainer have separate code for each model family, so either may be wrong. The log-probs are compared in each
form in which rows pass through the trainer's model:

    alone            each row in a separate pass
    packed           rows of several lengths end to end in one pass
    sharing          samples of a group after one copy of their prompt
    padded           rows padded to one length in one pass, for models that cannot pack

In float32 log-probs may differ by `LIMIT`, or by the rounding of a deep model. In bfloat16 the mean and the largest
difference may each be `FACTOR` times the difference between the trainer's model in float32 and the same model in the
engine's type. If they differ by more, simpler ways are tried in this order: without sharing; padded; padded with the
family's own attention (`eager`). The run uses the first way that agrees.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.generation import PromptImages
from pipeline.greeting import Greeting, GreetingPlan, Way
from pipeline.models.backend import FsdpBackend, MicroBatches
from pipeline.models.batch import TokenBatch
from pipeline.models.micro_batches import split_micro_batches
from pipeline.models.packing import pack
from pipeline.models.policy import Policy
from pipeline.models.processor import Vision
from pipeline.models.sharing import Passes, share_prefixes

LIMIT = 1e-4
"""Largest allowed difference of a token's log-prob in float32, in nats."""
FACTOR = 2.0
"""Largest allowed ratio of a difference to the difference that the rounding of the type explains."""
NOT_HAD = (ValueError, RuntimeError, TypeError, NotImplementedError)
"""Errors that a model raises if it lacks the requested attention, form of rows or type."""


@dataclass(frozen=True)
class Difference:
    """Absolute differences between the log-probs of engine and trainer in one form of rows, in nats."""

    form: str
    """Name of the form, such as `alone`."""
    mean: float
    """Mean over all response tokens, in nats."""
    largest: float
    """Largest of all response tokens, in nats."""
    tokens: int
    """Length in tokens of the row with the largest difference."""
    by_length: dict[int, float]
    """Length of rows in tokens, to the largest difference in rows of this length, in nats."""


@dataclass(frozen=True)
class Limit:
    """Largest allowed values of a `Difference`, in nats."""

    mean: float
    largest: float
    why: str
    """Clause on the origin of the limit, for sentences."""

    def exceeded(self, found: Difference) -> bool:
        return not (found.mean <= self.mean and found.largest <= self.largest < math.inf)


@dataclass(frozen=True)
class Comparison:
    """Result of the handshake."""

    way: Way
    """The way (attention, packed or not, shared or not) for which engine and trainer agree; `first` if none does."""
    first: Way
    """The way that follows from the settings and the model's class."""
    differences: list[Difference]
    """Differences with `way`, one per form of rows."""
    before: list[Difference]
    """Differences with `first`, one per form of rows."""
    limit: Limit

    @property
    def worst(self) -> Difference:
        return max(self.differences, key=lambda found: found.largest)

    @property
    def agrees(self) -> bool:
        return not any(map(self.limit.exceeded, self.differences))

    @property
    def agree_up_to(self) -> int:
        """Length in tokens of the longest row for which this row and all shorter ones agree; 0 if none does."""
        largest: dict[int, float] = {}
        for found in self.differences:
            for length, apart in found.by_length.items():
                largest[length] = max(largest.get(length, 0.0), apart)
        agree = 0
        for length in sorted(largest):
            if not largest[length] <= self.limit.largest < math.inf:
                break
            agree = length
        return agree


class Compared:
    """The trainer's policy and rows that the engine generated, for comparing their log-probs in any way.

    Args:
        policy: the policy, sharded as it trains.
        rows: rows that the engine generated, with the engine's log-probs.
        device: this rank's device.
        budget: most tokens of a pass, unless a single row has more.
        sequence: ranks among which the positions of packed rows are divided; None without sequence parallelism.
        backend: passes of the policy; None if it is not cut into stages.
    """

    def __init__(
        self,
        policy: Policy,
        rows: Greeting,
        device: torch.device,
        budget: int,
        sequence: dist.ProcessGroup | None = None,
        backend: FsdpBackend | None = None,
    ):
        self.backend = backend or FsdpBackend(policy, None)
        self.policy, self.device, self.budget, self.sequence = policy, device, budget, sequence
        self.rows = token_batch(rows)
        self.engine = np.concatenate(rows.log_probs).astype(np.float64)

    @property
    def config(self) -> Any:
        return self.policy.decoder.config.get_text_config()

    def forms(self, way: Way) -> Iterator[tuple[str, list[list[list[int]]]]]:
        """Yield the forms in which rows pass through the model with `way`.

        Yields the form's name and its passes. A pass is a list of packs, a pack a list of row numbers.
        """
        count = len(self.rows)
        singles = [[row] for row in range(count)]
        yield "alone", [[single] for single in singles]
        yield ("packed" if way.packed else "padded") + " with others", self._passes(singles, way)
        if way.shared:
            shared = share_prefixes(self.rows, range(len(self.rows)), sys.maxsize, True)
            yield "after a shared prompt", self._passes(shared, way)

    def log_probs(self, passes: Sequence[list[list[int]]], way: Way) -> np.ndarray:
        """[N] float64, the policy's log-probs of the N response tokens; a collective.

        Args:
            passes: the packs of each pass, a pack as row numbers.
            way: attention, and whether the packs of a pass lie end to end or are padded.
        """
        found, reader = np.zeros(len(self.engine)), self.policy.image_reader
        place = reader.place if reader else None
        before, self.config._attn_implementation = self.config._attn_implementation, way.attention
        try:
            with torch.no_grad():
                batches = MicroBatches(
                    passes,
                    lambda packs: pack(
                        self.rows, packs, packed=way.packed, sequence=self.sequence, place_images=place
                    ).to(self.device),
                )
                for batch, output in self.backend.predict(batches, self._forward):
                    found[batch.token_index] = output.log_probs.double().cpu().numpy()
        finally:
            self.config._attn_implementation = before
        return found

    def _forward(self, batch: Any, hidden: Any = None) -> Any:
        return self.policy(**batch.arguments, hidden=hidden)

    def differences(self, way: Way) -> list[Difference]:
        """Measure the difference between trainer and engine in each form of `way`; a collective."""
        return [self._difference(form, self.log_probs(passes, way) - self.engine) for form, passes in self.forms(way)]

    def rounding(self, way: Way, dtype: torch.dtype) -> Difference:
        """Measure the difference between the policy in `dtype` and in float32 (float64 if `dtype` is float32).

        A collective. Each row has a separate pass.
        """
        passes = [[[row]] for row in range(len(self.rows))]
        with self.backend.computing_in(torch.float64 if dtype == torch.float32 else torch.float32):
            exact = self.log_probs(passes, way)
        with self.backend.computing_in(dtype):
            rounded = self.log_probs(passes, way)
        return self._difference("alone", rounded - exact)

    def _passes(self, packs: list[list[int]], way: Way) -> list[list[list[int]]]:
        lengths = self.rows.pack_lengths(packs)
        budget = max(self.budget, *lengths)
        return [[packs[number] for number in part] for part in split_micro_batches(lengths, budget, packed=way.packed)]

    def _difference(self, form: str, apart: np.ndarray) -> Difference:
        sizes = np.nan_to_num(np.abs(apart), nan=np.inf, posinf=np.inf)
        largest: dict[int, float] = {}
        for length, apart_in_row in zip(
            self.rows.lengths, np.split(sizes, self.rows.response_offsets[1:-1]), strict=True
        ):
            largest[length] = max(largest.get(length, 0.0), float(apart_in_row.max()))
        longest = max(largest, key=lambda length: largest[length])
        return Difference(form, float(sizes.mean()), float(sizes.max()), longest, dict(sorted(largest.items())))


def shake_hands(compared: Compared, passes: Passes, exact: bool, dtype: torch.dtype) -> Comparison:
    """Compare engine and trainer, and find a way in which they agree; a collective.

    Args:
        compared: the policy and the engine's rows.
        passes: the form in which rows pass through the policy now.
        exact: whether engine and trainer both compute in float32.
        dtype: type in which the engine computes.
    """
    first = Way(compared.config._attn_implementation, passes.packed, passes.shared)
    limit = Limit(LIMIT, LIMIT, "in float32") if exact else _rounded(compared, first, dtype)
    before = compared.differences(first)
    found = Comparison(first, first, before, before, limit)
    if exact and not found.agrees:
        # Rounding in float32 grows with a model's depth. Without kernels for float64 the limit remains.
        with suppress(*NOT_HAD):
            found = replace(found, limit=_rounded(compared, first, torch.float32))
    if found.agrees:
        return found
    for way in ways(first, compared.sequence is not None or compared.policy.packed_only):
        try:
            tried = replace(found, way=way, differences=compared.differences(way))
        except NOT_HAD:
            continue
        if tried.agrees:
            return tried
    return found


def _rounded(compared: Compared, way: Way, dtype: torch.dtype) -> Limit:
    """Return the limit `FACTOR` times the rounding in `dtype` (`Compared.rounding`) plus `LIMIT`; a collective."""
    rounding = compared.rounding(way, dtype)
    return Limit(
        FACTOR * rounding.mean + LIMIT,
        FACTOR * rounding.largest + LIMIT,
        f"{FACTOR:g} times what {str(dtype).removeprefix('torch.')} explains",
    )


def ways(first: Way, packed_only: bool) -> Iterator[Way]:
    """Yield the ways to try if `first` does not agree, the fastest first.

    Args:
        first: the way that was tried already.
        packed_only: whether rows must be packed, for example since ranks divide the positions of a sequence.
    """
    tried = {first}
    for way in (
        replace(first, shared=False),
        *(() if packed_only else (Way("sdpa", False, False), Way("eager", False, False))),
    ):
        if way not in tried:
            tried.add(way)
            yield way


def token_batch(rows: Greeting) -> TokenBatch:
    """Convert the rows of the handshake to a `TokenBatch`."""

    def flat(parts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        counts = np.array([len(part) for part in parts], dtype=np.int64)
        return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts]), np.concatenate(
            [[0], np.cumsum(counts)]
        )

    images = np.fromiter(rows.images, dtype=object, count=len(rows.images)) if any(rows.images) else None
    return TokenBatch(*flat(rows.prompts), *flat(rows.responses), np.arange(len(rows.prompts) + 1), images=images)


def shown_prompt(vision: Vision, seed: int, longest: int) -> list[tuple[list[int], PromptImages]]:
    """Return a prompt with a picture of noise, in the form of `GreetingPlan.shown`; [] if it has more than `longest`
    tokens."""
    picture = vision.noise(seed)
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": content}]
    text = vision.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = vision.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    expanded = vision.expand(ids, [picture])
    images = PromptImages((picture,), (vision.hash(picture),), ids)
    return [(expanded, images)] if len(expanded) <= longest else []


def sentence(found: Comparison, plan: GreetingPlan) -> str:
    """Describe the result of the handshake in a sentence for the user."""
    worst = found.worst
    if found.agrees and found.way == found.first:
        forms = ", ".join(difference.form for difference in found.differences) + (
            ", with an image" if plan.shown else ""
        )
        return (
            f"engine and trainer agree on rows {forms}: their log-probs differ by {worst.largest:.1e} nats at most "
            f"(limit {found.limit.largest:.1e} {found.limit.why})"
        )
    first = max(found.before, key=lambda difference: difference.largest)
    differ = f"engine and trainer differ by {_described(first, plan)} with {found.first}"
    limit = f"the limit is {found.limit.largest:.1e}, {found.limit.mean:.1e} in the mean, {found.limit.why}"
    if found.agrees:
        return f"{differ}; {limit}. With {found.way} they agree ({worst.largest:.1e}), so the run uses it"
    shorter = [length for length in plan.borders if length <= found.agree_up_to]
    only = f"; rows of up to {max(shorter)} tokens agree" if shorter else ""
    return f"{differ}; {limit}. No other attention and no other form of rows agrees{only}"


def _described(found: Difference, plan: GreetingPlan) -> str:
    passed = plan.passes(found.tokens)
    beyond = f", longer than {' and '.join(passed)}," if passed else ""
    return (
        f"{found.largest:.2g} nats (mean {found.mean:.2g}) in the log-prob of a token, in a row of {found.tokens} "
        f"tokens{beyond} {found.form}"
    )
