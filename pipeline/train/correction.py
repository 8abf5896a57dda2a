"""Off-policy correction by importance weights and rejection: the engine samples from another policy than is trained.

The ratio r of a token is the trainer's probability divided by the engine's. The r of a response is the product over its
trained tokens.

- Decoupled mode (`actor.old_log_probs=recompute`): r is the old policy's probability divided by the engine's. `correct`
  runs once on all rows of an iteration. Rejected tokens leave the loss mask, and so the counts that normalise the loss.
- Bypass mode (`actor.old_log_probs=engine`): r is the current policy's probability divided by the engine's. `correct`
  runs on each micro-batch, with detached log-probs. Rejected tokens still count in the normalisation, since the counts
  are needed before the forward pass. Weights are for losses without a ratio: in other losses the ratio, relative to the
  engine's log-probs, contains r already.

Importance weights (`rollout_is`) are per token or per response. The threshold `c` gives the weight min(r, c) (truncated
importance sampling; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"). The
threshold `low_high` gives r if low <= r <= high, else 0 (IcePop; Ring-1T report, 2025).

Rejection (`rollout_rs`; MIS and, with `seq_mean_k1`, Geo-RS: Liu et al. 2025, "When speed kills stability"): with
x = log r of each trained token, k1 = x, k2 = x^2 / 2 and k3 = exp(x) - 1 - x are compared with bounds, inclusively, for
each token (`token_`), or as their sum, mean or maximum over the response (`seq_sum_`, `seq_mean_`, `seq_max_`). A token
rule rejects the token, a response rule the whole response. Every rule is applied to all trained tokens, and a token is
kept if no rule rejects it. Bounds of k1 are given for ratios: r of the token (`token_k1`), r of the response
(`seq_sum_k1`), or the geometric mean of r over the response (`seq_mean_k1`). `0.5_4.0` keeps 0.5 <= r <= 4; verl
documents the same but tests -log r, and so keeps 0.25 <= r <= 2.

If a log ratio is NaN, every rule rejects the token (or response), its weight is 0, and metrics leave it out. For
weights and metrics, log ratios and their sums are clamped to plus or minus 20, so that `exp` stays finite; rules use
unclamped ones.
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
    # The largest k1 of a response has no meaningful lower bound.
    "seq_max": ("k2", "k3"),
}
RULES = tuple(f"{level}_{kind}" for level, kinds in _KINDS.items() for kind in kinds)
"""Names of the rejection rules."""

AllSum = Callable[[list[float]], list[float]]
"""Function that sums each number of a list over all ranks."""


@dataclass(frozen=True)
class Rule:
    """A rejection rule with its bounds."""

    name: str
    """Name of the rule, one of `RULES`."""
    low: float
    """For k1 the smallest ratio r that is kept; 0 for k2 and k3."""
    high: float
    """For k1 the largest ratio r that is kept; for k2 and k3 the largest value of k2 or k3."""

    @property
    def level(self) -> str:
        """First part of the name: `token`, `seq_sum`, `seq_mean` or `seq_max`."""
        return self.name.rpartition("_")[0]

    @property
    def kind(self) -> str:
        """Last part of the name: `k1`, `k2` or `k3`."""
        return self.name.rpartition("_")[2]


@dataclass(frozen=True)
class Correction:
    """The settings of the off-policy correction, parsed."""

    level: str | None
    """`token` for one importance weight per token, `sequence` for one per response, None for no weights."""
    low: float | None
    """Smallest ratio with a weight above 0 (IcePop); None for weights min(r, high)."""
    high: float
    """With `low`, the largest ratio with a weight above 0; else the largest weight."""
    normalize: bool
    """True if weights are divided by their mean over the batch."""
    rules: tuple[Rule, ...]
    """Rejection rules; a token is kept if no rule rejects it."""

    @property
    def active(self) -> bool:
        """True if there are importance weights or rejection rules."""
        return self.level is not None or bool(self.rules)


@dataclass(frozen=True)
class Corrected:
    """Result of the off-policy correction for N tokens."""

    weights: np.ndarray | None
    """[N] float64, 0 for masked tokens; None without importance weights. Rejected tokens have weights too."""
    keep: np.ndarray
    """[N] bool, true for tokens of the mask that no rule rejects."""
    stats: Stats
    """Metrics under `rollout_corr/`, to be merged over micro-batches and ranks."""


def parse(config: RolloutCorrectionConfig) -> Correction:
    """Parse the settings of the off-policy correction.

    Args:
        config: settings, as from `derived.rollout_correction`.

    Raises:
        ValueError: an unknown level or rule, a rule named twice, a malformed threshold, different numbers of thresholds
            and rules, or normalisation without weights.
    """
    level = None if config.rollout_is == "none" else config.rollout_is
    if level not in (None, "token", "sequence"):
        raise ValueError(f"{_KEY}.rollout_is={level} is not known; it must be one of null, none, token, sequence")
    if config.rollout_is_batch_normalize and level is None:
        raise ValueError(
            f"{_KEY}.rollout_is_batch_normalize=true has no weights to normalise; set {_KEY}.rollout_is to token or "
            "sequence"
        )
    low, high = _bounds("rollout_is_threshold", config.rollout_is_threshold)
    rules = tuple(_rules(config.rollout_rs, config.rollout_rs_threshold))
    return Correction(level, low, high, config.rollout_is_batch_normalize, rules)


def _rules(names: str | None, thresholds: str | None) -> list[Rule]:
    listed = [] if names is None else [name.strip() for name in names.split(",")]
    for position, name in enumerate(listed):
        if name not in RULES:
            near = get_close_matches(name, RULES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{_KEY}.rollout_rs={names} names {name!r}, which is not a rejection rule.{hint} Known are "
                f"{', '.join(RULES)}."
            )
        if name in listed[:position]:
            raise ValueError(f"{_KEY}.rollout_rs={names} names {name!r} twice; one bound per rule is enough")
    bounds = [] if thresholds is None else [bound.strip() for bound in thresholds.split(",")]
    if len(bounds) != len(listed):
        raise ValueError(
            f"{_KEY}.rollout_rs_threshold={thresholds or 'null'} gives {len(bounds)} bounds for the {len(listed)} "
            f"rules of {_KEY}.rollout_rs={names or 'null'}; give one bound per rule, comma separated"
        )
    return [_rule(name, bound) for name, bound in zip(listed, bounds, strict=True)]


def _rule(name: str, bound: str) -> Rule:
    key = f"{_KEY}.rollout_rs_threshold"
    low, high = _bounds("rollout_rs_threshold", bound)
    if not name.endswith("k1"):
        if low is not None:
            raise ValueError(f"{key}: {name} takes one number, the largest value that is kept, not {bound!r}")
        return Rule(name, 0.0, high)
    if low is None and high <= 1.0:
        raise ValueError(
            f"{key}: {name} reads the single number {bound} as the bounds 1/{bound} to {bound}, which leave no ratio "
            "between them; give a number above 1, or both bounds as low_high"
        )
    return Rule(name, 1.0 / high if low is None else low, high)


def _bounds(key: str, text: str) -> tuple[float | None, float]:
    """Parse a threshold: `high` gives (None, high), `low_high` gives (low, high).

    Args:
        key: last part of the setting's name, for errors.
        text: value of the setting.

    Raises ValueError if the numbers are not positive and ascending.
    """
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{_KEY}.{key}: {text!r} is neither a number, such as 2.0, nor two of them, such as 0.5_2.0")
    if min(numbers) <= 0:
        raise ValueError(f"{_KEY}.{key}: {text!r} must be above 0")
    if len(numbers) == 1:
        return None, numbers[0]
    if numbers[0] >= numbers[1]:
        raise ValueError(f"{_KEY}.{key}: the bounds of {text!r} are upside down; the lower one comes first")
    return numbers[0], numbers[1]


class _Tokens:
    """N log ratios of R responses, with sums over responses.

    Args:
        log_ratio: [N] log ratios, 0 for masked tokens.
        trained: [N] bool, true for tokens that train.
        offsets: [R + 1] first token of each response, and N at the end.
    """

    def __init__(self, log_ratio: np.ndarray, trained: np.ndarray, offsets: np.ndarray):
        self.log_ratio, self.trained = log_ratio, trained
        self.rows = len(offsets) - 1
        self.row_index = np.repeat(np.arange(self.rows), np.diff(offsets))
        self.count = self.sum(trained)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """[R] sum of `values` [N] over each response."""
        return np.bincount(self.row_index, weights=values, minlength=self.rows)

    def aggregate(self, level: str, values: np.ndarray) -> np.ndarray:
        """Aggregate `values` [N] over each response.

        Returns [R] sums for the level `seq_sum`, means over trained tokens for `seq_mean`, and maxima for `seq_max` (of
        values >= 0); for `token` the values [N] themselves.
        """
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
    """Compute weights, kept tokens and metrics of R responses with N tokens in all.

    Args:
        correction: the correction; if it is not active, only metrics are computed.
        log_probs: [N] log-probs of the trainer: the old policy's in decoupled mode, the current one's in bypass mode.
        rollout_log_probs: [N] log-probs of the engine.
        mask: [N] 1 if the token trains; masked values have no influence.
        offsets: [R + 1] first token of each response, and N at the end; a response may be empty.
        all_sum: sums numbers over all ranks, and all ranks must call `correct`; `list` for a single process. None
            if the N tokens are only a part of the batch: then weights cannot be normalised, and
            `rollout_is_eff_sample_size` is left out.

    With `normalize`, weights are divided by their mean over the kept tokens (or responses with a kept token) of all
    ranks, unless that mean is 0.

    Raises ValueError if weights are to be normalised and `all_sum` is None.
    """
    if correction.normalize and all_sum is None:
        raise ValueError(
            f"{_KEY}.rollout_is_batch_normalize=true needs all weights of an iteration before the first step, which "
            "actor.old_log_probs=engine does not have; use actor.old_log_probs=recompute or leave it off"
        )
    trained = np.asarray(mask) > 0
    trainer = np.where(trained, np.asarray(log_probs, dtype=np.float64), 0.0)
    engine = np.where(trained, np.asarray(rollout_log_probs, dtype=np.float64), 0.0)
    # Infinite and undefined log ratios are handled below.
    with np.errstate(all="ignore"):
        tokens = _Tokens(trainer - engine, trained, np.asarray(offsets))
        stats = _gap(trainer, engine, tokens)
        keep, rejections = _reject(correction.rules, tokens)
        stats |= rejections
        weights = None
        if correction.level is not None:
            weights, weight_stats = _weigh(correction, tokens, keep, all_sum)
            stats |= weight_stats
    return Corrected(weights, keep, {f"rollout_corr/{name}": stat for name, stat in stats.items()})


def _reject(rules: tuple[Rule, ...], tokens: _Tokens) -> tuple[np.ndarray, Stats]:
    """Apply the rejection rules.

    Returns [N] bool, true for trained tokens that no rule rejects, and metrics: the fraction of tokens or responses
    that each rule rejects, and that all rules together reject.
    """
    trained, log_ratio = tokens.trained, tokens.log_ratio
    # Not `kl_estimate.estimate`, which clamps k3 to 10: a bound above that would reject nothing.
    distances = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": np.expm1(log_ratio) - log_ratio}
    keep = trained
    stats: Stats = {}
    for rule in rules:
        values = tokens.aggregate(rule.level, distances[rule.kind])
        if rule.kind == "k1":
            passed = (values >= math.log(rule.low)) & (values <= math.log(rule.high))
        else:
            passed = values <= rule.high
        units = trained if rule.level == "token" else tokens.count > 0
        stats[f"rollout_rs_{rule.name}_fraction"] = mean((units & ~passed).sum(), units.sum())
        keep = keep & (passed if rule.level == "token" else passed[tokens.row_index])
    if rules:
        lost = trained & ~keep
        stats["rollout_rs_masked_fraction"] = mean(lost.sum(), trained.sum())
        stats["rollout_rs_seq_masked_fraction"] = mean((tokens.sum(lost) > 0).sum(), (tokens.count > 0).sum())
    return keep, stats


def _weigh(
    correction: Correction, tokens: _Tokens, keep: np.ndarray, all_sum: AllSum | None
) -> tuple[np.ndarray, Stats]:
    """Compute importance weights [N], 0 for masked tokens, and their metrics.

    The metrics `mean`, `max`, `min`, `std` and the fractions describe the ratios before truncation. The effective
    sample size describes the weights of kept tokens, after truncation.

    Args:
        correction: has a `level`.
        tokens: the log ratios.
        keep: [N] bool, true for tokens that no rule rejects.
        all_sum: as in `correct`.
    """
    units, kept, log_ratios = tokens.trained, keep, tokens.log_ratio
    if correction.level == "sequence":
        units, kept, log_ratios = tokens.count > 0, tokens.sum(keep) > 0, tokens.sum(log_ratios)
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
            # Equal on all ranks, so the maximum is the value. If all weights are 0, no sample has an effect.
            size = total**2 / (count * squares) if squares else 0.0
            stats["rollout_is_eff_sample_size"] = Stat("max", (size,))
        if correction.normalize and total > 0:
            weights = weights * (count / total)
            stats["rollout_is_batch_norm_factor"] = Stat("max", (total / count,))
    if correction.level == "sequence":
        weights = weights[tokens.row_index]
    return np.where(tokens.trained, weights, 0.0), stats


def _gap(trainer: np.ndarray, engine: np.ndarray, tokens: _Tokens) -> Stats:
    """Compute metrics of the gap between the trainer's and the engine's policy.

    Per token: KL(engine || trainer), by k1 and k3, and chi squared(trainer || engine), which is the variance of r. Per
    response: the perplexities under both, and chi squared.

    Args:
        trainer, engine: [N] log-probs, 0 for masked tokens.
        tokens: the log ratios.
    """
    x = _clamped(tokens.log_ratio[tokens.trained & ~np.isnan(tokens.log_ratio)])
    sums = tokens.sum(tokens.log_ratio)
    rows = (tokens.count > 0) & ~np.isnan(sums)
    length = tokens.count[rows]
    log_ppl_diff = _clamped(-sums[rows] / length)
    values = {
        "kl": -x,
        "k3_kl": np.expm1(x) - x,
        "chi2_token": np.expm1(2 * x),
        "chi2_seq": np.expm1(2 * _clamped(sums[rows])),
        "training_ppl": np.exp(_clamped(-tokens.sum(trainer)[rows] / length)),
        "rollout_ppl": np.exp(_clamped(-tokens.sum(engine)[rows] / length)),
        "log_ppl_diff": log_ppl_diff,
        "ppl_ratio": np.exp(log_ppl_diff),
    }
    return {name: mean(numbers.sum(), len(numbers)) for name, numbers in values.items()}


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
