"""The rollout stage of a run that replays another: prompt rows in, the responses recorded of them out.

The stage asks the policy store for admission as an engine does, so the rest of the stream is paced and numbered as in
any run, and a scoring stage finds the version that a row names. Tokens and log-probs are those of the recording: the
policy that made them is another one than the version that a row names, as soon as the two have parted.
"""

import asyncio

import numpy as np
import pyarrow as pa

from pipeline import rows
from pipeline.config import Config
from pipeline.derived import uses_baselines
from pipeline.prompts.recording import Recording
from pipeline.rollout.policy_source import PolicySource
from pipeline.store.versions import Ticket


class Replay:
    """The one actor of the stage.

    Args:
        config: the run's configuration.
        policy: admits chunks.
    """

    def __init__(self, config: Config, policy: PolicySource):
        data = config.data
        assert data.recorded_run is not None
        self._recording = Recording(data.recorded_run, data.recorded_iterations)
        self._policy = policy
        self._baselines = uses_baselines(config)
        self._deadline = config.trainer.deadlines.chunk

    async def __call__(self, table: pa.Table) -> pa.Table:
        """Rows of one chunk to as many for each as the recording has, with the columns `rows.ROLLOUT`.

        Where the estimator reads baselines, the recorded column comes along, and there are no rows of greedy responses.

        Raises:
            TimeoutError: the files were not read in time.
            ValueError: a file of the recording cannot be read any more.
        """
        split, chunk, iteration = (table[name][0].as_py() for name in ("split", "chunk", "iteration"))
        ticket = await self._policy.admit(split, chunk, iteration)
        assert ticket is not None  # groups are not filtered
        reading = asyncio.to_thread(self._recording.responses, table["offset"].to_pylist(), self._baselines)
        try:
            recorded = await asyncio.wait_for(reading, self._deadline)
        except TimeoutError:
            raise TimeoutError(
                f"the recorded responses of chunk {chunk} were not read from {self._recording.run_dir} within "
                f"{self._deadline:.0f} s (trainer.deadlines.chunk)"
            ) from None
        return self._rows(table.take(np.repeat(np.arange(len(table)), self._recording.n)), recorded, ticket)

    def _rows(self, prompts: pa.Table, recorded: pa.Table, ticket: Ticket) -> pa.Table:
        count = len(prompts)
        tokens = np.diff(rows.flat(recorded, "response_ids")[1])
        stamped = {
            "policy_version": np.full(count, ticket.version),
            "version_runs": rows.version_runs(np.full(count, ticket.version), tokens, np.arange(count + 1)),
            # Nothing is generated, nothing loaded.
            "generate_s": pa.nulls(count, pa.float32()),
            "load_s": pa.nulls(count, pa.float32()),
        }
        kept = {name: recorded[name] for name in rows.ROLLOUT.names if name not in stamped}
        table = rows.append(prompts, rows.ROLLOUT, kept | stamped)
        return rows.append(table, rows.BASELINE, {"baseline": recorded["baseline"]}) if self._baselines else table
