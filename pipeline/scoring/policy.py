"""The policy stage: the squared probabilities of the policy, summed over the vocabulary, for optimal token baselines.

The engine returns only the probability of the sampled token, so a replica of the policy runs over the responses once
more. The replica's weights may be newer than the weights that generated a row; `pi_version` records their version.
"""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from pipeline.config.learner import ActorConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ScorerConfig
from pipeline.config.trainer import DeadlineConfig
from pipeline.derived import scoring_model
from pipeline.rows import POLICY as COLUMNS
from pipeline.rows import append
from pipeline.store.client import StoreClient
from pipeline.store.versions import POLICY

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.packing import ModelInputs
    from pipeline.models.policy import Policy


class PolicyScore:
    """Stage that adds the columns `sum_pi_squared` and `pi_version`, at the sampling temperature of the rollout."""

    def __init__(
        self,
        model: ModelConfig,
        scorer: ScorerConfig,
        actor: ActorConfig,
        temperature: float,
        store: StoreClient,
        deadlines: DeadlineConfig,
        longest: int | None = None,
    ) -> None:
        # Only the process of the stage needs torch; others import this module to plan the stream.
        from pipeline.models.policy import Policy, load_policy
        from pipeline.scoring.replica import Replica, StoreWeights

        self._temperature, self._chunk_tokens = temperature, actor.logits_chunk_tokens
        model = scoring_model(model, scorer, actor.fsdp)
        self._replica = Replica(
            lambda: load_policy(model, longest=longest),
            scorer,
            "policy",
            model.share_prompts,
            store,
            deadlines.admission,
        )
        self._weights = StoreWeights(self._replica.module, store, POLICY, deadlines, Policy.hf_name)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return `table` with the column `sum_pi_squared`, one float32 number per response token, and `pi_version`."""
        version = self._weights.bring_to(table)
        sums = self._replica.score(table, self._sum_pi_squared, routes=True)
        return append(table, COLUMNS, {"sum_pi_squared": sums, "pi_version": np.full(len(table), version)})

    def _sum_pi_squared(self, policy: "Policy", batch: "ModelInputs") -> "Tensor":
        return policy.sum_pi_squared(
            batch.input_ids,
            batch.logit_index,
            self._temperature,
            self._chunk_tokens,
            batch.positions,
            batch.packing,
            batch.images,
            batch.support,
            batch.routes,
        )
