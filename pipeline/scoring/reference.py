"""The reference stage: log-probs of every response token under a frozen policy, for a KL in the reward or the loss."""

import pyarrow as pa
from torch import Tensor

from pipeline.config import Config
from pipeline.models.packing import ModelInputs
from pipeline.models.policy import Policy, load_policy
from pipeline.rows import REFERENCE, append
from pipeline.scoring.replica import Replica, scoring_model


class Reference:
    """Stage that adds the column `ref_log_probs`, at the temperature the responses are sampled with.

    The reference is `scoring.reference.path`, else the policy as it was before training (`model.path`).

    Raises:
        ValueError: the model cannot be loaded, or its vocabulary has another size than the policy's.
    """

    def __init__(self, config: Config) -> None:
        self._temperature, self._chunk_tokens = config.rollout.temperature, config.actor.logits_chunk_tokens
        shares = config.model.share_prompts
        self._replica = Replica(lambda: _load(config), config.scoring.reference, "reference", shares)

    def __call__(self, table: pa.Table) -> pa.Table:
        """`table` with the columns `REFERENCE`, one log-prob (float32, nats) per response token.

        Raises:
            ValueError: a row is longer than `scoring.reference.max_token_len`, or a response has an empty prompt.
        """
        return append(table, REFERENCE, {"ref_log_probs": self._replica.score(table, self._log_probs)})

    def _log_probs(self, policy: Policy, batch: ModelInputs) -> Tensor:
        return policy(
            batch.input_ids,
            batch.logit_index,
            batch.targets,
            self._temperature,
            self._chunk_tokens,
            positions=batch.positions,
            segment_ids=batch.segment_ids,
        )[0]


def _load(config: Config) -> Policy:
    path = config.scoring.reference.path
    model = scoring_model(config.model, config.scoring.reference, config.actor.fsdp, path)
    if not path:
        return load_policy(model)
    from transformers import AutoConfig

    reference = load_policy(model, "scoring.reference.path")
    trained = AutoConfig.from_pretrained(config.model.path or "", trust_remote_code=config.model.trust_remote_code)
    sizes = [part.get_text_config().vocab_size for part in (reference.lm.config, trained)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"scoring.reference.path={path} has a vocabulary of {sizes[0]} tokens and model.path={config.model.path} "
            f"one of {sizes[1]}: their log-probs of a token id cannot be compared; name a reference with the policy's "
            "vocabulary, such as the model that training began with"
        )
    return reference
