"""The filter stage of dynamic sampling (DAPO, Yu et al. 2025, section 3.2): it removes groups with equal rewards.

In such a group all advantages are 0, so nothing can be learnt from it. One Ray actor takes the scored chunks in the
order of the stream, decides which groups are kept (`ledger.py`), and reports the number of dropped groups to the policy
store, which then admits further chunks. The kept rows get the number of the iteration that trains on them. A
repartition after this stage joins them to whole chunks again.

The filter ignores rows whose reward failed. A group with fewer than two other rows is dropped, and counted as `failed`,
not as `equal`. `reward.max_error_rate` is checked here on all generated rows, because the trainer gets only the kept
ones.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dynamic_sampling.ledger import ChunkStats, Decision, FilterRules, IterationStats, Ledger
from pipeline.errors import FinalError
from pipeline.store.client import StoreClient
from pipeline.store.errors import StaleAttempt
from pipeline.store.policy_store import PolicyStore

SCORE = "score"


class Filter:
    """The filter stage, which runs as a single Ray actor.

    Args:
        rules: the settings of the filter.
        store: the policy store, for this attempt.
        timeout: seconds to wait for the train workers (`trainer.deadlines.engine_start`).
    """

    def __init__(self, rules: FilterRules, store: StoreClient, timeout: float):
        self._rules, self._store, self._timeout = rules, store, timeout
        self._ledger: Ledger | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the rows of a chunk that will be trained, with the column `iteration` filled in.

        Args:
            table: scored rows of one chunk, in whole groups.

        Raises:
            FinalError: an iteration cannot be filled, or the reward fails too often.
            StaleAttempt: this actor replaces one that died, and has no ledger of the earlier chunks.
            ValueError: the rows lack `algorithm.filter_groups.metric`.
        """
        if not len(table):
            return table
        rules, chunk = self._rules, table["chunk"][0].as_py()
        group, found = judge(table, rules.metric)
        decision = self._decide(chunk, found)
        if complaint := self._complaint(table, decision):
            raise FinalError(complaint)
        number = np.full(found.groups, -1)
        number[found.kept[: decision.taken]] = decision.first + np.arange(decision.taken)
        number = number[group]  # [R]
        kept = number >= 0
        number, table = number[kept], table.filter(pa.array(kept))
        iteration = decision.iteration + number // rules.batch - decision.first // rules.batch
        column = table.column_names.index("iteration")
        return table.set_column(column, table.schema.field(column), pa.array(iteration, pa.int64()))

    def _decide(self, chunk: int, found: ChunkStats) -> Decision:
        if self._ledger is None:
            state = self._store.wait(PolicyStore.trainer_state, self._timeout)
            self._ledger = Ledger(self._rules, state.version)
        ledger = self._ledger
        if decision := ledger.known(chunk):
            return decision
        if chunk != ledger.following:
            raise StaleAttempt(
                f"the filter stage got chunk {chunk} but expected {ledger.following}: its process died and lost count "
                "of the groups, so the train workers must restart"
            )
        decision = ledger.decide(chunk, found)
        if decision.full:
            metrics = decision.stats.metrics(self._rules.batch)
            self._store.call(PolicyStore.report_filled, decision.iteration, *decision.used, metrics)
        self._store.call(PolicyStore.report_groups, ledger.kept, ledger.dropped)
        return decision

    def _complaint(self, table: pa.Table, decision: Decision) -> str | None:
        """Return a sentence on why the run must end, if an iteration is complete or exhausted; None if it may go on."""
        stats, iteration = decision.stats, decision.iteration
        if not decision.full and not decision.exhausted:
            return None
        limit = self._rules.max_error_rate
        if stats.errors > limit * stats.rows:
            errors = table["reward_error"].drop_null()
            first = f"; one of them: {errors[0].as_py()}" if len(errors) else ""
            return (
                f"the reward failed for {stats.errors / stats.rows:.0%} of the rows generated for iteration "
                f"{iteration}, more than reward.max_error_rate={limit:.0%}{first}"
            )
        return exhausted(self._rules, iteration, stats) if decision.exhausted else None


def exhausted(rules: FilterRules, iteration: int, stats: IterationStats) -> str:
    """Format the error message for an iteration that has too few kept groups after all allowed batches."""
    dropped = stats.equal + stats.failed
    failed = f" and {stats.failed} had fewer than two responses with a reward" if stats.failed else ""
    way_out = (
        "all rewards of every group are equal, so nothing can be learnt: look at the reward and at the responses in "
        "trajectories/, take other prompts, or raise rollout.n or rollout.temperature"
        if dropped == stats.groups
        else "raise algorithm.filter_groups.max_num_gen_batches or rollout.n, or take prompts that the policy solves "
        "now and then"
    )
    return (
        f"iteration {iteration} is not full after {stats.groups} groups, "
        f"algorithm.filter_groups.max_num_gen_batches={rules.max_num_gen_batches} x "
        f"data.train_batch_size={rules.batch}: {dropped / stats.groups:.0%} of them were dropped, "
        f"{stats.equal} because their {rules.metric} agrees{failed}; {way_out}"
    )


def judge(table: pa.Table, metric: str) -> tuple[np.ndarray, ChunkStats]:
    """Decide which groups of a chunk have different values of a metric.

    Args:
        table: R scored training rows, in whole groups (rows with the same `uid`).
        metric: `score`, or the name of a reward part.

    Returns:
        the group number of each row, [R] from 0, and the counts, with the numbers of the kept groups.

    Raises:
        ValueError: a row whose reward did not fail lacks the metric.
    """
    group = table["uid"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    groups = int(group.max()) + 1
    good = pc.is_null(table["reward_error"]).to_numpy()
    values = numbers(table, metric, good)
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, group[good], values)
    np.maximum.at(high, group[good], values)
    failed = np.bincount(group[good], minlength=groups) < 2
    equal = ~failed & (low == high)
    return group, ChunkStats(
        groups=groups,
        kept=np.flatnonzero(~failed & ~equal).tolist(),
        equal=int(equal.sum()),
        failed=int(failed.sum()),
        rows=len(table),
        errors=int((~good).sum()),
        score=float(table["score"].to_numpy()[good].astype(np.float64).sum()),
    )


def numbers(table: pa.Table, metric: str, good: np.ndarray) -> np.ndarray:
    """Return the values of `metric`, float64, in the rows whose entry in `good` [R] bool is true; see `judge`."""
    if metric == SCORE:
        return table[SCORE].to_numpy()[good].astype(np.float64)
    chosen = table.filter(pa.array(good))
    found = [json.loads(text or "{}") for text in chosen["reward_parts"].to_pylist()]
    for row, parts in enumerate(found):
        if not isinstance(parts.get(metric), (int, float)):
            known = sorted(name for name, value in parts.items() if isinstance(value, (int, float)))
            raise ValueError(
                f"algorithm.filter_groups.metric={metric}: the reward of a row of uid {chosen['uid'][row].as_py()} "
                f"({chosen['data_source'][row].as_py()}) has no number of that name; there are: "
                f"{', '.join(['score', *known])}"
            )
    return np.array([float(parts[metric]) for parts in found])
