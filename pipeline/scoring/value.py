"""The value stage: the critic's value of the state before every response token.

Values come from a replica of the critic. Its version is the policy version that generated the rows, or a newer one:
policy and critic are published together, with one version number.
"""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from pipeline.config.learner import CriticConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ScorerConfig
from pipeline.config.trainer import DeadlineConfig
from pipeline.derived import scoring_model
from pipeline.rows import VALUE, append
from pipeline.store.client import StoreClient
from pipeline.store.versions import CRITIC

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.packing import ModelInputs
    from pipeline.models.value import ValueModel


class Value:
    """Stage that adds the columns `values` and `value_version`."""

    def __init__(
        self,
        model: ModelConfig,
        scorer: ScorerConfig,
        critic: CriticConfig,
        store: StoreClient,
        deadlines: DeadlineConfig,
        longest: int | None = None,
    ) -> None:
        # Only the process of the stage needs torch; others import this module to plan the stream.
        from pipeline.models.value import load_value_model
        from pipeline.scoring.replica import Replica, StoreWeights

        model = scoring_model(model, scorer, critic.fsdp)
        self._replica = Replica(
            lambda: load_value_model(model, critic.path, longest=longest),
            scorer,
            "value",
            model.share_prompts,
            store,
            deadlines.admission,
        )
        self._weights = StoreWeights(self._replica.module, store, CRITIC, deadlines)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return `table` with the column `values`, one float32 per response token, and `value_version`."""
        version = self._weights.bring_to(table)
        values = self._replica.score(table, _values)
        return append(table, VALUE, {"values": values, "value_version": np.full(len(table), version)})


def _values(module: "ValueModel", batch: "ModelInputs") -> "Tensor":
    return module(batch.input_ids, batch.logit_index, batch.positions, batch.packing, batch.images)
