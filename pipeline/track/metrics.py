"""Metrics, from rows and log-probs to the names PPO users know. What each means stands in `docs/metrics.md`.

A metric is kept as a `Stat`, the few numbers that determine it (sum and count for a mean, and so on), until all ranks
are together: `reduce` then gives exactly what one process would have computed from all rows, however unevenly the rows
were spread. A metric that nothing was observed for (the mean of no rows, the correlation of constants) is left out;
none is ever NaN.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.rows import flat


class Stat(NamedTuple):
    """A metric that can still be merged with its like from other ranks.

    kind and values: `mean` (sum, count), `sum` (sum,), `min` (min,), `max` (max,), `std` (n, mean, sum of squared
    deviations), `corr` (n, mean x, mean y, squared deviations of x, of y, their products).
    """

    kind: str
    values: tuple[float, ...]


Stats = dict[str, Stat]


def mean(total: float, count: float) -> Stat:
    """Mean of `count` observations that sum to `total`."""
    return Stat("mean", (float(total), float(count)))


def _of(x: np.ndarray, kinds: Iterable[str], prefix: str) -> Stats:
    """`prefix/mean`, `prefix/max`, ... of the numbers x; nothing without numbers."""
    if not len(x):
        return {}
    x = np.asarray(x, dtype=np.float64)
    made = {
        "mean": lambda: mean(x.sum(), len(x)),
        "max": lambda: Stat("max", (float(x.max()),)),
        "min": lambda: Stat("min", (float(x.min()),)),
    }
    return {f"{prefix}/{kind}": made[kind]() for kind in kinds}


_ALL = ("mean", "max", "min")


def merge(parts: Iterable[Stats]) -> Stats:
    """One `Stats` from those of several ranks, micro-batches or chunks; a metric may be missing in some.

    Raises:
        ValueError: two parts disagree on the kind of a metric.
    """
    merged: Stats = {}
    for part in parts:
        for name, stat in part.items():
            if name not in merged:
                merged[name] = stat
                continue
            if merged[name].kind != stat.kind:
                raise ValueError(f"metric {name!r} is a {merged[name].kind} in one part and a {stat.kind} in another")
            merged[name] = Stat(stat.kind, _join(stat.kind, merged[name].values, stat.values))
    return merged


def _join(kind: str, a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    if kind in ("mean", "sum"):
        return tuple(x + y for x, y in zip(a, b, strict=True))
    if kind == "min":
        return (min(a[0], b[0]),)
    if kind == "max":
        return (max(a[0], b[0]),)
    # Moments about the mean (Chan, Golub and LeVeque 1979): plain sums of squares would cancel where the spread is
    # small against the mean, as it is for probabilities near 1.
    n = a[0] + b[0]
    if n == 0:
        return a
    share = a[0] * b[0] / n
    if kind == "std":
        delta = b[1] - a[1]
        return n, a[1] + delta * b[0] / n, a[2] + b[2] + delta * delta * share
    dx, dy = b[1] - a[1], b[2] - a[2]
    return (
        n,
        a[1] + dx * b[0] / n,
        a[2] + dy * b[0] / n,
        a[3] + b[3] + dx * dx * share,
        a[4] + b[4] + dy * dy * share,
        a[5] + b[5] + dx * dy * share,
    )


def _value(stat: Stat) -> float | None:
    v = stat.values
    if stat.kind == "mean":
        return v[0] / v[1] if v[1] else None
    if stat.kind == "std":
        return math.sqrt(max(v[2], 0.0) / v[0]) if v[0] else None
    if stat.kind == "corr":
        # A spread within rounding of the mean is that of a constant, which correlates with nothing.
        if any(squares <= v[0] * (1e-12 * centre) ** 2 for centre, squares in ((v[1], v[3]), (v[2], v[4]))):
            return None
        return max(-1.0, min(1.0, v[5] / (math.sqrt(v[3]) * math.sqrt(v[4]))))
    return v[0]


def reduce(parts: Iterable[Stats]) -> dict[str, float]:
    """The finished numbers of `merge(parts)`; a metric without observations is left out."""
    values = {name: _value(stat) for name, stat in merge(parts).items()}
    return {name: value for name, value in values.items() if value is not None}


def iteration_metrics(table: pa.Table, solved_at: float = 1.0) -> Stats:
    """Metrics of the finished rows (columns of `pipeline.rows.SCHEMA`) that one rank trains on in one iteration.

    Scores, rewards and groups leave out rows whose reward failed; lengths count every row; advantages and returns are
    over tokens that train. Groups must be whole on a rank.

    Args:
        table: train rows of one iteration.
        solved_at: a response with at least this score counts as solved.
    """
    if not len(table):
        return {}
    good = pc.is_null(table["reward_error"]).to_numpy()
    score = table["score"].to_numpy()[good].astype(np.float64)
    mask, offsets = flat(table, "response_mask")
    chosen = mask > 0
    response = np.diff(offsets)
    version = table["policy_version"].to_numpy()
    _, first_of_chunk = np.unique(table["chunk"].to_numpy(), return_index=True)
    return {
        **_of(score, _ALL, "critic/score"),
        **_of(score, _ALL, "critic/rewards"),
        **_of(flat(table, "advantages")[0][chosen], _ALL, "critic/advantages"),
        **_of(flat(table, "returns")[0][chosen], _ALL, "critic/returns"),
        **_of(response, _ALL, "response_length"),
        "response_length/clip_ratio": _share(pc.equal(table["finish_reason"], "length")),
        "response/aborted_ratio": _share(pc.equal(table["finish_reason"], "abort")),
        **_of(np.diff(flat(table, "prompt_ids")[1]), _ALL, "prompt_length"),
        "reward/error_rate": mean((~good).sum(), len(good)),
        **_groups(table["uid"].filter(pa.array(good)), score, solved_at),
        "training/policy_version": mean(version.sum(), len(version)),
        **_of(table["iteration"].to_numpy() - 1 - version, _ALL, "training/staleness"),
        "timing_s/reward": Stat("sum", (float(np.nansum(table["reward_s"].to_numpy()[first_of_chunk])),)),
        **_of(_present(table["generate_s"]), ("mean", "max"), "rollout/generate_s"),
        **_of(_present(table["load_s"]), ("mean", "max"), "rollout/load_s"),
    }


def _present(column: pa.ChunkedArray) -> np.ndarray:
    return column.drop_null().to_numpy()


def _share(flags: pa.ChunkedArray) -> Stat:
    """Share of true flags; null counts as false."""
    return mean(pc.sum(flags).as_py() or 0, len(flags))


def _groups(uid: pa.ChunkedArray, score: np.ndarray, solved_at: float) -> Stats:
    if not len(score):
        return {}
    group = uid.combine_chunks().dictionary_encode().indices.to_numpy()
    count = np.bincount(group)
    solved = np.bincount(group, weights=score >= solved_at)
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, group, score)
    np.maximum.at(high, group, score)
    return {
        "reward/solved_all": mean((solved == count).sum(), len(count)),
        "reward/solved_none": mean((solved == 0).sum(), len(count)),
        "reward/equal_groups": mean((low == high).sum(), len(count)),
    }


def log_prob_gap(rollout_log_probs: Any, log_probs: Any, mask: Any) -> Stats:
    """How far the engine's log-probs are from the trainer's for the same tokens and the same weights.

    Args:
        rollout_log_probs: [N] of the engine; a numpy array or CPU tensor, as are the others.
        log_probs: [N] of the trainer, before any update.
        mask: [N] 1 where the token counts.

    A difference that is not a number counts as infinite (log-probs) or as 1 (probabilities), so that a limit on the
    gap cannot be passed by a NaN.
    """
    keep = np.asarray(mask) > 0
    engine = np.asarray(rollout_log_probs, dtype=np.float64)[keep]
    trainer = np.asarray(log_probs, dtype=np.float64)[keep]
    if not len(engine):
        return {}
    with np.errstate(invalid="ignore", over="ignore"):
        log_gap = np.nan_to_num(np.abs(engine - trainer), nan=np.inf, posinf=np.inf)
        p, q = np.exp(engine), np.exp(trainer)
        gap = np.abs(p - q)
    finite = np.isfinite(gap)
    gap = np.where(finite, gap, 1.0)
    p, q = p[finite], q[finite]
    stats = {
        "training/rollout_probs_diff_mean": mean(gap.sum(), len(gap)),
        "training/rollout_probs_diff_max": Stat("max", (float(gap.max()),)),
        "training/rollout_probs_diff_std": Stat(
            "std", (float(len(gap)), float(gap.mean()), float(((gap - gap.mean()) ** 2).sum()))
        ),
        "training/rollout_log_probs_diff_mean": mean(log_gap.sum(), len(log_gap)),
        "training/rollout_log_probs_diff_max": Stat("max", (float(log_gap.max()),)),
    }
    if len(p):
        dp, dq = p - p.mean(), q - q.mean()
        moments = (len(p), p.mean(), q.mean(), (dp**2).sum(), (dq**2).sum(), (dp * dq).sum())
        stats["training/rollout_actor_probs_pearson_corr"] = Stat("corr", tuple(float(m) for m in moments))
    return stats


def best_at_k(scores: list[float], k: int) -> float:
    """Expected largest score of k responses drawn from `scores` without replacement, exactly.

    With s_1 <= ... <= s_n: sum over i of s_i * C(i - 1, k - 1) / C(n, k), the share of subsets whose largest is s_i.
    For scores of 0 and 1 this is the unbiased pass@k of Chen et al. 2021. k above n is taken as n.
    """
    n = len(scores)
    k = min(k, n)
    subsets = math.comb(n, k)
    return math.fsum(s * (math.comb(i, k - 1) / subsets) for i, s in enumerate(sorted(scores)))


def maj_at_n(scores: list[float], answers: list[str]) -> float:
    """Score of the most frequent answer: the mean score of the responses that gave it.

    Where several answers are equally frequent, the mean over them: the expectation of a fair draw among the tied.
    """
    votes = Counter(answers)
    most = max(votes.values())
    by_answer: dict[str, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        by_answer[answer].append(score)
    winners = [math.fsum(by_answer[answer]) / most for answer, count in votes.items() if count == most]
    return math.fsum(winners) / len(winners)


def validation_metrics(table: pa.Table) -> Stats:
    """mean@N, best@k, worst@k, maj@N and std@N of each data source; groups (`uid`) must be whole on a rank.

    They are given for `reward`, the score, and where the reward function also returns `acc` (whether the answer is
    right, 0 to 1) for that; what a source is judged by, `acc` where there is one, stands under `val-core`, the other
    under `val-aux`.

    Each is worked out per prompt and averaged over prompts. N is the largest number of responses of a prompt in the
    source. Rows whose reward failed are left out of their prompt, and counted in
    `val-aux/{source}/reward/error_rate`.

    Args:
        table: validation rows with data_source, uid, score, response, and reward_parts and reward_error where known.
    """
    rows = zip(
        table["data_source"].to_pylist(),
        table["uid"].to_pylist(),
        table["score"].to_pylist(),
        table["response"].to_pylist(),
        _optional(table, "reward_parts"),
        _optional(table, "reward_error"),
        strict=True,
    )
    prompts: dict[tuple[str, str], dict[str, tuple[list[float], list[str]]]] = defaultdict(dict)
    samples: Counter[tuple[str, str]] = Counter()
    failed: Counter[str] = Counter()
    for source, uid, score, response, parts, error in rows:
        samples[source, uid] += 1
        if error is not None:
            failed[source] += 1
            continue
        known = json.loads(parts) if parts else {}
        # A `pred` that is there and null is an answer too.
        answer = json.dumps(known["pred"], sort_keys=True) if "pred" in known else response.strip()
        for variable, value in (("reward", score), ("acc", known.get("acc"))):
            if value is not None:
                scores, answers = prompts[source, variable].setdefault(uid, ([], []))
                scores.append(float(value))
                answers.append(answer)

    stats: Stats = {}
    for source in dict.fromkeys(source for source, _ in samples):
        sizes = [count for (other, _), count in samples.items() if other == source]
        stats[f"val-aux/{source}/reward/error_rate"] = mean(failed[source], sum(sizes))
        judged = "acc" if prompts[source, "acc"] else "reward"
        for variable in ("acc", "reward"):
            groups = list(prompts[source, variable].values())
            if groups:
                level = "val-core" if variable == judged else "val-aux"
                stats |= _source_metrics(
                    f"{level}/{source}/{variable}", f"val-aux/{source}/{variable}", groups, max(sizes)
                )
    return stats


def _source_metrics(core: str, aux: str, groups: list[tuple[list[float], list[str]]], n: int) -> Stats:
    def over_prompts(values: Iterable[float]) -> Stat:
        return mean(math.fsum(values), len(groups))

    stats = {
        f"{core}/mean@{n}": over_prompts(math.fsum(scores) / len(scores) for scores, _ in groups),
        f"{core}/best@{n}/mean": over_prompts(max(scores) for scores, _ in groups),
        f"{core}/maj@{n}/mean": over_prompts(maj_at_n(scores, answers) for scores, answers in groups),
    }
    if n > 1:
        stats[f"{aux}/std@{n}"] = over_prompts(float(np.std(scores)) for scores, _ in groups)
        stats[f"{aux}/worst@{n}/mean"] = over_prompts(min(scores) for scores, _ in groups)
    k = 2
    while k < n:
        stats[f"{aux}/best@{k}/mean"] = over_prompts(best_at_k(scores, k) for scores, _ in groups)
        stats[f"{aux}/worst@{k}/mean"] = over_prompts(-best_at_k([-s for s in scores], k) for scores, _ in groups)
        k *= 2
    return stats


def _optional(table: pa.Table, name: str) -> list[Any]:
    return table[name].to_pylist() if name in table.column_names else [None] * len(table)
