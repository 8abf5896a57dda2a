"""Metrics of a policy version on the validation prompts: mean, best, worst and majority of its N responses.

Every number is exact; nothing is bootstrapped. No model library is imported, because light stages run this module.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.agent import AgentConfig
from pipeline.errors import nearest
from pipeline.stats import Stat, Stats, deviations, mean
from pipeline.store.client import StoreClient
from pipeline.store.events import PromptScores, ValidationScored
from pipeline.store.policy_store import PolicyStore
from pipeline.track.episodes import episode_metrics
from pipeline.track.passk import best_at_k, maj_at_n
from pipeline.track.trajectories import Record


class Validation:
    """A stage that takes validation rows out of the stream, records them, and sends their scores to the driver."""

    def __init__(self, run_dir: str, store: StoreClient):
        self._record, self._store = Record(run_dir), store

    def __call__(self, table: pa.Table) -> pa.Table:
        """Record the validation rows, and return the other rows of `table`."""
        for_validation = pc.equal(table["split"], "val")
        if not pc.any(for_validation).as_py():
            return table
        validation = table.filter(for_validation)
        self._record(validation)
        version = validation["iteration"][0].as_py()
        seconds = pc.max(validation["generate_s"]).as_py()
        scored = ValidationScored(version, prompt_scores(validation), seconds, episode_metrics(validation, "val-agent"))
        self._store.call(PolicyStore.record_validation, scored)
        return table.filter(pc.invert(for_validation))


def prompt_scores(table: pa.Table) -> list[PromptScores]:
    """Collect the scores of each prompt (`uid`), in the order of the rows; all rows of a prompt must be present.

    Args:
        table: validation rows with data_source, uid, score, response, and reward_parts and reward_error if known.
    """
    prompts: dict[tuple[str, str], PromptScores] = {}
    votes: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    optional = [name for name in ("reward_parts", "reward_error") if name in table.column_names]
    for row in table.select(["data_source", "uid", "score", "response", *optional]).to_pylist():
        key = row["data_source"], row["uid"]
        prompt = prompts.get(key, PromptScores(*key, 0, [], []))
        prompts[key] = prompt = replace(prompt, responses=prompt.responses + 1)
        if row.get("reward_error") is not None:
            continue
        parts = json.loads(row.get("reward_parts") or "{}")
        # A `pred` that is null is an answer too.
        answer = json.dumps(parts["pred"], sort_keys=True) if "pred" in parts else row["response"].strip()
        vote = votes[key].setdefault(answer, len(votes[key]))
        prompt.scores.append(float(row["score"]))
        prompt.votes.append(vote)
        acc = parts.get("acc")
        prompt.accuracies.append(None if acc is None else float(acc))
    return list(prompts.values())


def right(accuracies: Iterable[float | None]) -> list[float]:
    """Replace a missing accuracy by 0, for responses of a data source in which some rows have an accuracy."""
    return [acc or 0.0 for acc in accuracies]


def validation_metrics(prompts: Sequence[PromptScores]) -> Stats:
    """Compute mean@N, best@k, worst@k, maj@N and std@N of each data source, averaged over its prompts, and stderr@N,
    the standard error of mean@N over its prompts.

    They are computed for the score (`reward`). If the reward function also returns `acc` (0 to 1, whether the answer is
    right) for some row of the source, they are computed for `acc`, too: then `acc` is under `val-core` and the score
    under `val-aux`. A row without `acc` counts as 0 in them; `val-aux/{source}/acc/missing_rate` is the fraction of
    such rows. N is the largest number of responses of a prompt in the source. Rows whose reward failed count only in
    `val-aux/{source}/reward/error_rate`.
    """
    stats: Stats = {}
    for source in dict.fromkeys(prompt.data_source for prompt in prompts):
        of_source = [prompt for prompt in prompts if prompt.data_source == source]
        responses = sum(prompt.responses for prompt in of_source)
        failed = responses - sum(len(prompt.scores) for prompt in of_source)
        stats[f"val-aux/{source}/reward/error_rate"] = mean(failed, responses)
        scored = [prompt for prompt in of_source if prompt.scores]
        variables = {"reward": [(prompt.scores, prompt.votes) for prompt in scored]}
        given = sum(len(prompt.accuracies) - prompt.accuracies.count(None) for prompt in scored)
        if given:
            variables["acc"] = [(right(prompt.accuracies), prompt.votes) for prompt in scored]
            stats[f"val-aux/{source}/acc/missing_rate"] = mean(responses - failed - given, responses - failed)
        n = max(prompt.responses for prompt in of_source)
        for variable, groups in variables.items():
            if groups:
                level = "val-core" if variable == list(variables)[-1] else "val-aux"
                stats |= _source_metrics(f"{level}/{source}/{variable}", f"val-aux/{source}/{variable}", groups, n)
    return stats


def check_metric(metric: str, sources: Mapping[str, bool | None], n: int, agent: AgentConfig) -> None:
    """Check that validations will report the metric that `trainer.best_metric` names.

    Args:
        metric: name of the metric.
        sources: the data sources of the validation rows; True if the source's reward has `acc`, None if not known.
        n: number of responses to each prompt.
        agent: the section `agent`, whose environments may give `acc`, too.

    Raises:
        ValueError: the metric is not among them; the message has the valid names.
    """
    if agent.used and metric.startswith("val-agent/"):
        return
    by_environment = any(own.scored_by != "function" for own in agent.agents().values())
    names: list[str] = []
    for source, acc in sources.items():
        for judged in (True, False) if acc is None or (by_environment and not acc) else (acc,):
            ones = [1.0] * n
            accuracies = [1.0 if judged else None] * n
            names += validation_metrics([PromptScores(source, "", n, ones, list(range(n)), accuracies)])
    names = list(dict.fromkeys(names))
    if metric not in names:
        cores = [name for name in names if name.startswith("val-core/")]
        raise ValueError(
            f"trainer.best_metric={metric} is not a metric of this run's validation{nearest(metric, cores)}; there "
            f"are: {', '.join(cores)}, and of less weight {', '.join(name for name in names if name not in cores)}"
        )


def _source_metrics(core: str, aux: str, groups: list[tuple[list[float], list[int]]], n: int) -> Stats:
    def over_prompts(values: Iterable[float]) -> Stat:
        return mean(math.fsum(values), len(groups))

    means = [math.fsum(scores) / len(scores) for scores, _ in groups]
    stats = {
        f"{core}/mean@{n}": over_prompts(means),
        f"{aux}/stderr@{n}": deviations("stderr", np.array(means)),
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
