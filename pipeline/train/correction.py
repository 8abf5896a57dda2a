"""Off-policy correction: the engine sampled with one policy and the trainer differentiates another.

With r = trainer's probability / engine's probability of a token (of a response: the product over its trained tokens),
the correction weighs a token or response by r (importance sampling), or rejects it where r is too far from 1. The two
policies differ by arithmetic and by weights that have moved on; the correction treats both alike.

1. Decoupled mode (`actor.old_log_probs=recompute`): the correction is from the engine's policy to the old one.
   `correct` runs on all rows of an iteration, with the recomputed old log-probs. Rejected tokens leave the loss mask,
   and so the counts that the loss is normalised by.
2. Bypass mode (`actor.old_log_probs=engine`): the correction is from the engine's policy to the current one. `correct`
   runs on each micro-batch, with detached current log-probs. The counts stay those of the loss mask, since they are
   needed before the forward pass. A loss whose ratio is taken against the engine's log-probs already contains r, so
   the weights are for losses without a ratio.

Importance weights (`rollout_is`), one per token or one per response:

3. One threshold c: min(r, c), truncated importance sampling (TIS; Yao et al. 2025, "Your efficient RL framework
   secretly brings you off-policy RL training").
4. `low_high`: r where low <= r <= high, else 0 (IcePop; Ring-1T report, 2025).

Rejection (`rollout_rs`; MIS and, with `seq_mean_k1`, Geo-RS: Liu et al. 2025, "When speed kills stability"). With
x = log r of each trained token:

5. k1 = x, k2 = x^2 / 2 and k3 = exp(x) - 1 - x are judged for each token (`token_`), or as their sum, mean or maximum
   over the response (`seq_sum_`, `seq_mean_`, `seq_max_`). A token rule rejects the token, a response rule the whole
   response. Every rule judges all trained tokens; a token stays if no rule rejects it. Bounds are inclusive.
6. Bounds of k1 are on the ratio: r of the token, of the response (`seq_sum_k1`), or its geometric mean over the
   response (`seq_mean_k1`). `0.5_4.0` keeps 0.5 <= r <= 4. verl documents the same but tests -log r, and so keeps
   0.25 <= r <= 2.

A log ratio that is NaN has weight 0, as has its response; it passes no rule and is left out of metrics. Rules see log
ratios as they are. For weights and metrics log ratios, and their sums over a response, are clamped to plus or minus 20,
so that `exp` stays finite.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from pipeline.config.algorithm import RolloutCorrectionConfig
from pipeline.kl_estimate import MAX_LOG_RATIO
from pipeline.stats import Stat, Stats, mean

_KEY = "algorithm.rollout_correction"
_KINDS = {
    "token": ("k1", "k2", "k3"),
    "seq_sum": ("k1", "k2", "k3"),
    "seq_mean": ("k1", "k2", "k3"),
    # The largest k1 of a response says nothing about a lower bound.
    "seq_max": ("k2", "k3"),
}
RULES = tuple(f"{level}_{kind}" for level, kinds in _KINDS.items() for kind in kinds)
"""Names of the rejection rules."""

AllSum = Callable[[list[float]], list[float]]
"""Sums each number over all ranks."""


@dataclass(frozen=True)
class Rule:
    """A rejection rule with its bounds."""

    name: str
    """One of `RULES`."""
    low: float
    """k1: smallest ratio that is kept; 0 for the others."""
    high: float
    """k1: largest ratio that is kept; k2 and k3: largest value."""

    @property
    def level(self) -> str:
        """`token`, `seq_sum`, `seq_mean` or `seq_max`."""
        return self.name.rpartition("_")[0]

    @property
    def kind(self) -> str:
        """`k1`, `k2` or `k3`."""
        return self.name.rpartition("_")[2]


@dataclass(frozen=True)
class Correction:
    """A parsed `RolloutCorrectionConfig`."""

    level: str | None
    """Importance weights per `token` or `sequence`; None for none."""
    low: float | None
    """IcePop's lower bound; None truncates at `high` instead."""
    high: float
    """Upper threshold of the weights."""
    normalize: bool
    """Divide the weights by their mean over the batch."""
    rules: tuple[Rule, ...]
    """Rejection rules, all of which must pass."""

    @property
    def active(self) -> bool:
        """Whether anything is weighed or rejected."""
        return self.level is not None or bool(self.rules)


@dataclass(frozen=True)
class Corrected:
    """The correction of N tokens."""

    weights: np.ndarray | None
    """[N] float64, 0 where the mask is 0; None without importance weights. A rejected token keeps its weight here."""
    keep: np.ndarray
    """[N] bool, tokens of the mask that no rule rejects."""
    stats: Stats
    """Metrics under `rollout_corr/`, to be merged over micro-batches and ranks."""


def parse(config: RolloutCorrectionConfig) -> Correction:
    """The correction that the settings ask for; those in force are `derived.rollout_correction(config)`.

    Raises:
        ValueError: an unknown level or rule, a rule named twice, a threshold that is malformed, not positive or upside
            down, as many thresholds as rules not given, or normalisation without weights.
    """
    level = None if config.rollout_is == "none" else config.rollout_is
    if level not in (None, "token", "sequence"):
        raise ValueError(f"{_KEY}.rollout_is={level} is not known; it must be one of null, none, token, sequence")
    if config.rollout_is_batch_normalize and level is None:
        raise ValueError(
            f"{_KEY}.rollout_is_batch_normalize=true has no weights to normalise; set {_KEY}.rollout_is to token or "
            "sequence"
        )
    *lows, high = _numbers("rollout_is_threshold", config.rollout_is_threshold)
    return Correction(
        level=level,
        low=lows[0] if lows else None,
        high=high,
        normalize=config.rollout_is_batch_normalize,
        rules=tuple(_rules(config.rollout_rs, config.rollout_rs_threshold)),
    )


def _rules(names: str | None, thresholds: str | None) -> list[Rule]:
    listed = [] if names is None else [name.strip() for name in names.split(",")]
    for position, name in enumerate(listed):
        if name not in RULES:
            near = get_close_matches(name, RULES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{_KEY}.rollout_rs={names} names {name!r}, which is no rejection rule.{hint} "
                f"Known are {', '.join(RULES)}."
            )
        if name in listed[:position]:
            raise ValueError(f"{_KEY}.rollout_rs={names} names {name!r} twice; one bound per rule is enough")
    bounds = [] if thresholds is None else [bound.strip() for bound in thresholds.split(",")]
    if len(bounds) != len(listed):
        raise ValueError(
            f"{_KEY}.rollout_rs_threshold={_shown(thresholds)} gives {len(bounds)} bounds for the {len(listed)} rules "
            f"of {_KEY}.rollout_rs={_shown(names)}; give one bound per rule, in the rules' order, comma separated"
        )
    return [_rule(name, bound) for name, bound in zip(listed, bounds, strict=True)]


def _rule(name: str, bound: str) -> Rule:
    *lows, high = _numbers("rollout_rs_threshold", bound)
    if not name.endswith("k1"):
        if lows:
            raise ValueError(
                f"{_KEY}.rollout_rs_threshold: {name} takes one number, the largest value that is kept, not {bound!r}"
            )
        return Rule(name, 0.0, high)
    if not lows and high <= 1.0:
        raise ValueError(
            f"{_KEY}.rollout_rs_threshold: {name} reads the single number {bound} as the bounds 1/{bound} to {bound}, "
            "which leave no ratio between them; give a number above 1, or both bounds as low_high"
        )
    return Rule(name, lows[0] if lows else 1.0 / high, high)


def _numbers(key: str, text: str) -> list[float]:
    """One or two numbers, joined by `_`, positive and ascending."""
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{_KEY}.{key}: {text!r} is neither a number, such as 2.0, nor two of them, such as 0.5_2.0")
    if min(numbers) <= 0:
        raise ValueError(f"{_KEY}.{key}: {text!r} must be above 0")
    if len(numbers) == 2 and numbers[0] >= numbers[1]:
        raise ValueError(f"{_KEY}.{key}: the bounds of {text!r} are upside down; the lower one comes first")
    return numbers


def _shown(text: str | None) -> str:
    return "null" if text is None else text


class _Responses:
    """Sums and maxima over the R responses of flat tokens; values behind the mask must be 0."""

    def __init__(self, trained: np.ndarray, offsets: np.ndarray):
        self.rows = len(offsets) - 1
        self.row_index = np.repeat(np.arange(self.rows), np.diff(offsets))
        self.count = self.sum(trained)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """[R] sum of the values [N]."""
        return np.bincount(self.row_index, weights=values, minlength=self.rows)

    def any(self, flags: np.ndarray) -> np.ndarray:
        """[R] whether a flag of [N] is set."""
        return self.sum(flags) > 0

    def aggregate(self, level: str, values: np.ndarray) -> np.ndarray:
        """[R] sum, mean or maximum of the values [N] over trained tokens; for the level `token` the values themselves.
        The maximum is that of values >= 0."""
        if level == "token":
            return values
        if level == "seq_max":
            largest = np.zeros(self.rows)
            np.maximum.at(largest, self.row_index, values)
            return largest
        total = self.sum(values)
        return total if level == "seq_sum" else total / np.maximum(self.count, 1.0)


def correct(
    correction: Correction,
    log_probs: np.ndarray,
    rollout_log_probs: np.ndarray,
    mask: np.ndarray,
    offsets: np.ndarray,
    all_sum: AllSum | None = None,
) -> Corrected:
    """Weights, kept tokens and metrics of R responses with N tokens in all.

    Args:
        correction: what to do; one that is not active gives metrics alone.
        log_probs: [N] of the trainer: the old policy's in decoupled mode, the current one's in bypass mode.
        rollout_log_probs: [N] of the engine.
        mask: [N] 1 where the token trains. What stands behind the mask has no influence.
        offsets: [R + 1] where each response begins; a response may be empty.
        all_sum: sums numbers over all ranks, which must all call `correct` alike; `list` for a single process. None
            where the call sees only a part of the batch, as in bypass mode: what needs all of it, normalised weights
            and `rollout_is_eff_sample_size`, cannot be had then.

    Weights are divided by their mean over kept tokens (or over responses with a kept token, one weight each) of all
    ranks, where the settings ask for it and that mean is not 0.

    Raises:
        ValueError: weights are to be normalised, without `all_sum`.
    """
    if correction.normalize and all_sum is None:
        raise ValueError(
            f"{_KEY}.rollout_is_batch_normalize=true needs all weights of an iteration before the first step, which "
            "actor.old_log_probs=engine does not have; use actor.old_log_probs=recompute or leave it off"
        )
    trained = np.asarray(mask) > 0
    trainer = np.where(trained, np.asarray(log_probs, dtype=np.float64), 0.0)
    engine = np.where(trained, np.asarray(rollout_log_probs, dtype=np.float64), 0.0)
    responses = _Responses(trained, np.asarray(offsets))
    # Infinite and undefined log ratios are meant to travel through the arithmetic.
    with np.errstate(all="ignore"):
        log_ratio = trainer - engine
        stats = _gap(trainer, engine, log_ratio, trained, responses)
        keep, rejections = _reject(correction.rules, log_ratio, trained, responses)
        stats |= rejections
        weights = None
        if correction.level is not None:
            weights, of_weights = _weigh(correction, log_ratio, trained, keep, responses, all_sum)
            stats |= of_weights
    return Corrected(weights, keep, {f"rollout_corr/{name}": stat for name, stat in stats.items()})


def _reject(
    rules: tuple[Rule, ...], log_ratio: np.ndarray, trained: np.ndarray, responses: _Responses
) -> tuple[np.ndarray, Stats]:
    """[N] tokens that pass all rules, and the share of what each rule judges that it rejects."""
    keep = trained
    stats: Stats = {}
    for rule in rules:
        judged = responses.aggregate(rule.level, _distance(rule.kind, log_ratio))
        if rule.kind == "k1":
            passed = (judged >= math.log(rule.low)) & (judged <= math.log(rule.high))
        else:
            passed = judged <= rule.high
        units = trained if rule.level == "token" else responses.count > 0
        stats[f"rollout_rs_{rule.name}_fraction"] = mean((units & ~passed).sum(), units.sum())
        keep = keep & (passed if rule.level == "token" else passed[responses.row_index])
    if rules:
        lost = trained & ~keep
        stats["rollout_rs_masked_fraction"] = mean(lost.sum(), trained.sum())
        stats["rollout_rs_seq_masked_fraction"] = mean(responses.any(lost).sum(), (responses.count > 0).sum())
    return keep, stats


def _distance(kind: str, log_ratio: np.ndarray) -> np.ndarray:
    # Not `kl.estimate`, which holds k3 to 10: a bound above that would then reject nothing.
    if kind == "k1":
        return log_ratio
    return log_ratio**2 / 2 if kind == "k2" else np.expm1(log_ratio) - log_ratio


def _weigh(
    correction: Correction,
    log_ratio: np.ndarray,
    trained: np.ndarray,
    keep: np.ndarray,
    responses: _Responses,
    all_sum: AllSum | None,
) -> tuple[np.ndarray, Stats]:
    """[N] importance weights, and their metrics: `mean`, `max`, `min`, `std` and the fractions are of the ratios before
    truncation, the effective sample size of the weights that train."""
    if correction.level == "token":
        units, kept, log_ratios = trained, keep, log_ratio
    else:
        units, kept, log_ratios = responses.count > 0, responses.any(keep), responses.sum(log_ratio)
    ratios = np.exp(_clamped(log_ratios))
    low, high = correction.low, correction.high
    if low is None:
        weights = np.where(np.isnan(log_ratios), 0.0, np.minimum(ratios, high))
    else:
        inside = (log_ratios >= math.log(low)) & (log_ratios <= math.log(high))
        weights = np.where(inside, ratios, 0.0)

    measured = units & ~np.isnan(log_ratios)
    stats = _summary("rollout_is", ratios[measured])
    stats["rollout_is_ratio_fraction_high"] = mean((log_ratios[measured] > math.log(high)).sum(), measured.sum())
    if low is not None:
        stats["rollout_is_ratio_fraction_low"] = mean((log_ratios[measured] < math.log(low)).sum(), measured.sum())
    if all_sum is not None:
        trains = weights[kept]
        count, total, squares = all_sum([float(len(trains)), float(trains.sum()), float((trains**2).sum())])
        if count:
            # Equal on all ranks, so the largest is the value. Where all weights are 0 no sample has an effect.
            size = total**2 / (count * squares) if squares else 0.0
            stats["rollout_is_eff_sample_size"] = Stat("max", (size,))
        if correction.normalize and total > 0:
            weights = weights * (count / total)
            stats["rollout_is_batch_norm_factor"] = Stat("max", (total / count,))
    if correction.level == "sequence":
        weights = weights[responses.row_index]
    return np.where(trained, weights, 0.0), stats


def _gap(
    trainer: np.ndarray, engine: np.ndarray, log_ratio: np.ndarray, trained: np.ndarray, responses: _Responses
) -> Stats:
    """How far apart the policies are: per token KL(engine || trainer) (k1 and k3) and chi squared(trainer || engine),
    which is the variance of the weights; per response the perplexities and chi squared."""
    tokens = trained & ~np.isnan(log_ratio)
    x = _clamped(log_ratio[tokens])
    sums = responses.sum(log_ratio)
    rows = (responses.count > 0) & ~np.isnan(sums)
    length = responses.count[rows]
    training_log_ppl = _clamped(-responses.sum(trainer)[rows] / length)
    rollout_log_ppl = _clamped(-responses.sum(engine)[rows] / length)
    log_ppl_diff = _clamped(-sums[rows] / length)

    def average(values: np.ndarray) -> Stat:
        return mean(values.sum(), len(values))

    return {
        "kl": average(-x),
        "k3_kl": average(np.expm1(x) - x),
        "chi2_token": average(np.expm1(2 * x)),
        "chi2_seq": average(np.expm1(2 * _clamped(sums[rows]))),
        "training_ppl": average(np.exp(training_log_ppl)),
        "rollout_ppl": average(np.exp(rollout_log_ppl)),
        "log_ppl_diff": average(log_ppl_diff),
        "ppl_ratio": average(np.exp(log_ppl_diff)),
    }


def _clamped(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _summary(name: str, values: np.ndarray) -> Stats:
    if not len(values):
        return {}
    centre = float(values.mean())
    return {
        f"{name}_mean": mean(values.sum(), len(values)),
        f"{name}_max": Stat("max", (float(values.max()),)),
        f"{name}_min": Stat("min", (float(values.min()),)),
        f"{name}_std": Stat("std", (float(len(values)), centre, float(((values - centre) ** 2).sum()))),
    }
