"""The value stage: finished rows in, the critic's value before every response token added.

Values come from a replica of the critic at the version of the policy that generated the rows, or at a newer one where
the trainer is ahead; both are published together, so rows and weights of a version are there at the same time.
"""

import numpy as np
import pyarrow as pa
from torch import Tensor

from pipeline.config import Config
from pipeline.models.packing import ModelInputs
from pipeline.models.value import ValueModel, load_value_model
from pipeline.rows import VALUE, append
from pipeline.scoring.replica import Replica, StoreWeights, scoring_model
from pipeline.store.client import StoreClient
from pipeline.store.versions import CRITIC


class Value:
    """One replica of the critic.

    Args:
        config: the run's configuration.
        store: the policy store, for this attempt.

    Raises:
        ValueError: the model cannot be loaded, or cannot become a critic.
    """

    def __init__(self, config: Config, store: StoreClient):
        scorer = config.scoring.value
        model = scoring_model(config.model, scorer, config.critic.fsdp)
        self._replica = Replica(
            lambda: load_value_model(model, config.critic.path), scorer, "value", model.share_prompts
        )
        timeout = config.trainer.deadlines.publish
        self._weights = StoreWeights(self._replica.module, store, CRITIC, timeout)

    def __call__(self, table: pa.Table) -> pa.Table:
        """`table` with the columns `VALUE` added.

        Raises:
            see `StoreWeights.bring_to` and `Replica.score`.
        """
        version = self._weights.bring_to_rows(table)
        values = self._replica.score(table, _values)
        return append(table, VALUE, {"values": values, "value_version": np.full(len(table), version)})


def _values(module: ValueModel, batch: ModelInputs) -> Tensor:
    return module(batch.input_ids, batch.logit_index, batch.positions, batch.segment_ids)
