"""The policy stage: the sum over the vocabulary of squared probabilities, for the optimal token baselines.

The engine returns the probability of the token it sampled, not of all others, so a replica of the policy goes over the
responses once more. In an asynchronous run its weights may be newer than those that generated a row: `pi_version` says
which they were.
"""

import numpy as np
import pyarrow as pa
from torch import Tensor

from pipeline.config import Config
from pipeline.models.packing import ModelInputs
from pipeline.models.policy import Policy, load_policy
from pipeline.rows import POLICY as COLUMNS
from pipeline.rows import append
from pipeline.scoring.replica import Replica, StoreWeights, scoring_model
from pipeline.store.client import StoreClient
from pipeline.store.versions import POLICY


class PolicyScore:
    """Stage that adds the columns `sum_pi_squared` (at the temperature of the rollout) and `pi_version`.

    Args:
        config: the run's configuration.
        store: the policy store, for this attempt.

    Raises:
        ValueError: `model.path` cannot be loaded.
    """

    def __init__(self, config: Config, store: StoreClient) -> None:
        self._temperature, self._chunk_tokens = config.rollout.temperature, config.actor.logits_chunk_tokens
        model = scoring_model(config.model, config.scoring.policy, config.actor.fsdp)
        self._replica = Replica(lambda: load_policy(model), config.scoring.policy, "policy", config.model.share_prompts)
        timeout = config.trainer.deadlines.publish
        self._weights = StoreWeights(self._replica.module, store, POLICY, timeout, Policy.hf_name)

    def __call__(self, table: pa.Table) -> pa.Table:
        """`table` with the columns `POLICY` of `pipeline/rows.py`, one sum (float32) per response token.

        Raises:
            ValueError: a row is longer than `scoring.policy.max_token_len`, a response has an empty prompt, or the
                published weights are not those of the model.
            StaleAttempt: the train workers have restarted.
            TimeoutError: the weights did not come in time.
        """
        version = self._weights.bring_to_rows(table)
        sums = self._replica.score(table, self._sum_pi_squared)
        return append(table, COLUMNS, {"sum_pi_squared": sums, "pi_version": np.full(len(table), version)})

    def _sum_pi_squared(self, policy: Policy, batch: ModelInputs) -> Tensor:
        return policy.sum_pi_squared(
            batch.input_ids,
            batch.logit_index,
            self._temperature,
            self._chunk_tokens,
            batch.positions,
            batch.segment_ids,
        )
