"""The baseline stage: writes the score of each prompt's greedy response into the column `baseline` of the group's rows.

The estimator `remax` (ReMax, Li et al. 2023) reads the column. The rollout stage generates the greedy response together
with the group, the reward stage scores it, and this stage removes its row from the stream. If scoring the greedy
response failed, all rows of the group get the error, so that the advantage stage masks them. In a replay the rows have
the column already, from the recording.
"""

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.rows import BASELINE, append

FAILED = "the reward of the greedy baseline failed: "


class Baseline:
    """Stage that turns the score of each row of split `baseline` into the column `baseline` (float32) of the other rows
    with the same uid."""

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the rows of `table` without the greedy responses, in the same order, with the column `baseline`.

        If scoring the greedy response failed, `baseline` is null, and `reward_error` has the reason, unless the row has
        an error of its own.

        Args:
            table: scored rows of whole groups, each group with one row of split `baseline`; or rows that have the
                column already.

        Raises ValueError if a row's group has no greedy response.
        """
        if "baseline" in table.column_names:
            failure = FAILED + "it failed in the run that was recorded"
            return _with_errors(table, pc.if_else(pc.is_null(table["baseline"]), failure, None))
        is_baseline = pc.equal(table["split"], "baseline")
        greedy, samples = table.filter(is_baseline), table.filter(pc.invert(is_baseline))
        group = pc.index_in(samples["uid"], value_set=greedy["uid"].combine_chunks())
        if group.null_count:
            alone = samples["uid"].filter(pc.is_null(group))
            raise ValueError(
                f"{len(alone)} of {len(samples)} rows have no greedy response, the first of them with uid "
                f"{alone[0].as_py()!r}: one row of split 'baseline' was expected for every uid; the rollout stage "
                "generates it if algorithm.adv_estimator needs baselines, and the stages between must keep it"
            )
        error = greedy["reward_error"]
        score = pc.if_else(pc.is_null(error), greedy["score"], None)
        failures = pc.binary_join_element_wise(FAILED, error, "")
        return append(_with_errors(samples, failures.take(group)), BASELINE, {"baseline": score.take(group)})


def _with_errors(table: pa.Table, errors: pa.ChunkedArray) -> pa.Table:
    """Return `table` with `errors` [rows] in the column `reward_error` of rows that had no error."""
    column = table.column_names.index("reward_error")
    return table.set_column(column, table.schema.field(column), pc.coalesce(table["reward_error"], errors))
