"""What an evaluation measures, added up chunk by chunk: memory does not grow with the prompts.

Every number is worked out per prompt, exactly and without resampling, and averaged over the prompts of a data source
and over all of them. What a source is judged by is as in validation (`pipeline/track/validation.py`): the part `acc` of
its reward where there is one, else the score. Rows whose reward failed are left out of their prompt and counted; a
prompt of which all rows failed is in no mean.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.evaluate.majority import majority
from pipeline.track.validation import best_at_k

COLUMNS = ("data_source", "uid", "score", "response", "reward_parts", "reward_error", "response_ids", "finish_reason")
"""Columns that are read."""


@dataclass
class _Sums:
    """Sums over prompts of what responses were given, by one way to judge them."""

    prompts: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, scores: list[float], answers: list[str], ks: Sequence[int]) -> None:
        """One prompt; a k above its number of responses is taken as that number."""
        self.prompts += 1
        self.sums["mean"] += math.fsum(scores) / len(scores)
        by_votes = majority(scores, answers)
        for k in ks:
            self.sums[f"pass@{k}"] += best_at_k(scores, k)
            self.sums[f"maj@{k}"] += float(by_votes[min(k, len(scores)) - 1])


@dataclass
class _Source:
    """What is counted of one data source."""

    prompts: int = 0
    responses: int = 0
    failed: int = 0
    tokens: int = 0
    longest: int = 0
    cut: int = 0
    acc: _Sums = field(default_factory=_Sums)
    reward: _Sums = field(default_factory=_Sums)

    @property
    def judged(self) -> _Sums:
        return self.acc if self.acc.prompts else self.reward


class Summary:
    """The metrics of all responses that were added.

    Args:
        ks: for which k pass@k and maj@k are worked out.
    """

    def __init__(self, ks: Sequence[int]) -> None:
        self.ks = tuple(ks)
        self.first_error: str | None = None
        """Why the first of the rewards that failed did."""
        self._sources: dict[str, _Source] = defaultdict(_Source)

    def add(self, table: pa.Table) -> None:
        """Take over rows with `COLUMNS`; all responses of a prompt (`uid`) must be in one table."""
        for name, rows in _by(table.select(COLUMNS), "data_source"):
            source = self._sources[name]
            self._count(source, rows)
            for _, group in _by(rows, "uid"):
                source.prompts += 1
                for variable, (scores, answers) in _scored(group).items():
                    getattr(source, variable).add(scores, answers, self.ks)

    @property
    def prompts(self) -> int:
        """Prompts that were added."""
        return sum(source.prompts for source in self._sources.values())

    @property
    def tokens(self) -> int:
        """Tokens of the responses that were added."""
        return sum(source.tokens for source in self._sources.values())

    def judged_by(self, source: str) -> str:
        """`acc` or `reward`."""
        return "acc" if self._sources[source].acc.prompts else "reward"

    def by_source(self) -> dict[str, dict[str, float]]:
        """Metrics of each data source, by name: `prompts`, `responses`, `mean`, `pass@K`, `maj@K`, `score/mean`,
        `error_rate` and `response_length/{mean,max,clip_ratio}`; those of scores only where a prompt has one."""
        return {name: _metrics([self._sources[name]]) for name in sorted(self._sources)}

    def overall(self) -> dict[str, float]:
        """The same over all prompts, each judged as its source is; nothing where there are none."""
        return _metrics(list(self._sources.values())) if self._sources else {}

    def _count(self, source: _Source, rows: pa.Table) -> None:
        lengths = pc.list_value_length(rows["response_ids"])
        source.responses += len(rows)
        source.tokens += pc.sum(lengths).as_py()
        source.longest = max(source.longest, pc.max(lengths).as_py())
        source.cut += pc.sum(pc.equal(rows["finish_reason"], "length")).as_py()
        errors = rows["reward_error"].drop_null()
        source.failed += len(errors)
        if self.first_error is None and len(errors):
            self.first_error = errors[0].as_py()


def _metrics(sources: list[_Source]) -> dict[str, float]:
    responses = sum(source.responses for source in sources)
    scores = _means([source.reward for source in sources])
    return {
        "prompts": sum(source.prompts for source in sources),
        "responses": responses,
        **_means([source.judged for source in sources]),
        **({"score/mean": scores["mean"]} if scores else {}),
        "error_rate": sum(source.failed for source in sources) / responses,
        "response_length/mean": sum(source.tokens for source in sources) / responses,
        "response_length/max": max(source.longest for source in sources),
        "response_length/clip_ratio": sum(source.cut for source in sources) / responses,
    }


def _means(parts: list[_Sums]) -> dict[str, float]:
    """Over the prompts of all parts; nothing where there are none."""
    prompts = sum(part.prompts for part in parts)
    names = next((list(part.sums) for part in parts if part.prompts), [])
    return {name: math.fsum(part.sums[name] for part in parts) / prompts for name in names}


def _by(table: pa.Table, name: str) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each value of a column, in the order in which the values first come."""
    for value in table[name].unique().to_pylist():
        yield value, table.filter(pc.equal(table[name], value))


def _scored(group: pa.Table) -> dict[str, tuple[list[float], list[str]]]:
    """Scores and answers of the responses of one prompt, by what they are judged by."""
    found: dict[str, tuple[list[float], list[str]]] = {}
    scored = group.filter(pc.is_null(group["reward_error"])).select(["score", "response", "reward_parts"])
    for row in scored.to_pylist():
        known = json.loads(row["reward_parts"]) if row["reward_parts"] else {}
        # A `pred` that is there and null is an answer too.
        answer = json.dumps(known["pred"], sort_keys=True) if "pred" in known else row["response"].strip()
        for variable, value in (("reward", row["score"]), ("acc", known.get("acc"))):
            if value is not None:
                scores, answers = found.setdefault(variable, ([], []))
                scores.append(float(value))
                answers.append(answer)
    return found
