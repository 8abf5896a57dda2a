"""The reference stage: log-probs of every response token under a frozen policy, for a KL in the reward or the loss."""

import pyarrow as pa
from torch import Tensor

from pipeline.config.learner import ActorConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ReferenceConfig
from pipeline.models.packing import ModelInputs
from pipeline.models.policy import Policy, load_policy
from pipeline.rows import REFERENCE, append
from pipeline.scoring.replica import Replica, scoring_model


class Reference:
    """Stage that adds the column `ref_log_probs`, at the rollout's temperature.

    The reference is `scorer.path`, else `model.path`: the trained model as it was before training, without an adapter.

    Raises:
        ValueError: the model cannot be loaded, or its vocabulary has another size than the policy's.
    """

    def __init__(self, model: ModelConfig, scorer: ReferenceConfig, actor: ActorConfig, temperature: float) -> None:
        self._temperature, self._chunk_tokens = temperature, actor.logits_chunk_tokens
        reference = scoring_model(model, scorer, actor.fsdp, scorer.path)
        key = "scoring.reference.path" if scorer.path else "model.path"
        self._replica = Replica(lambda: load_policy(reference, key), scorer, "reference", model.share_prompts)
        if scorer.path:
            from transformers import AutoConfig  # takes seconds, and every process of the stream imports this module

            trained = AutoConfig.from_pretrained(model.path or "", trust_remote_code=model.trust_remote_code)
            sizes = [part.get_text_config().vocab_size for part in (self._replica.module.lm.config, trained)]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"scoring.reference.path={scorer.path} has a vocabulary of {sizes[0]} tokens and "
                    f"model.path={model.path} one of {sizes[1]}: their log-probs of a token id cannot be compared; "
                    "name a reference with the policy's vocabulary, such as the model that training began with"
                )

    def __call__(self, table: pa.Table) -> pa.Table:
        """`table` with one log-prob (float32, nats) per response token."""
        return append(table, REFERENCE, {"ref_log_probs": self._replica.score(table, self._log_probs)})

    def _log_probs(self, policy: Policy, batch: ModelInputs) -> Tensor:
        return policy(
            batch.input_ids,
            batch.logit_index,
            batch.targets,
            self._temperature,
            self._chunk_tokens,
            positions=batch.positions,
            packing=batch.packing,
        )[0]
