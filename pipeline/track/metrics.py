"""Metrics of rows and log-probs, under the names that PPO users know. `docs/monitoring.md` explains each."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.rows import UNKNOWN, flat, loss_mask, policy_tokens, token_versions
from pipeline.stats import Stat, Stats, deviations, mean, summary
from pipeline.track.episodes import MOST_TOOLS, divided, episode_metrics, left_out

PART = re.compile("reward/.*/mean", re.DOTALL)
"""Pattern of the metrics that are means of reward parts."""
PLACES = (0, 16, 64, 256, 1024, 4096, 16384)
"""First tokens of the ranges of a response for which the gap between engine and trainer has a metric."""
MOST_PARTS = 32
"""Maximum number of reward parts that get their own metric: the first ones by name."""


def iteration_metrics(table: pa.Table, solved_at: float = 1.0, max_staleness: int = 0) -> Stats:
    """Compute the metrics of the rows on which one rank trains in an iteration; all rows of a group must be present.

    Scores, rewards, parts and groups leave out rows whose reward failed. Lengths count every row, but only the tokens
    that the policy wrote. Advantages, returns and values are over tokens that train.

    Args:
        table: columns of `pipeline.rows.SCHEMA`; optional ones (`reward`, `kl`, ...) may be missing or null in all
            rows.
        solved_at: a response with at least this score, before shaping, counts as solved.
        max_staleness: maximum age of rows, in versions; above 0 the fraction of rows of each age up to it is a metric.
    """
    if not len(table):
        return {}
    good = pc.is_null(table["reward_error"]).to_numpy()
    score = table["score"].to_numpy()[good].astype(np.float64)
    mask, offsets = loss_mask(table)
    chosen = mask > 0
    version = table["policy_version"].to_numpy()
    trained_version = table["iteration"].to_numpy() - 1
    _, first_of_chunk = np.unique(table["chunk"].to_numpy(), return_index=True)
    parts = _parts(table["reward_parts"].filter(pa.array(good))) if _has(table, "reward_parts") else {}
    raw_score = score.copy()
    if "raw_score" in parts:
        shaped, values = parts["raw_score"]
        raw_score[shaped] = values
    rewards = pc.coalesce(table["reward"], table["score"]) if _has(table, "reward") else table["score"]
    stats = {
        **summary(score, "critic/score"),
        **summary(rewards.to_numpy()[good], "critic/rewards"),
        **summary(flat(table, "advantages")[0][chosen], "critic/advantages"),
        **summary(flat(table, "returns")[0][chosen], "critic/returns"),
        **_lengths(table, policy_tokens(table)),
        **episode_metrics(table),
        "reward/error_rate": mean((~good).sum(), len(good)),
        **_part_means(parts),
        **_groups(table["uid"].filter(pa.array(good)), score, raw_score >= solved_at),
        "training/global_step": _largest(table["iteration"]),
        "training/epoch": _largest(table["epoch"]),
        "training/policy_version": mean(version.sum(), len(version)),
        **_ages(trained_version - version, max_staleness),
        "timing_s/reward": Stat("sum", (float(np.nansum(table["reward_s"].to_numpy()[first_of_chunk])),)),
        **summary(_present(table["generate_s"]), "rollout/generate_s", ("mean", "max")),
        **summary(_present(table["load_s"]), "rollout/load_s", ("mean", "max")),
    }
    if _has(table, "version_runs"):
        stats |= _token_ages(table, np.repeat(trained_version, np.diff(offsets)))
    if _has(table, "support_sizes"):
        own = table["support_sizes"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        stats["rollout/support_unknown"] = mean((own == UNKNOWN).sum(), int(policy_tokens(table).sum()))
    if _has(table, "teacher_log_probs"):
        engine, teacher = (flat(table, name)[0][chosen] for name in ("rollout_log_probs", "teacher_log_probs"))
        stats["teacher/kl"] = mean((engine - teacher).sum(), len(engine))
    if _has(table, "values"):
        stats |= summary(flat(table, "values")[0][chosen], "critic/values")
    if _has(table, "baseline"):
        stats |= summary(_present(table["baseline"]), "critic/baseline")
    if _has(table, "kl"):
        kl = _present(table["kl"]).astype(np.float64)
        stats["actor/reward_kl_penalty"] = mean(kl.sum(), len(kl))
        stats["actor/reward_kl_penalty_coeff"] = _largest(table["kl_coef"])
    # The model that scored a row may be newer than the one that generated it.
    for column, name in (("value_version", "value_staleness"), ("pi_version", "pi_staleness")):
        if _has(table, column):
            stats |= summary(trained_version - table[column].to_numpy(), f"training/{name}")
    return stats


def _ages(staleness: np.ndarray, most: int) -> Stats:
    stats = summary(staleness, "training/staleness") | {
        "training/staleness/over": mean((staleness > most).sum(), len(staleness))
    }
    if most:
        for age in range(most + 1):
            stats[f"training/staleness/share/{age}"] = mean((staleness == age).sum(), len(staleness))
    return stats


def _token_ages(table: pa.Table, trained_version: np.ndarray) -> Stats:
    """Compute the age, in versions, of the policy's tokens: weights may change while a row is generated.

    Args:
        table: the rows.
        trained_version: [N], for each token the version that the iteration starts from.
    """
    ages = (trained_version - token_versions(table))[flat(table, "response_mask")[0] > 0]
    versions = pc.list_value_length(table["version_runs"]).to_numpy()
    return {
        "training/token_staleness": mean(ages.sum(), len(ages)),
        **summary(versions, "rollout/versions_per_response", ("mean", "max")),
    }


Parts = dict[str, tuple[np.ndarray, np.ndarray]]
"""By name of a reward part: (indices of the rows that have it, values of the part in these rows)."""


def _parts(column: pa.ChunkedArray) -> Parts:
    """Parse the numeric and boolean parts of rewards, by name."""
    found: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    for row, text in enumerate(column.to_pylist()):
        if text is None or text == "{}":
            continue
        for name, value in json.loads(text).items():
            if isinstance(value, int | float):
                rows, values = found[name]
                rows.append(row)
                values.append(float(value))
    return {name: (np.array(found[name][0]), np.array(found[name][1])) for name in sorted(found)}


def _part_means(parts: Parts) -> Stats:
    chosen, others = divided(parts, MOST_PARTS)
    means = {f"reward/{name}/mean": mean(parts[name][1].sum(), len(parts[name][1])) for name in chosen}
    return means | left_out("reward/parts_left_out", others)


def missing_rates(merged: Stats) -> Stats:
    """Compute `reward/{part}/missing_rate` for the parts that some rows lack.

    Args:
        merged: the metrics of all ranks together, since a rank does not know a part that none of its rows has.
    """
    failed, rows = merged["reward/error_rate"].values
    scored = rows - failed
    counts = {name: stat.values[1] for name, stat in merged.items() if PART.fullmatch(name)}
    return {
        f"{name.removesuffix('mean')}missing_rate": mean(scored - count, scored)
        for name, count in counts.items()
        if count < scored
    }


def without_metric(rows: Iterable[Mapping[str, Any]]) -> str:
    """List, as text, the reward parts and tools in recorded `rows` that have no metric of their own."""
    parts: set[str] = set()
    tools: set[str] = set()
    for row in rows:
        own = json.loads(row.get("reward_parts") or "{}")
        parts |= {name for name, value in own.items() if isinstance(value, int | float)}
        tools |= set(json.loads(row.get("episode") or "{}").get("calls", ()))
    named = {"parts of the reward": divided(parts, MOST_PARTS)[1], "tools": divided(tools, MOST_TOOLS)[1]}
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in named.items() if names)


def _lengths(table: pa.Table, response: np.ndarray) -> Stats:
    """Compute metrics of the lengths, in tokens, of prompts and responses, also without responses that were aborted.

    Args:
        table: the R rows.
        response: [R] length of each response.
    """
    cut, aborted = (pc.equal(table["finish_reason"], reason) for reason in ("length", "abort"))
    ended = pc.invert(aborted.fill_null(False))
    stats = {
        **summary(response, "response_length"),
        "response_length/clip_ratio": _share(cut),
        "response/aborted_ratio": _share(aborted),
        **summary(response[ended.to_numpy()], "response_length_non_aborted"),
        **summary(np.diff(flat(table, "prompt_ids")[1]), "prompt_length"),
    }
    stats["response_length_non_aborted/clip_ratio"] = _share(cut.filter(ended))
    return stats


def _has(table: pa.Table, name: str) -> bool:
    return name in table.column_names and table[name].null_count < len(table)


def _largest(column: pa.ChunkedArray) -> Stat:
    return Stat("max", (float(pc.max(column).as_py()),))


def _present(column: pa.ChunkedArray) -> np.ndarray:
    return column.drop_null().to_numpy()


def _share(flags: pa.ChunkedArray) -> Stat:
    """Return the fraction of true flags; null counts as false."""
    return mean(pc.sum(flags).as_py() or 0, len(flags))


def _groups(uid: pa.ChunkedArray, score: np.ndarray, solves: np.ndarray) -> Stats:
    if not len(score):
        return {}
    group = uid.combine_chunks().dictionary_encode().indices.to_numpy()
    count = np.bincount(group)
    solved = np.bincount(group, weights=solves)
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, group, score)
    np.maximum.at(high, group, score)
    return {
        "reward/solved_all": mean((solved == count).sum(), len(count)),
        "reward/solved_none": mean((solved == 0).sum(), len(count)),
        "reward/equal_groups": mean((low == high).sum(), len(count)),
    }


def log_prob_gap(rollout_log_probs: Any, log_probs: Any, mask: Any, places: Any) -> Stats:
    """Compare the engine's log-probs with the trainer's, as numpy arrays or CPU tensors.

    A difference that is not a number counts as infinite (log-probs) or as 1 (probabilities), so that a NaN cannot pass
    a limit on the gap.

    Args:
        rollout_log_probs: [N] log-probs by the engine.
        log_probs: [N] log-probs by the trainer before any update.
        mask: [N], 1 for the tokens to compare.
        places: [N] int, number of response tokens before each token.
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
        "training/rollout_probs_diff_std": deviations("std", gap),
        "training/rollout_log_probs_diff_mean": mean(log_gap.sum(), len(log_gap)),
        "training/rollout_log_probs_diff_max": Stat("max", (float(log_gap.max()),)),
    }
    if len(p):
        dp, dq = p - p.mean(), q - q.mean()
        moments = (len(p), p.mean(), q.mean(), (dp**2).sum(), (dq**2).sum(), (dp * dq).sum())
        stats["training/rollout_actor_probs_pearson_corr"] = Stat("corr", tuple(float(m) for m in moments))
    part = np.searchsorted(PLACES, np.asarray(places)[keep], side="right") - 1
    sums, counts = np.bincount(part, weights=log_gap), np.bincount(part)
    for first, total, count in zip(PLACES, sums, counts, strict=False):
        if count:
            stats[f"training/rollout_log_probs_diff/from_{first}"] = mean(total, count)
    return stats
