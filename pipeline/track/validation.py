"""How good a policy version is on the validation prompts: mean, best, worst and majority of its N responses.

Every number is exact. Nothing is bootstrapped, so the same rows always give the same metrics.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.track.metrics import Stat, Stats, mean


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
