"""The advantage stage: scores of finished rows become one advantage per response token.

A row whose reward failed keeps its place in the stream but takes no part: it is left out of its group's statistics (a
group of n with one failure is a group of n - 1; GRPO gives 0 to the one row that is left alone), and leaves with
advantages 0 and a `drop_reason`, so that it trains nothing. Validation rows get advantages 0.

With `algorithm.use_kl_in_reward` each token that trains pays the KL to the reference policy, and a row's reward is its
score less all it pays. Tokens of tools and environments are not the policy's doing and cost nothing.
"""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.advantage.estimators import Estimate, EstimatorInput, get_adv_estimator
from pipeline.advantage.kl import check_kind, kl_penalty
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.rows import ADVANTAGE, FLOATS, KL_COEF, SCHEMA, append, flat, ragged
from pipeline.store.client import StoreClient
from pipeline.store.policy_store import PolicyStore

NEED_COLUMNS = {
    "values": "values",
    "baselines": "baseline",
    "sum_pi_squared": "sum_pi_squared",
    "parts": "reward_parts",
}
"""The column behind each need of an estimator."""


class Advantage:
    """Stage that adds the columns `ADVANTAGE` to a table of whole groups.

    `scope` tells the stream what a table must hold: whole groups (`group`), or a whole iteration (`batch`); `needs`
    tells which further columns it must hold.

    Raises:
        ValueError: `algorithm.adv_estimator` or `algorithm.kl_penalty` is unknown.
    """

    def __init__(self, config: AlgorithmConfig, store: StoreClient | None = None) -> None:
        """
        Args:
            config: settings of the algorithm.
            store: the policy store, which knows the coefficient of the KL in the reward that belongs to a policy
                version; without it the rows must have the column `kl_coef` where it is needed.
        """
        self.config, self._store = config, store
        self.estimator = get_adv_estimator(config.adv_estimator)
        # Column to who reads it.
        self._reads = dict.fromkeys(("uid", "score", "rollout_log_probs"), "the advantage stage reads")
        reader = f"algorithm.adv_estimator {config.adv_estimator!r} needs"
        self._reads |= {NEED_COLUMNS[need]: reader for need in self.needs}
        if config.use_kl_in_reward:
            check_kind(config.kl_penalty)
            self._reads |= dict.fromkeys(("ref_log_probs", "kl_coef"), "algorithm.use_kl_in_reward needs")

    @property
    def scope(self) -> str:
        return self.estimator.scope

    @property
    def needs(self) -> tuple[str, ...]:
        """Of `NEEDS`, what the estimator reads beyond rewards."""
        return self.estimator.needs

    def __call__(self, table: pa.Table) -> pa.Table:
        """`table` with the columns `ADVANTAGE` added.

        Raises:
            ValueError: a column that is needed is missing or has not one entry per response token; a row without
                `reward_error` has no finite score, no baseline where there are baselines, a KL or KL coefficient that
                is not finite, or lacks a part of `algorithm.gdpo_reward_keys` where the estimator needs parts; or the
                estimator returned another number of tokens or a number that is not finite.
        """
        if self.config.use_kl_in_reward and self._store is not None:
            versions = table["policy_version"].to_pylist()
            coefs = {version: self._store.call(PolicyStore.kl_coef, version) for version in set(versions)}
            table = append(table, KL_COEF, {"kl_coef": [coefs[version] for version in versions]})
        mask, offsets = flat(table, "response_mask")
        lengths = np.diff(offsets)
        train = pc.not_equal(table["split"], "val").to_numpy()
        failed = train & pc.is_valid(table["reward_error"]).to_numpy()
        advantages = np.zeros(len(mask))
        returns = np.zeros(len(mask))
        reward = table["score"].to_numpy().astype(np.float64)
        kl = np.full(len(table), np.nan)
        used = train & ~failed
        if used.any():
            tokens = np.repeat(used, lengths)
            rows = _Used(self._select(table, used), mask[tokens] > 0, lengths[used])
            if self.config.use_kl_in_reward:
                rows.penalise(self.config.kl_penalty)
            data = rows.estimator_input(self.config, self.needs)
            estimate = self._estimate(data, rows)
            advantages[tokens], returns[tokens] = estimate.advantages * data.mask, estimate.returns
            reward[used], kl[used] = rows.rewards, rows.kl
        return append(
            table,
            ADVANTAGE,
            {
                "advantages": ragged(advantages.astype(np.float32), offsets, FLOATS),
                "returns": ragged(returns.astype(np.float32), offsets, FLOATS),
                "reward": pa.array(reward.astype(np.float32), from_pandas=True),
                "kl": pa.array(kl.astype(np.float32), from_pandas=True),
                "drop_reason": pc.if_else(pa.array(failed), "reward_error", pa.scalar(None, pa.string())),
            },
        )

    def _select(self, table: pa.Table, used: np.ndarray) -> pa.Table:
        """The rows `used` [R] with the columns that are read, and those optional ones that are there."""
        for name, reader in self._reads.items():
            if name not in table.column_names:
                writer = SCHEMA.field(name).metadata[b"writer"].decode()
                raise ValueError(
                    f"the rows have no column {name!r}, which {reader}; the stage {writer!r} should have written it "
                    "before the advantage stage"
                )
        there = [name for name in ("values", "baseline", "sum_pi_squared") if name in table.column_names]
        return table.select(list(dict.fromkeys([*self._reads, *there]))).filter(pa.array(used))

    def _estimate(self, data: EstimatorInput, rows: "_Used") -> Estimate:
        estimate = self.estimator.function(data, self.config)
        for name, values in (("advantages", estimate.advantages), ("returns", estimate.returns)):
            if values.shape != data.mask.shape:
                raise ValueError(
                    f"estimator {self.estimator.name!r} returned {name} of shape {values.shape}; one number for each "
                    f"of the {len(data.mask)} response tokens was expected"
                )
            if not np.isfinite(values).all():
                row = rows.row_of(np.flatnonzero(~np.isfinite(values))[0])
                raise ValueError(
                    f"estimator {self.estimator.name!r} returned {name} that are not finite, first for uid "
                    f"{rows.uid[row].as_py()}, whose reward is {data.rewards[row]}"
                )
        return estimate


class _Used:
    """The rows that take part, R with N response tokens in all, as flat float64 arrays.

    Args:
        table: the rows.
        mask: [N] bool, tokens that train.
        lengths: [R] response tokens of each row.
    """

    def __init__(self, table: pa.Table, mask: np.ndarray, lengths: np.ndarray) -> None:
        self.table, self.mask = table, mask
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.uid = table["uid"].combine_chunks()
        self.scores = self._numbers("score", "has score {} and no reward_error; a reward function must return a number")
        self.log_probs = self._tokens("rollout_log_probs")
        self.penalties = np.zeros(len(mask))
        """[N], subtracted from the rewards."""
        self.rewards = self.scores
        """[R], scores less penalties."""
        self.kl = np.full(len(table), np.nan)
        """[R], mean KL of the tokens that train; NaN where nobody asked or nothing trains."""

    def penalise(self, kind: str) -> None:
        """Take the KL `kind` to the reference, times the row's coefficient, from the rewards of trained tokens."""
        coef = self._numbers("kl_coef", "has kl_coef {}; the number published with its policy version was expected")
        per_token = np.zeros(len(self.mask))
        reference = self._tokens("ref_log_probs")
        per_token[self.mask] = kl_penalty(self.log_probs[self.mask], reference[self.mask], kind)
        bad = np.flatnonzero(~np.isfinite(per_token))
        if len(bad):
            row = self.row_of(bad[0])
            raise ValueError(
                f"a row of uid {self.uid[row].as_py()} has a KL to the reference policy of {per_token[bad[0]]} at a "
                f"token with rollout_log_probs {self.log_probs[bad[0]]} and ref_log_probs {reference[bad[0]]}; both "
                "must be finite (a type such as float16 may overflow: scoring.reference.dtype)"
            )
        owner = np.repeat(np.arange(len(coef)), np.diff(self.offsets))
        self.penalties = coef[owner] * per_token
        self.rewards = self.scores - np.bincount(owner, self.penalties, len(coef))
        trained = np.bincount(owner, self.mask, len(coef))
        total = np.bincount(owner, per_token, len(coef))
        self.kl = np.divide(total, trained, out=np.full(len(coef), np.nan), where=trained > 0)

    def estimator_input(self, config: AlgorithmConfig, needs: tuple[str, ...]) -> EstimatorInput:
        """What the estimator sees: what it needs, and what else is there."""
        there = self.table.column_names
        baseline = "has baseline {} and no reward_error; the baseline stage writes one of both"
        return EstimatorInput(
            rewards=self.rewards,
            group=self.uid.dictionary_encode().indices.to_numpy().astype(np.int64),
            offsets=self.offsets,
            mask=self.mask,
            token_rewards=on_last_token(self.scores, self.offsets, self.mask) - self.penalties,
            log_probs=self.log_probs,
            values=self._tokens("values") if "values" in there else None,
            baselines=self._numbers("baseline", baseline) if "baseline" in there else None,
            sum_pi_squared=self._tokens("sum_pi_squared") if "sum_pi_squared" in there else None,
            parts=self._parts(config.gdpo_reward_keys) if "parts" in needs else None,
        )

    def row_of(self, token: int) -> int:
        """The row that a token belongs to."""
        return int(np.searchsorted(self.offsets, token, side="right")) - 1

    def _numbers(self, name: str, complaint: str) -> np.ndarray:
        """[R] a column of one finite number per row; `complaint` says what another one means."""
        values = self.table[name].to_numpy().astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            value = self.table[name][int(bad[0])].as_py()
            raise ValueError(f"a row of uid {self.uid[bad[0]].as_py()} {complaint.format(value)}")
        return values

    def _tokens(self, name: str) -> np.ndarray:
        """[N] a column of one number per response token."""
        values, offsets = flat(self.table, name)
        if not np.array_equal(offsets, self.offsets):
            counts, lengths = np.diff(offsets), np.diff(self.offsets)
            row = int(np.flatnonzero(counts != lengths)[0])
            raise ValueError(
                f"a row of uid {self.uid[row].as_py()} has {counts[row]} entries in {name!r} but {lengths[row]} "
                "response tokens; there must be one entry per response token"
            )
        return values.astype(np.float64)

    def _parts(self, keys: list[str]) -> dict[str, np.ndarray]:
        """The score and every part of the reward that is a number (or truth value) in every row, each [R]."""
        found = [_numeric(json.loads(text or "{}")) for text in self.table["reward_parts"].to_pylist()]
        for key in keys:
            missing = [row for row, parts in enumerate(found) if key != "score" and key not in parts]
            if missing:
                known = ", ".join(["score", *sorted(found[missing[0]])])
                raise ValueError(
                    f"algorithm.gdpo_reward_keys names {key!r}, but the reward function returned no number of that "
                    f"name for a row of uid {self.uid[missing[0]].as_py()} (it returned {known})"
                )
        common = set[str].intersection(*(set(parts) for parts in found)) - {"score"}
        columns = {name: np.array([parts[name] for parts in found]) for name in sorted(common)}
        return {"score": self.scores, **columns}


def _numeric(parts: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in parts.items() if isinstance(value, (int, float))}


def on_last_token(rewards: np.ndarray, offsets: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[N] each row's reward [R] on its last token with a true mask [N], 0 elsewhere; a row without one places none."""
    token_rewards = np.zeros(len(mask))
    chosen = np.flatnonzero(mask)
    before = np.searchsorted(chosen, offsets[1:]) - 1
    last = chosen[np.maximum(before, 0)] if len(chosen) else np.full(len(rewards), -1)
    placed = (before >= 0) & (last >= offsets[:-1])
    token_rewards[last[placed]] = rewards[placed]
    return token_rewards
