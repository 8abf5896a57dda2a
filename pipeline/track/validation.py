"""How good a policy version is on the validation prompts: mean, best, worst and majority of its N responses.

Every number is exact. Nothing is bootstrapped, so the same rows always give the same metrics.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.stats import Stat, Stats, mean
from pipeline.store.events import PromptScores
from pipeline.track.passk import best_at_k, maj_at_n


def prompt_scores(table: pa.Table) -> list[PromptScores]:
    """The numbers of each prompt (`uid`), in the order of the rows; the rows of a prompt must all be there.

    Args:
        table: validation rows with data_source, uid, score, response, and reward_parts and reward_error where known.
    """
    prompts: dict[tuple[str, str], PromptScores] = {}
    numbers: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    rows = zip(
        table["data_source"].to_pylist(),
        table["uid"].to_pylist(),
        table["score"].to_pylist(),
        table["response"].to_pylist(),
        _optional(table, "reward_parts"),
        _optional(table, "reward_error"),
        strict=True,
    )
    for source, uid, score, response, parts, error in rows:
        known = prompts.get((source, uid), PromptScores(source, uid, 0, [], []))
        known = prompts[source, uid] = replace(known, responses=known.responses + 1)
        if error is not None:
            continue
        told = json.loads(parts) if parts else {}
        # A `pred` that is there and null is an answer too.
        answer = json.dumps(told["pred"], sort_keys=True) if "pred" in told else response.strip()
        of_prompt = numbers[source, uid]
        vote = of_prompt.setdefault(answer, len(of_prompt))
        known.scores.append(float(score))
        known.votes.append(vote)
        if told.get("acc") is not None:
            known.accuracies.append(float(told["acc"]))
            known.accuracy_votes.append(vote)
    return list(prompts.values())


def validation_metrics(prompts: Sequence[PromptScores]) -> Stats:
    """mean@N, best@k, worst@k, maj@N and std@N of each data source.

    They are given for `reward`, the score, and where the reward function also returns `acc` (whether the answer is
    right, 0 to 1) for that; what a source is judged by, `acc` where there is one, stands under `val-core`, the other
    under `val-aux`.

    Each is worked out per prompt and averaged over prompts. N is the largest number of responses of a prompt in the
    source. Rows whose reward failed are left out of their prompt, and counted in
    `val-aux/{source}/reward/error_rate`.
    """
    stats: Stats = {}
    for source in dict.fromkeys(prompt.data_source for prompt in prompts):
        of_source = [prompt for prompt in prompts if prompt.data_source == source]
        responses = sum(prompt.responses for prompt in of_source)
        failed = responses - sum(len(prompt.scores) for prompt in of_source)
        stats[f"val-aux/{source}/reward/error_rate"] = mean(failed, responses)
        variables = {
            "acc": [(prompt.accuracies, prompt.accuracy_votes) for prompt in of_source if prompt.accuracies],
            "reward": [(prompt.scores, prompt.votes) for prompt in of_source if prompt.scores],
        }
        judged = "acc" if variables["acc"] else "reward"
        n = max(prompt.responses for prompt in of_source)
        for variable, groups in variables.items():
            if groups:
                level = "val-core" if variable == judged else "val-aux"
                stats |= _source_metrics(f"{level}/{source}/{variable}", f"val-aux/{source}/{variable}", groups, n)
    return stats


def _source_metrics(core: str, aux: str, groups: list[tuple[list[float], list[int]]], n: int) -> Stats:
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
