"""The reward-model stage: one number per response from a sequence-classification model.

1. The conversation is rendered anew, by the chat template of the reward model: its tokens need not be the policy's.
2. What the policy wrote is text and nothing else. Where a response spells a special token of the reward model (an end
   of turn, say, and a user who is full of praise behind it), a space takes its place.
3. A response that cannot be scored is not a 0: `rm_error` says why, and the reward stage counts the row as failed.
"""

import json
import re
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipeline.config import Config
from pipeline.models.micro_batches import split_micro_batches
from pipeline.models.reward_model import load_reward_model
from pipeline.prompts.chat import load_tokenizer
from pipeline.prompts.prompt_file import reason
from pipeline.rows import REWARD_MODEL, append
from pipeline.scoring.replica import Replica, scoring_model


class RewardModelScore:
    """Stage that adds the columns `REWARD_MODEL`, under the model `reward.model.path`.

    Raises:
        ValueError: the model cannot be loaded, has no head with one label, or its tokenizer has no chat template.
    """

    def __init__(self, config: Config) -> None:
        model = scoring_model(config.model, config.scoring.reward_model, config.actor.fsdp, config.reward.model.path)
        model.tokenizer_path = None
        self._tokenizer = load_tokenizer(model, key="reward.model.path")
        self._replica = Replica(
            lambda: load_reward_model(model, "reward.model.path"), config.scoring.reward_model, "reward_model"
        )
        special = sorted(map(str, self._tokenizer.get_added_vocab()), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        judge = self._replica.module
        # Rotary positions go on beyond what the model has seen, and its numbers mean nothing there.
        seen = getattr(judge.lm.config.get_text_config(), "max_position_embeddings", None)
        self._longest = min(filter(None, (self._replica.max_token_len, judge.max_length, seen)))

    def __call__(self, table: pa.Table) -> pa.Table:
        """`table` with one number (float32) per row."""
        texts, errors = self._texts(table["prompt"].to_pylist(), table["response"].to_pylist())
        ids: list[list[int]] = (
            self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
            if texts
            else []
        )
        for row, tokens in enumerate(ids):
            if len(tokens) > self._longest:
                errors[row] = (
                    f"ValueError: the conversation has {len(tokens)} tokens, more than the {self._longest} that the "
                    "reward model reads at once (its own limit or scoring.reward_model.max_token_len)"
                )
            elif not tokens and errors[row] is None:
                errors[row] = "ValueError: the reward model's chat template makes an empty text of the conversation"
        chosen = [row for row, error in enumerate(errors) if error is None]
        scores = np.full(len(ids), np.nan, dtype=np.float32)
        scores[chosen] = self._score([ids[row] for row in chosen])
        for row in chosen:
            if not np.isfinite(scores[row]):
                errors[row] = f"ValueError: the reward model gives {scores[row]}, which is not a finite number"
        failed = np.array([error is not None for error in errors], dtype=bool)
        columns = {"rm_score": pa.array(scores, pa.float32(), mask=failed), "rm_error": errors}
        return append(table, REWARD_MODEL, columns)

    def _texts(self, prompts: list[str], responses: list[str]) -> tuple[list[str], list[str | None]]:
        """Each conversation as text, and why there is none."""
        texts: list[str] = []
        errors: list[str | None] = []
        for prompt, response in zip(prompts, responses, strict=True):
            answer = {"role": "assistant", "content": self._special.sub(" ", response)}
            # A template is foreign code and may raise anything.
            try:
                rendered: Any = self._tokenizer.apply_chat_template([*json.loads(prompt), answer], tokenize=False)
            except Exception as error:  # noqa: BLE001
                texts.append("")
                errors.append(f"ValueError: the reward model's chat template fails: {reason(error)}")
                continue
            texts.append(str(rendered))
            errors.append(None)
        return texts, errors

    @torch.no_grad()
    def _score(self, ids: list[list[int]]) -> np.ndarray:
        """The model's number for each row of tokens, [R] float32; rows run grouped by length."""
        lengths, device = [len(tokens) for tokens in ids], self._replica.device
        scores = np.zeros(len(ids), dtype=np.float32)
        for index in split_micro_batches(lengths, self._replica.max_token_len) if ids else []:
            batch = np.zeros((len(index), max(lengths[row] for row in index)), dtype=np.int64)
            for place, row in enumerate(index):
                batch[place, : lengths[row]] = ids[row]
            sizes = torch.tensor([lengths[row] for row in index], device=device)
            scores[index] = self._replica.module(torch.from_numpy(batch).to(device), sizes).float().cpu().numpy()
        return scores
