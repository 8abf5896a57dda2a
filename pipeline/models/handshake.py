"""The handshake: engine and trainer give the same rows the same log-probs, before anything is learnt from them.

Families of models are many, and engine and trainer have each their own code for them. So the trainer's numbers are
compared with the engine's in each way in which rows pass through its model:

    alone            each row in a pass of its own
    packed           rows of several lengths end to end in one pass
    sharing          samples after one copy of their prompt
    padded           rows below each other in one pass, for models that cannot pack

In float32 they may differ by `LIMIT`, or by the rounding of a deep model. In bfloat16 mean and largest difference may
be `FACTOR` times the differences between the trainer's own model in float32 and in the engine's type. If they differ by
more, the ways that need less of the model are tried: without sharing, padded, with the family's own attention
(`eager`). The first one that agrees is the run's.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.greeting import Greeting, GreetingPlan, Way
from pipeline.models.batch import TokenBatch
from pipeline.models.micro_batches import split_micro_batches
from pipeline.models.packing import pack
from pipeline.models.policy import Policy
from pipeline.models.precision import computing_in
from pipeline.models.sharing import Passes

LIMIT = 1e-4
"""Largest difference of two computations in float32, in nats."""
FACTOR = 2.0
"""Largest allowed ratio of a difference to the difference that the type's rounding explains."""
NOT_HAD = (ValueError, RuntimeError, TypeError, NotImplementedError)
"""Errors of a model without the requested attention, form of rows or type."""


@dataclass(frozen=True)
class Difference:
    """Differences between engine and trainer in one form of rows, in nats."""

    form: str
    mean: float
    largest: float
    tokens: int
    """Length of the row with the largest difference."""
    by_length: dict[int, float]
    """The largest difference in rows of each length."""


@dataclass(frozen=True)
class Limit:
    """Limits of `Difference`, in nats."""

    mean: float
    largest: float
    why: str

    def exceeded(self, found: Difference) -> bool:
        return not (found.mean <= self.mean and found.largest <= self.largest < math.inf)


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison."""

    way: Way
    """The way that agrees, or the first one."""
    first: Way
    """The way of the settings and the model's class."""
    differences: list[Difference]
    """Differences with `way`, form by form."""
    before: list[Difference]
    """Differences with `first`."""
    limit: Limit

    @property
    def worst(self) -> Difference:
        return max(self.differences, key=lambda found: found.largest)

    @property
    def agrees(self) -> bool:
        return not any(map(self.limit.exceeded, self.differences))

    @property
    def agree_up_to(self) -> int:
        """Longest length in tokens up to which all rows agree."""
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
    """A policy with the engine's rows, whose log-probs it computes in any way.

    Args:
        policy: as it trains.
        rows: the engine's rows.
        device: this rank's device.
        budget: most tokens of a pass.
        sequence: ranks that divide the positions of packed rows.
    """

    def __init__(
        self,
        policy: Policy,
        rows: Greeting,
        device: torch.device,
        budget: int,
        sequence: dist.ProcessGroup | None = None,
    ):
        self.policy, self.device, self.budget, self.sequence = policy, device, budget, sequence
        self.rows = token_batch(rows)
        self.engine = np.concatenate(rows.log_probs).astype(np.float64)

    @property
    def config(self) -> Any:
        return self.policy.decoder.config.get_text_config()

    def forms(self, way: Way) -> Iterator[tuple[str, list[list[list[int]]]]]:
        """Yield the forms of rows that occur in a way, each with the packs of its passes."""
        count = len(self.rows)
        singles = [[row] for row in range(count)]
        yield "alone", [[single] for single in singles]
        yield ("packed" if way.packed else "padded") + " with others", self._passes(singles, way)
        if way.shared:
            yield "after a shared prompt", self._passes(_by_prompt(self.rows), way)

    def log_probs(self, passes: Sequence[list[list[int]]], way: Way) -> np.ndarray:
        """[N] float64 of the rows' response tokens; a collective."""
        found = np.zeros(len(self.engine))
        before, self.config._attn_implementation = self.config._attn_implementation, way.attention
        try:
            with torch.no_grad():
                for packs in passes:
                    batch = pack(self.rows, packs, packed=way.packed, sequence=self.sequence).to(self.device)
                    values, _ = self.policy(
                        batch.input_ids,
                        batch.logit_index,
                        batch.targets,
                        positions=batch.positions,
                        packing=batch.packing,
                    )
                    found[batch.token_index] = values.double().cpu().numpy()
        finally:
            self.config._attn_implementation = before
        return found

    def differences(self, way: Way) -> list[Difference]:
        """Measure the distance of the engine from each form of `way`; a collective."""
        return [self._difference(form, self.log_probs(passes, way) - self.engine) for form, passes in self.forms(way)]

    def rounding(self, way: Way, dtype: torch.dtype) -> Difference:
        """Measure the distance of the model in `dtype` from float32, or in float32 from float64; a collective."""
        passes = [[[row]] for row in range(len(self.rows))]
        with computing_in(self.policy, torch.float64 if dtype == torch.float32 else torch.float32):
            exact = self.log_probs(passes, way)
        with computing_in(self.policy, dtype):
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
    """Compare engine and trainer, and find the way in which they agree; a collective.

    Args:
        compared: the policy and the engine's rows.
        passes: the policy's passes of rows now.
        exact: whether both compute in float32.
        dtype: the engine's type.
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
    for way in ways(first, divided=compared.sequence is not None):
        try:
            tried = replace(found, way=way, differences=compared.differences(way))
        except NOT_HAD:
            continue
        if tried.agrees:
            return tried
    return found


def _rounded(compared: Compared, way: Way, dtype: torch.dtype) -> Limit:
    """Return the limit that the rounding of a type explains, on top of `LIMIT`; a collective."""
    rounding = compared.rounding(way, dtype)
    return Limit(
        FACTOR * rounding.mean + LIMIT,
        FACTOR * rounding.largest + LIMIT,
        f"{FACTOR:g} times what {str(dtype).removeprefix('torch.')} explains",
    )


def ways(first: Way, divided: bool) -> Iterator[Way]:
    """Yield other ways than `first`, the fastest first; with `divided` positions only packed ones."""
    tried = {first}
    for way in (
        replace(first, shared=False),
        *(() if divided else (Way("sdpa", False, False), Way("eager", False, False))),
    ):
        if way not in tried:
            tried.add(way)
            yield way


def token_batch(rows: Greeting) -> TokenBatch:
    """Return the rows as arrays."""

    def flat(parts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        counts = np.array([len(part) for part in parts], dtype=np.int64)
        return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts]), np.concatenate(
            [[0], np.cumsum(counts)]
        )

    return TokenBatch(*flat(rows.prompts), *flat(rows.responses), np.arange(len(rows.prompts) + 1))


def _by_prompt(rows: TokenBatch) -> list[list[int]]:
    """Group rows with equal prompts, which are neighbours."""
    packs: list[list[int]] = []
    last: tuple[int, ...] | None = None
    for row in range(len(rows)):
        prompt = tuple(rows.prompt_ids[rows.prompt_offsets[row] : rows.prompt_offsets[row + 1]].tolist())
        if prompt == last:
            packs[-1].append(row)
        else:
            packs.append([row])
            last = prompt
    return packs


def sentence(found: Comparison, plan: GreetingPlan) -> str:
    """Describe the result of the handshake."""
    worst = found.worst
    if found.agrees and found.way == found.first:
        forms = ", ".join(difference.form for difference in found.differences)
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
