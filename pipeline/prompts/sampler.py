"""Samplers decide which training prompts are taken, and how often (`data.sampler`).

A sampler never sees a list of all rows. It gives the share of each data source in an iteration, or the probability that
a row is taken when its turn in the order comes, or both. `PromptLoader` draws the random numbers, which depend only on
the seed and the position, so a sampler with restored state continues exactly.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.config.data import DataConfig
from pipeline.prompts.feedback import Outcome
from pipeline.prompts.plugin import Plugin, find_class, learns, make


class Sampler(Plugin):
    """Sampler that takes every prompt once per epoch, in file order or shuffled. Base class of all samplers."""

    def shares(self, iteration: int) -> Mapping[str, float] | None:
        """Return the weight of each data source in the prompts of an iteration; the numbers need not sum to 1.

        The result must name every data source of the files; 0 excludes a source. Each source is then read in its own
        endless order. None instead puts the rows of all sources into one order. A sampler must return None either in
        every iteration or in no iteration.
        """
        return None

    def chance(self, index: int, row: dict[str, Any]) -> float:
        """Return the probability that a row is taken when its turn comes; if it is not taken, the next row follows.

        Args:
            index: number of the row over all training files, from 0.
            row: columns of the row as in its file: prompt, data_source, reward_model, extra_info.
        """
        return 1.0


class Weighted(Sampler):
    """Sampler that draws the data source of each prompt with the probabilities `data.source_weights`."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        super().__init__(data, seed)
        if not data.source_weights:
            raise ValueError("data.sampler=weighted needs data.source_weights, a weight for each data_source")

    def shares(self, iteration: int) -> Mapping[str, float]:
        return self.data.source_weights


class SolveRate(Sampler):
    """Sampler that takes prompts less often if they are always or never solved.

    A row is taken with probability 4 p (1 - p), but at least `least`; p is the running average of the fraction of right
    responses to this row. In group-relative estimators, a group has no advantages if all of its responses are right or
    all are wrong, and p (1 - p) is the variance of one response being right. A row without responses so far is always
    taken.
    """

    MAX_ROWS = 1 << 20

    def __init__(self, data: DataConfig, seed: int, least: float = 0.1, decay: float = 0.5) -> None:
        """Store the options.

        Args:
            data, seed: as in `Sampler`.
            least: minimum probability with which a row is taken, above 0 and at most 1.
            decay: weight of the old average when a row gets new responses, from 0 (only the new ones count) to below 1.
        """
        super().__init__(data, seed)
        if not 0 < least <= 1:
            raise ValueError(f"data.sampler_kwargs.least={least} must be above 0 and at most 1")
        if not 0 <= decay < 1:
            raise ValueError(f"data.sampler_kwargs.decay={decay} must be at least 0 and below 1")
        self.least, self.decay = least, decay
        self._rates: dict[int, float] = {}

    def chance(self, index: int, row: dict[str, Any]) -> float:
        rate = self._rates.get(index)
        return 1.0 if rate is None else max(self.least, 4 * rate * (1 - rate))

    def update(self, iteration: int, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.prompt_index < 0:
                continue
            # Deleted first, so that the dict is ordered by the time of the last update.
            old = self._rates.pop(outcome.prompt_index, None)
            mean = outcome.solved if old is None else self.decay * old + (1 - self.decay) * outcome.solved
            # Rounded to its stored form, so that a restored sampler has the same numbers.
            self._rates[outcome.prompt_index] = float(np.float32(mean))
        while len(self._rates) > self.MAX_ROWS:
            del self._rates[next(iter(self._rates))]

    def state_dict(self) -> dict[str, Any]:
        rows = np.fromiter(self._rates.keys(), np.int64, len(self._rates))
        rates = np.fromiter(self._rates.values(), np.float32, len(self._rates))
        return {name: base64.b64encode(part.tobytes()).decode() for name, part in (("rows", rows), ("rates", rates))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = np.frombuffer(base64.b64decode(state.get("rows", "")), np.int64)
        rates = np.frombuffer(base64.b64decode(state.get("rates", "")), np.float32)
        self._rates = dict(zip(rows.tolist(), rates.tolist(), strict=True))


SAMPLERS: dict[str, type[Sampler]] = {"uniform": Sampler, "weighted": Weighted, "solve_rate": SolveRate}
STATELESS_SAMPLERS = [name for name, kind in SAMPLERS.items() if not learns(kind)]


def sampler_class(name: str) -> type[Sampler]:
    """Import the class `data.sampler`. Raises ValueError if it does not exist or is not a `Sampler`."""
    return find_class("data.sampler", name, SAMPLERS, Sampler)


def make_sampler(data: DataConfig, seed: int) -> Sampler:
    """Construct the class `data.sampler` with `data.sampler_kwargs`. Raises ValueError if the class does not exist, or
    does not take the arguments."""
    return make("data.sampler", sampler_class(data.sampler), data, seed, data.sampler_kwargs)
