"""The reference stage: log-probs of response tokens under the frozen reference policy, for a KL in reward or loss."""

from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline.config.learner import ActorConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ReferenceConfig
from pipeline.derived import scoring_model
from pipeline.rows import REFERENCE, append
from pipeline.store.client import StoreClient

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.packing import ModelInputs
    from pipeline.models.policy import Policy


class Reference:
    """Stage that adds the column `ref_log_probs`, at the sampling temperature of the rollout.

    The reference policy is the model of `scoring.reference.path`, or else of `model.path`: the policy as it was before
    training, without an adapter.

    Raises:
        ValueError: the model cannot be loaded, or its vocabulary has another size than the policy's.
    """

    def __init__(
        self,
        model: ModelConfig,
        scorer: ReferenceConfig,
        actor: ActorConfig,
        temperature: float,
        longest: int | None = None,
        store: StoreClient | None = None,
        patience: float = 0.0,
    ) -> None:
        # Only the process of the stage needs torch; others import this module to plan the stream.
        from pipeline.models.policy import load_frozen
        from pipeline.scoring.replica import Replica

        self._temperature, self._chunk_tokens = temperature, actor.logits_chunk_tokens
        reference = scoring_model(model, scorer, actor.fsdp, scorer.path)
        self._replica = Replica(
            lambda: load_frozen(reference, model, longest=longest),
            scorer,
            "reference",
            model.share_prompts,
            store,
            patience,
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return `table` with one log-prob (float32, nats) per response token."""
        return append(table, REFERENCE, {"ref_log_probs": self._replica.score(table, self._log_probs)})

    def _log_probs(self, policy: "Policy", batch: "ModelInputs") -> "Tensor":
        found: Tensor = policy(
            **batch.arguments, temperature=self._temperature, chunk_tokens=self._chunk_tokens
        ).log_probs
        return found
