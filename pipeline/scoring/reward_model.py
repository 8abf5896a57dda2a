"""The reward-model stage: one score per response from a sequence-classification model.

1. The conversation is rendered again by the chat template of the reward model, whose tokens may differ from the
   policy's. For a multi-turn episode this is the whole conversation with its tool calls; if the episode has several
   conversations, the one with the last turn.
2. Text from the policy, a tool, an environment or the prompt file stays text, even if it spells a special token of the
   reward model. So a response cannot fake, for example, the end of its turn and a message of a user full of praise.
3. A response that cannot be scored does not get the score 0: `rm_error` has the reason, and the reward stage counts the
   row as failed.
"""

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from pipeline.agent.inside.forms import for_template, prompt_length, split
from pipeline.config.learner import FSDPConfig
from pipeline.config.model import ModelConfig
from pipeline.config.scoring import ScorerConfig
from pipeline.conversations import Messages, answered, rendered
from pipeline.derived import scoring_model
from pipeline.errors import short_reason
from pipeline.models.architecture import most_positions
from pipeline.models.micro_batches import split_micro_batches
from pipeline.models.special_tokens import special_tokens
from pipeline.models.tokenizer import load_tokenizer
from pipeline.rows import REWARD_MODEL, append
from pipeline.store.client import StoreClient

KEY = "reward.model.path"


def conversations(table: pa.Table) -> Iterator[Messages]:
    """Yield the conversation of each row, as messages for a chat template: prompt and response.

    For a multi-turn episode these are all messages of its last conversation, tool calls included.
    """
    prompts = map(json.loads, table["prompt"].to_pylist())
    if "messages" not in table.column_names:
        for prompt, response in zip(prompts, table["response"].to_pylist(), strict=True):
            yield answered(prompt, response)
        return
    for prompt, messages in zip(prompts, table["messages"].to_pylist(), strict=True):
        written = []
        last = split(json.loads(messages))[-1]
        given = prompt_length(last, prompt)
        for message in last[given:]:
            shown = for_template({**message, "content": message["content"] or ""})
            shown.pop("reasoning_content", None)
            written.append(shown)
        yield [*prompt[:given], *written]


class RewardModelScore:
    """Stage that adds the columns `rm_score` and `rm_error`.

    Args:
        model: settings of the trained model, which also apply to the reward model.
        scorer: settings of the stage (`scoring.reward_model`).
        fsdp: `actor.fsdp`, for the dtype of the computation.
        path: folder or Hub name of the reward model.
        longest: length of the longest row in tokens; None for the model's own limit.
        store: the policy store; None in an evaluation.
        patience: seconds to wait for the handshake without a heartbeat.

    Raises:
        ValueError: the model cannot be loaded, has no head with one label, or its tokenizer has no chat template.
    """

    def __init__(
        self,
        model: ModelConfig,
        scorer: ScorerConfig,
        fsdp: FSDPConfig,
        path: str | None,
        longest: int | None = None,
        store: StoreClient | None = None,
        patience: float = 0.0,
    ) -> None:
        # Only the process of the stage needs torch; others import this module to plan the stream.
        from pipeline.models.reward_model import load_reward_model
        from pipeline.scoring.replica import Replica

        model = scoring_model(model, scorer, fsdp, path)
        model.tokenizer_path = None
        self._tokenizer = load_tokenizer(model, key=KEY)
        self._replica = Replica(
            lambda: load_reward_model(model, KEY, longest=longest),
            scorer,
            "reward_model",
            store=store,
            patience=patience,
        )
        self._special = special_tokens(self._tokenizer)
        module = self._replica.module
        # Rotary embeddings also work beyond the lengths of the model's training, but scores are meaningless there.
        seen = most_positions(module.lm.config.get_text_config().to_dict()) or (None,)
        self._longest = min(filter(None, (self._replica.max_token_len, module.max_length, seen[0])))

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return `table` with a score (float32) per row in `rm_score`, or null and the reason in `rm_error`."""
        errors: list[str | None] = []
        chosen: dict[int, list[int]] = {}
        for row, conversation in enumerate(conversations(table)):
            try:
                chosen[row] = self._tokens(conversation)
                errors.append(None)
            except ValueError as error:
                errors.append(f"ValueError: {error}")
        scores = np.full(len(table), np.nan, dtype=np.float32)
        scores[list(chosen)] = self._score(list(chosen.values()))
        for row in chosen:
            if not np.isfinite(scores[row]):
                errors[row] = f"ValueError: the reward model gives {scores[row]}, which is not a finite number"
        failed = np.array([error is not None for error in errors], dtype=bool)
        columns = {"rm_score": pa.array(scores, pa.float32(), mask=failed), "rm_error": errors}
        return append(table, REWARD_MODEL, columns)

    def _tokens(self, conversation: Messages) -> list[int]:
        spellings = self._special.spellings(conversation)
        text = spellings.render(lambda messages: rendered(messages, self._render), conversation)
        (ids,) = self._special.encode([text], [spellings])
        if not ids:
            raise ValueError("the reward model's chat template makes an empty text of the conversation")
        if len(ids) > self._longest:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, more than the {self._longest} that the reward model reads at "
                "once (its own limit or scoring.reward_model.max_token_len)"
            )
        return ids

    def _render(self, messages: Messages) -> str:
        # A template is foreign code and may raise anything.
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:
            raise ValueError(f"the reward model's chat template fails: {short_reason(error)}") from error

    def _score(self, ids: list[list[int]]) -> np.ndarray:
        """Compute the scores of R conversations, [R] float32, from the token ids of each."""
        import torch

        from pipeline.models.packing import lay_out

        self._replica.settle()
        lengths, packed = [len(tokens) for tokens in ids], self._replica.passes.packed
        scores = np.zeros(len(ids), dtype=np.float32)
        for index in split_micro_batches(lengths, self._replica.max_token_len, packed=packed):
            batch = lay_out([np.array(ids[row]) for row in index], packed).to(self._replica.device)
            with torch.no_grad():
                found = self._replica.module(batch.input_ids, batch.lengths, batch.positions, batch.packing)
            scores[index] = found.float().cpu().numpy()
        return scores
