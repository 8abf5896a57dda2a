"""The advantage stage: computes one advantage per response token from the scores of finished rows.

A row whose reward failed stays in the stream, with advantages 0 and a `drop_reason`, so it does not train. It does not
count in its group's statistics. Validation rows get advantages 0.

With `algorithm.use_kl_in_reward` each trained token has a KL penalty, and a row's reward is its score minus the sum of
the penalties. If the score contains rewards that an environment gave to turns of an episode, each of these is placed on
the last trained token of its turn (`EstimatorInput.token_rewards`).
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.advantage.estimators import Estimate, EstimatorInput, get_adv_estimator
from pipeline.advantage.kl_controller import kl_penalty
from pipeline.config.algorithm import AlgorithmConfig
from pipeline.rows import ADVANTAGE, FLOATS, KL_COEF, SCHEMA, Spans, append, flat, per_token, ragged, spans_of
from pipeline.store.client import StoreClient
from pipeline.store.policy_store import PolicyStore

NEED_COLUMNS = {
    "values": "values",
    "baselines": "baseline",
    "sum_pi_squared": "sum_pi_squared",
    "parts": "reward_parts",
}
"""Name of the table's column for each entry of `Estimator.needs`."""


class Advantage:
    """Stage that adds the columns `ADVANTAGE` (advantages, returns, reward, kl, drop_reason).

    A table has whole groups if the estimator's `scope` is `group`, and all rows of an iteration if it is `batch`.

    Args:
        config: settings of the algorithm.
        store: has the KL coefficient of each policy version, for `use_kl_in_reward`; without a store, rows must have
            the column `kl_coef`.
        timeout: seconds without a heartbeat after which the wait for a version fails.
        turn_rewards: whether the score contains the rewards of turns, which are in the column `spans`.
        taught: whether rows have `teacher_log_probs`, for `teacher_coef`.

    Raises ValueError if `algorithm.adv_estimator` is unknown.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        store: StoreClient | None = None,
        timeout: float = 0.0,
        turn_rewards: bool = False,
        taught: bool = False,
    ) -> None:
        self._teacher_coef = config.teacher_coef if taught else 0.0
        self.config, self._store, self._timeout = config, store, timeout
        self._turn_rewards = turn_rewards
        self.estimator = get_adv_estimator(config.adv_estimator)
        self.scope, self.needs = self.estimator.scope, self.estimator.needs
        # Column to the part of the program that reads it, for errors.
        self._reads = dict.fromkeys(("uid", "score", "rollout_log_probs"), "the advantage stage reads")
        reader = f"algorithm.adv_estimator {config.adv_estimator!r} needs"
        self._reads |= {NEED_COLUMNS[need]: reader for need in self.needs}
        if turn_rewards:
            self._reads["spans"] = "agent.reward needs"
        if self._teacher_coef:
            self._reads["teacher_log_probs"] = "algorithm.teacher_coef needs"
        if config.use_kl_in_reward:
            self._reads |= dict.fromkeys(("ref_log_probs", "kl_coef"), "algorithm.use_kl_in_reward needs")

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return `table` with the columns `ADVANTAGE` added.

        Raises:
            ValueError: a needed column is missing, or a token column has not one entry per response token; a row
                without `reward_error` has a score, baseline, KL or KL coefficient that is not finite, or lacks a part
                of `algorithm.gdpo_reward_keys`; or the estimator returned a wrong number of tokens, or a number that
                is not finite.
        """
        if self.config.use_kl_in_reward and self._store is not None:
            versions = table["policy_version"].to_pylist()
            coefs = {
                version: self._store.wait(PolicyStore.kl_coef, version, self._timeout) for version in set(versions)
            }
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
            rows = _Rows(self._select(table, used), mask[tokens] > 0, lengths[used])
            if self.config.use_kl_in_reward:
                rows.penalise(self.config.kl_penalty)
            part_keys = self.config.gdpo_reward_keys if "parts" in self.needs else None
            data = rows.estimator_input(part_keys, self._turn_rewards)
            estimate = self._estimate(data, rows)
            advantages[tokens] = estimate.advantages * data.mask + rows.taught(self._teacher_coef)
            returns[tokens] = estimate.returns
            reward[used] = rows.rewards
            kl[used] = rows.kl
        columns = {
            "advantages": ragged(advantages.astype(np.float32), offsets, FLOATS),
            "returns": ragged(returns.astype(np.float32), offsets, FLOATS),
            "reward": pa.array(reward.astype(np.float32), from_pandas=True),
            "kl": pa.array(kl.astype(np.float32), from_pandas=True),
            "drop_reason": pc.if_else(pa.array(failed), "reward_error", pa.scalar(None, pa.string())),
        }
        return append(table, ADVANTAGE, columns)

    def _select(self, table: pa.Table, used: np.ndarray) -> pa.Table:
        """Return the rows with a true entry in `used` [rows of `table`], and only the columns that are read.

        Raises ValueError if a needed column is missing.
        """
        for name, reader in self._reads.items():
            if name not in table.column_names:
                writer = SCHEMA.field(name).metadata[b"writer"].decode()
                raise ValueError(
                    f"the rows have no column {name!r}, which {reader}; the stage {writer!r} should have written it "
                    "before the advantage stage"
                )
        there = [name for name in ("spans", "values", "baseline", "sum_pi_squared") if name in table.column_names]
        return table.select(list(dict.fromkeys([*self._reads, *there]))).filter(pa.array(used))

    def _estimate(self, data: EstimatorInput, rows: "_Rows") -> Estimate:
        name = f"estimator {self.estimator.name!r}"
        estimate = self.estimator.function(data, self.config)
        for kind, values in (("advantages", estimate.advantages), ("returns", estimate.returns)):
            if values.shape != data.mask.shape:
                raise ValueError(
                    f"{name} returned {kind} of shape {values.shape}; one number for each of the {len(data.mask)} "
                    "response tokens was expected"
                )
            if not np.isfinite(values).all():
                row = rows.row_of(np.flatnonzero(~np.isfinite(values))[0])
                raise ValueError(
                    f"{name} returned {kind} that are not finite, first for uid {rows.uid[row].as_py()}, whose reward "
                    f"is {data.rewards[row]}"
                )
        return estimate


class _Rows:
    """R rows that train, with N response tokens in all, as flat float64 arrays.

    Args:
        table: the rows.
        mask: [N] bool, true for tokens that train.
        lengths: [R] number of response tokens of each row.
    """

    def __init__(self, table: pa.Table, mask: np.ndarray, lengths: np.ndarray) -> None:
        self.table, self.mask = table, mask
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.uid = table["uid"].combine_chunks()
        self.scores = self._numbers("score", "has score {} and no reward_error; a reward function must return a number")
        self.log_probs = self._tokens("rollout_log_probs")
        self.penalties = np.zeros(len(mask))
        """[N] float64, KL penalty of each token, subtracted from the rewards."""
        self.rewards = self.scores
        """[R] float64, scores minus penalties."""
        self.kl = np.full(len(table), np.nan)
        """[R] float64, mean KL of the row's trained tokens, in nats; NaN if the row has none, or the reward no KL."""

    def penalise(self, kind: str) -> None:
        """Set `penalties`, `rewards` and `kl`: each trained token pays the row's coefficient times the KL to the
        reference.

        Args:
            kind: the KL estimate, a key of `pipeline.kl_estimate.NAMES`.
        """
        coef = self._numbers("kl_coef", "has kl_coef {}; the number published with its policy version was expected")
        kl = np.zeros(len(self.mask))
        reference = self._tokens("ref_log_probs")
        kl[self.mask] = kl_penalty(self.log_probs[self.mask], reference[self.mask], kind)
        bad = np.flatnonzero(~np.isfinite(kl))
        if len(bad):
            token = bad[0]
            raise ValueError(
                f"a row of uid {self.uid[self.row_of(token)].as_py()} has a KL to the reference policy of {kl[token]} "
                f"at a token with rollout_log_probs {self.log_probs[token]} and ref_log_probs {reference[token]}; both "
                "must be finite (a type such as float16 may overflow: scoring.reference.dtype)"
            )
        row_index = np.repeat(np.arange(len(coef)), np.diff(self.offsets))
        self.penalties = coef[row_index] * kl
        self.rewards = self.scores - np.bincount(row_index, self.penalties, len(coef))
        trained = np.bincount(row_index, self.mask, len(coef))
        total = np.bincount(row_index, kl, len(coef))
        self.kl = np.divide(total, trained, out=np.full(len(coef), np.nan), where=trained > 0)

    def taught(self, coef: float) -> np.ndarray:
        """[N] advantages of the teacher: `coef` times its log-prob minus the engine's, 0 for tokens that do not train.

        Raises ValueError if one is not finite.
        """
        if not coef:
            return np.zeros(len(self.mask))
        found = np.where(self.mask, self._tokens("teacher_log_probs") - self.log_probs, 0.0)
        bad = np.flatnonzero(~np.isfinite(found))
        if len(bad):
            raise ValueError(
                f"a row of uid {self.uid[self.row_of(bad[0])].as_py()} has a token whose log-prob under the teacher is "
                "not finite (a type such as float16 may overflow: teacher.dtype)"
            )
        return coef * found

    def estimator_input(self, part_keys: list[str] | None, turn_rewards: bool) -> EstimatorInput:
        """Build the estimator's input.

        Args:
            part_keys: reward parts that every row must have; None leaves out `parts`.
            turn_rewards: whether the reward of a turn is placed on the turn's last trained token.
        """
        there = self.table.column_names
        spans = spans_of(self.table, self.offsets) if "spans" in there else None
        baseline = "has baseline {} and no reward_error; the baseline stage writes one of both"
        return EstimatorInput(
            rewards=self.rewards,
            group=self.uid.dictionary_encode().indices.to_numpy().astype(np.int64),
            offsets=self.offsets,
            mask=self.mask,
            token_rewards=self._scores_on_tokens(spans if turn_rewards else None) - self.penalties,
            log_probs=self.log_probs,
            values=self._tokens("values") if "values" in there else None,
            baselines=self._numbers("baseline", baseline) if "baseline" in there else None,
            sum_pi_squared=self._tokens("sum_pi_squared") if "sum_pi_squared" in there else None,
            turns=None if spans is None else np.repeat(spans.turn, np.diff(spans.tokens)),
            parts=None if part_keys is None else self._parts(part_keys),
        )

    def row_of(self, token: int) -> int:
        """Return the number of the row that contains the token with index `token` (0 to N - 1)."""
        return int(np.searchsorted(self.offsets, token, side="right")) - 1

    def _tokens(self, name: str) -> np.ndarray:
        return per_token(self.table, name, self.offsets).astype(np.float64)

    def _numbers(self, name: str, complaint: str) -> np.ndarray:
        """[R] the column `name`, which must have one finite number per row.

        Args:
            name: the column.
            complaint: end of the error's sentence; `{}` becomes the wrong value.
        """
        values = self.table[name].to_numpy().astype(np.float64)
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            value = self.table[name][int(bad[0])].as_py()
            raise ValueError(f"a row of uid {self.uid[bad[0]].as_py()} {complaint.format(value)}")
        return values

    def _parts(self, keys: list[str]) -> dict[str, np.ndarray]:
        """Return the score and each reward part that is a number or bool in every row: name to [R].

        Args:
            keys: names of parts that every row must have.
        """
        found = []
        for text in self.table["reward_parts"].to_pylist():
            parts = json.loads(text or "{}")
            found.append({name: float(value) for name, value in parts.items() if isinstance(value, (int, float))})
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

    def _scores_on_tokens(self, spans: Spans | None) -> np.ndarray:
        """[N] each row's score on the row's last trained token, 0 elsewhere; all 0 in a row without trained tokens.

        With `spans`, the reward of a turn is on the turn's last trained token, and the rest of the score on the row's.
        """
        token_rewards, rest = np.zeros(len(self.mask)), self.scores
        if spans is not None:
            last = self._last_trained(spans.tokens[:-1], spans.tokens[1:])
            paid = (last >= 0) & np.isfinite(spans.reward)
            token_rewards[last[paid]] = spans.reward[paid]
            row, reward = spans.row[paid], spans.reward[paid]
            rest = rest - np.bincount(row, reward, len(rest))
            # The score is a sum in float32, so the rest may be rounding.
            size = np.abs(self.scores) + np.bincount(row, np.abs(reward), len(rest))
            rest = np.where(np.abs(rest) <= np.finfo(np.float32).eps * size, 0.0, rest)
        last = self._last_trained(self.offsets[:-1], self.offsets[1:])
        token_rewards[last[last >= 0]] += rest[last >= 0]
        return token_rewards

    def _last_trained(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[K] int64, index of the last trained token in each range `begins[k]:ends[k]` of tokens; -1 if none trains.

        Args:
            begins, ends: [K] token indices.
        """
        trained = np.concatenate([[-1], np.flatnonzero(self.mask)])
        last = trained[np.searchsorted(trained, ends) - 1]
        return np.where(last >= begins, last, -1)
