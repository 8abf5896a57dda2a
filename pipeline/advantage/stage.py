"""The advantage stage: scores of finished rows become one advantage per response token.

A row whose reward failed keeps its place in the stream but takes no part: it is left out of its group's statistics (a
group of n with one failure is a group of n - 1; GRPO gives 0 to the one row that is left alone), and leaves with
advantages 0 and a response mask of zeros, so that it trains nothing. Validation rows get advantages 0.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.advantage.config import AlgorithmConfig
from pipeline.advantage.estimators import EstimatorInput, get_adv_estimator
from pipeline.rows import ADVANTAGE, FLOATS, ROLLOUT, append, flat, ragged


class Advantage:
    """Stage that adds `advantages` and `returns` to a table of whole groups.

    `scope` tells the stream what a table must hold: whole groups (`group`), or a whole iteration (`batch`).

    Raises:
        ValueError: `algorithm.adv_estimator` is unknown.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.estimator = get_adv_estimator(config.adv_estimator)

    @property
    def scope(self) -> str:
        return self.estimator.scope

    def __call__(self, table: pa.Table) -> pa.Table:
        """`table` with the columns `ADVANTAGE` added (float32) and the response mask of failed rows set to 0.

        Raises:
            ValueError: a row without `reward_error` has no finite score, or the estimator returned another number of
                tokens or a number that is not finite.
        """
        mask, offsets = flat(table, "response_mask")
        lengths = np.diff(offsets)
        train = pc.not_equal(table["split"], "val").to_numpy()
        failed = train & pc.is_valid(table["reward_error"]).to_numpy()
        if failed.any():
            mask = np.where(np.repeat(failed, lengths), 0, mask).astype(np.int8)
            field = ROLLOUT.field("response_mask")
            table = table.set_column(
                table.column_names.index("response_mask"), field, ragged(mask, offsets, field.type)
            )
        advantages = np.zeros(len(mask))
        returns = np.zeros(len(mask))
        used = train & ~failed
        if used.any():
            tokens = np.repeat(used, lengths)
            advantages[tokens], returns[tokens] = self._estimate(table, used, mask[tokens] > 0, lengths[used])
        return append(
            table,
            ADVANTAGE,
            {
                "advantages": ragged(advantages.astype(np.float32), offsets, FLOATS),
                "returns": ragged(returns.astype(np.float32), offsets, FLOATS),
            },
        )

    def _estimate(
        self, table: pa.Table, used: np.ndarray, mask: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        rewards = table["score"].to_numpy()[used].astype(np.float64)
        uid = table["uid"].filter(pa.array(used)).combine_chunks()
        if not np.isfinite(rewards).all():
            row = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise ValueError(
                f"a row of uid {uid[row].as_py()} has score {rewards[row]} and no reward_error; a reward function must "
                "return a finite number"
            )
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        data = EstimatorInput(
            rewards=rewards,
            group=uid.dictionary_encode().indices.to_numpy().astype(np.int64),
            offsets=offsets,
            mask=mask,
            token_rewards=on_last_token(rewards, offsets, mask),
        )
        estimate = self.estimator.function(data, self.config)
        for name, values in (("advantages", estimate.advantages), ("returns", estimate.returns)):
            if values.shape != mask.shape:
                raise ValueError(
                    f"estimator {self.estimator.name!r} returned {name} of shape {values.shape}; one number for each "
                    f"of the {len(mask)} response tokens was expected"
                )
            if not np.isfinite(values).all():
                row = int(np.searchsorted(offsets, np.flatnonzero(~np.isfinite(values))[0], side="right")) - 1
                raise ValueError(
                    f"estimator {self.estimator.name!r} returned {name} that are not finite, first for uid "
                    f"{uid[row].as_py()}, whose reward is {rewards[row]}"
                )
        return estimate.advantages * mask, estimate.returns


def on_last_token(rewards: np.ndarray, offsets: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[N] each row's reward [R] on its last token with a true mask [N], 0 elsewhere; a row without one places none."""
    token_rewards = np.zeros(len(mask))
    chosen = np.flatnonzero(mask)
    before = np.searchsorted(chosen, offsets[1:]) - 1
    last = chosen[np.maximum(before, 0)] if len(chosen) else np.full(len(rewards), -1)
    placed = (before >= 0) & (last >= offsets[:-1])
    token_rewards[last[placed]] = rewards[placed]
    return token_rewards
