"""The metrics of an evaluation, accumulated chunk by chunk: memory does not grow with the number of prompts.

Every metric is computed exactly per prompt, then averaged over the prompts of a data source and over all prompts. As in
validation (`pipeline/track/validation.py`), a data source is judged by the part `acc` of its rewards if at least one
row has it, and rows without `acc` count as 0; else by the score. Rows whose reward failed are counted and left out of
their prompt's metrics. A prompt whose rows all failed is left out of every mean.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.rows import flat, spans_of
from pipeline.stats import Stat, Stats, mean, merge, reduce
from pipeline.track.passk import best_at_k, maj_at_every_k
from pipeline.track.validation import prompt_scores, right

COLUMNS = ("data_source", "uid", "score", "response", "reward_parts", "reward_error", "response_ids", "finish_reason")
"""Columns of rows that are read."""
OF_EPISODES = ("spans", "turns")
"""Further columns that are read if rows are episodes."""
WHOLE_NUMBERS = ("prompts", "responses", "response_length/max")


class Summary:
    """The metrics of all responses that were added.

    Args:
        ks: values of k for which pass@k and maj@k are computed.
    """

    def __init__(self, ks: Sequence[int]) -> None:
        self.ks = tuple(ks)
        self.first_error: str | None = None
        """Error message of the first reward that failed; None if none has."""
        self.prompts = 0
        """Number of prompts that were added."""
        self.tokens = 0
        """Number of tokens that the model wrote in all responses that were added."""
        # By data source: counts over all responses, and means over prompts of the score and of `acc`.
        self._counts: dict[str, Stats] = defaultdict(dict)
        self._rewards: dict[str, Stats] = defaultdict(dict)
        self._accuracies: dict[str, Stats] = defaultdict(dict)
        self._judged: set[str] = set()
        """Data sources with at least one response that has `acc`."""

    def add(self, table: pa.Table) -> None:
        """Add rows with `COLUMNS`, and for episodes `OF_EPISODES`; all responses of a prompt (`uid`) must be in one
        table."""
        for source in table["data_source"].unique().to_pylist():
            rows = table.filter(pc.equal(table["data_source"], source))
            prompts = prompt_scores(rows)
            self.prompts += len(prompts)
            self._count(source, rows, len(prompts))
            scored = [prompt for prompt in prompts if prompt.scores]
            rewards = [self._metrics_of(prompt.scores, prompt.votes) for prompt in scored]
            self._rewards[source] = merge([self._rewards[source], *rewards])
            accuracies = [self._metrics_of(right(prompt.accuracies), prompt.votes) for prompt in scored]
            missing = sum(prompt.accuracies.count(None) for prompt in scored)
            responses = sum(len(prompt.scores) for prompt in scored)
            rate = {"acc/missing_rate": mean(missing, responses)}
            self._accuracies[source] = merge([self._accuracies[source], *accuracies, rate])
            if missing < responses:
                self._judged.add(source)

    def judged_by(self, source: str) -> str:
        """Return the part of the reward by which a data source is judged: `acc` or `reward`."""
        return "acc" if source in self._judged else "reward"

    def by_source(self) -> dict[str, dict[str, float]]:
        """Return the metrics by data source and name.

        The names are `prompts`, `responses`, `mean`, `pass@K`, `maj@K`, `score/mean`, `error_rate`, `acc/missing_rate`
        if the source is judged by `acc`, `response_length/{mean,max,clip_ratio}` (of tokens that the model wrote) and,
        for episodes, `turns/mean`. Metrics of scores are left out if no prompt has a score.
        """
        return {source: self._metrics([source]) for source in sorted(self._counts)}

    def overall(self) -> dict[str, float]:
        """Return the metrics of `by_source` over all prompts, each judged as its data source is; empty without
        prompts."""
        return self._metrics(list(self._counts)) if self._counts else {}

    def _metrics(self, sources: list[str]) -> dict[str, float]:
        counts = reduce(self._counts[source] for source in sources)
        rewards = reduce(self._rewards[source] for source in sources)
        judged = reduce((self._accuracies if source in self._judged else self._rewards)[source] for source in sources)
        score = {"score/mean": rewards["mean"]} if rewards else {}
        return counts | {name: int(counts[name]) for name in WHOLE_NUMBERS} | judged | score

    def _metrics_of(self, scores: list[float], votes: list[int]) -> Stats:
        """Compute the metrics of one prompt from its responses; a k above the number n of responses counts as n.

        Args:
            scores: score of each response.
            votes: number of the final answer of each response; equal answers have equal numbers.
        """
        n = len(scores)
        maj = maj_at_every_k(scores, votes)
        stats = {"mean": mean(math.fsum(scores) / n, 1)}
        for k in self.ks:
            stats[f"pass@{k}"] = mean(best_at_k(scores, k), 1)
            stats[f"maj@{k}"] = mean(maj[min(k, n) - 1], 1)
        return stats

    def _count(self, source: str, rows: pa.Table, prompts: int) -> None:
        lengths = _lengths(rows)
        tokens = int(lengths.sum())
        cut_off = pc.sum(pc.equal(rows["finish_reason"], "length")).as_py()
        errors = rows["reward_error"].drop_null()
        if self.first_error is None and len(errors):
            self.first_error = errors[0].as_py()
        self.tokens += tokens
        counts = {
            "prompts": Stat("sum", (prompts,)),
            "responses": Stat("sum", (len(rows),)),
            "error_rate": mean(len(errors), len(rows)),
            "response_length/mean": mean(tokens, len(rows)),
            "response_length/max": Stat("max", (float(lengths.max()),)),
            "response_length/clip_ratio": mean(cut_off, len(rows)),
        }
        if "turns" in rows.column_names:
            counts["turns/mean"] = mean(pc.sum(rows["turns"]).as_py(), len(rows))
        self._counts[source] = merge([self._counts[source], counts])


def _lengths(rows: pa.Table) -> np.ndarray:
    """Return the number of tokens that the model wrote in each response, [R]."""
    offsets = flat(rows, "response_ids")[1]
    if "spans" not in rows.column_names:
        return np.diff(offsets)
    spans = spans_of(rows, offsets)
    return np.bincount(spans.row, np.where(spans.answer, np.diff(spans.tokens), 0), len(rows))
