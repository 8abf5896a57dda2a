"""What must be true of a run after its kills, beside a twin that nobody disturbed."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.track.history import read_history, validation_scores
from pipeline.track.trajectories import read_trajectories

NOT_COMPARED = (
    *("iteration", "time", "elapsed_s", "timing_s/", "timing_per_token_ms/", "perf/"),
    *("rollout/generate_s", "rollout/load_s", "rollout/engines_loaded"),
    *(f"{split}agent/{name}" for split in ("", "val-") for name in ("env_s/", "env_wait_share", "episode_s/")),
    *("training/rollout_", "actor/ppo_kl", "actor/pg_clipfrac"),
)
"""Beginnings of metrics that are times, or differences of nearly equal numbers."""
RELATIVE, ABSOLUTE = 1e-4, 1e-6
NOISE = 3.0
"""Standard errors by which two validations of equally good policies may differ."""
COLUMNS = ("uid", "sample", "policy_version", "response_ids", "score")


@dataclass(frozen=True)
class Check:
    """`ok` is None for what is told and not judged."""

    name: str
    ok: bool | None
    sentence: str


@dataclass
class Recorded:
    """What a run left: lines of its history, and its rows by iteration."""

    history: list[dict[str, Any]]
    rows: dict[int, pa.Table]
    validation: pa.Table | None

    @classmethod
    def of(cls, run_dir: Path, iterations: int) -> "Recorded":
        rows = {k: table for k in range(1, iterations + 1) if (table := _rows(run_dir, k, "train")) is not None}
        return cls(read_history(run_dir / "metrics.jsonl"), rows, _rows(run_dir, iterations, "val"))


def check(run: Recorded, twin: Recorded | None, iterations: int, rows_per_iteration: int, n: int) -> list[Check]:
    """All checks of a run that should have `iterations` iterations of `rows_per_iteration` rows, `n` to a prompt."""
    checks = [
        # Number 0 is the validation before training.
        every_iteration_once([record["iteration"] for record in run.history if record["iteration"]], iterations),
        whole_iterations(run.rows, iterations, rows_per_iteration, n),
        no_prompt_twice(run.rows),
        versions(run.rows),
    ]
    if twin is not None:
        checks += [
            same_prompts(run.rows, twin.rows),
            as_good(scores(run.validation), scores(twin.validation)),
            same_rows(run.rows, twin.rows),
            same_metrics(run.history, twin.history),
        ]
    return checks


def every_iteration_once(found: Sequence[int], iterations: int) -> Check:
    """Of `metrics.jsonl`."""
    counted = Counter(found)
    missing = [k for k in range(1, iterations + 1) if k not in counted]
    repeated = [k for k, count in counted.items() if count > 1]
    foreign = [k for k in counted if not 1 <= k <= iterations]
    problems = [
        f"{what} {_some(which)}"
        for what, which in (("lacks", missing), ("repeats", repeated), ("also holds", foreign))
        if which
    ]
    sentence = f"metrics.jsonl {' and '.join(problems) or f'holds iterations 1 to {iterations}, each once'}"
    return Check("iterations", not problems, sentence)


def whole_iterations(rows: Mapping[int, pa.Table], iterations: int, count: int, n: int) -> Check:
    """Each iteration has its number of recorded rows, and each prompt in it samples 0 to n - 1."""
    wrong = []
    for k in range(1, iterations + 1):
        table = rows.get(k)
        if table is None or len(table) != count:
            wrong.append(f"iteration {k} has {0 if table is None else len(table)}")
            continue
        pairs = Counter(zip(table["uid"].to_pylist(), table["sample"].to_pylist(), strict=True))
        if max(pairs.values()) > 1 or set(table["sample"].to_pylist()) != set(range(n)):
            wrong.append(f"iteration {k} holds a sample twice")
    sentence = f"of {count} rows each: {'; '.join(wrong[:5])}" if wrong else f"every iteration trained on {count} rows"
    return Check("rows", not wrong, sentence)


def no_prompt_twice(rows: Mapping[int, pa.Table]) -> Check:
    """A prompt's visit (`uid`) belongs to one iteration."""
    home: dict[str, int] = {}
    twice = []
    for k, table in rows.items():
        for uid in set(table["uid"].to_pylist()):
            if home.setdefault(uid, k) != k:
                twice.append(f"{uid} in iterations {home[uid]} and {k}")
    sentence = f"trained twice: {', '.join(twice[:5])}" if twice else f"{len(home)} prompt visits, none trained twice"
    return Check("prompts once", not twice, sentence)


def versions(rows: Mapping[int, pa.Table]) -> Check:
    """Iteration k trains on rows of policy version k - 1."""
    wrong = [k for k, table in rows.items() if set(table["policy_version"].to_pylist()) != {k - 1}]
    sentence = f"other versions generated rows of {_some(wrong)}" if wrong else "version k - 1 generated iteration k"
    return Check("versions", not wrong, sentence)


def same_prompts(ours: Mapping[int, pa.Table], theirs: Mapping[int, pa.Table]) -> Check:
    """Every iteration trained on the prompts that it trains on without kills."""
    wrong, lost, more = [], Counter[str](), Counter[str]()
    for k in sorted(ours.keys() | theirs.keys()):
        mine, others = (Counter(rows[k]["uid"].to_pylist() if k in rows else []) for rows in (ours, theirs))
        if mine != others:
            wrong.append(k)
            lost, more = lost + (others - mine), more + (mine - others)
    if not wrong:
        return Check("prompts", True, "every iteration trained on the same prompts as without kills")
    sentence = f"other prompts than without kills in {_some(wrong)}: {len(lost - more)} lost, {len(more - lost)} more"
    return Check("prompts", False, sentence)


def as_good(ours: Sequence[float], theirs: Sequence[float]) -> Check:
    """The last validations differ by no more than two samples of this size do."""
    name = "validation"
    if not ours or len(ours) != len(theirs):
        return Check(name, False, f"the last validation has {len(ours)} rows, {len(theirs)} without kills")
    a, b = _mean(ours), _mean(theirs)
    error = math.sqrt(sum(_mean([(x - m) ** 2 for x in xs]) / len(xs) for xs, m in ((ours, a), (theirs, b))))
    sentence = f"the last validation is {a:.4f} and {b:.4f} without kills (standard error {error:.4f})"
    return Check(name, abs(a - b) <= NOISE * error + ABSOLUTE, sentence)


def same_rows(ours: Mapping[int, pa.Table], theirs: Mapping[int, pa.Table]) -> Check:
    """Told: whether every response is the very one, which engines promise for the same batches alone."""
    shared = sorted(ours.keys() & theirs.keys())
    other = [k for k in shared if not _sorted(ours[k])["response_ids"].equals(_sorted(theirs[k])["response_ids"])]
    same = len(shared) - len(other)
    sentence = f"the responses of {same} of {len(shared)} iterations equal those without kills"
    return Check("same responses", None, sentence + (f"; others from iteration {other[0]} on" if other else ""))


def same_metrics(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> Check:
    """Told: whether all metrics but times are equal."""
    others = {record["iteration"]: comparable(record) for record in theirs}
    same, first = 0, ""
    for record in ours:
        wrong = differing(comparable(record), others.get(record["iteration"], {}))
        same += not wrong
        if wrong and not first:
            first = f"; the first that differ are {', '.join(wrong[:3])} of iteration {record['iteration']}"
    sentence = f"the metrics of {same} of {len(ours)} iterations equal those without kills{first}"
    return Check("same metrics", None, sentence)


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that are the same in another run with the same seed, up to rounding."""
    return {name: value for name, value in record.items() if not name.startswith(NOT_COMPARED)}


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Names of the metrics that one side lacks or that differ by more than rounding."""
    return [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or not _near(ours[name], theirs[name])
    ]


def scores(rows: pa.Table | None) -> list[float]:
    """What the validation's rows scored."""
    return [] if rows is None else rows["score"].to_pylist()


def last_validation(run: Recorded) -> dict[str, float]:
    """The score by data source in the last line that has one."""
    return next((found for record in reversed(run.history) if (found := validation_scores(record))), {})


def _near(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def _sorted(table: pa.Table) -> pa.Table:
    return table.sort_by([("uid", "ascending"), ("sample", "ascending")]).combine_chunks()


def _rows(run_dir: Path, iteration: int, split: str) -> pa.Table | None:
    try:
        return read_trajectories(str(run_dir), iteration, split, COLUMNS)
    except FileNotFoundError:
        return None


def _some(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, sorted(numbers)[:5]))
    return f"{'iterations' if len(numbers) > 1 else 'iteration'} {listed}{', ...' if len(numbers) > 5 else ''}"
