"""TRL's side of `benchmarks.train`, which starts this file with the Python of TRL's own environment.

    TRL-PYTHON -P benchmarks/trl_step_side.py SETTINGS.json

Loss, backward pass and optimiser steps of TRL's GRPO on given rows; it generates nothing.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

sys.path.append(str(Path(__file__).parent))
import taking_turns


class Step:
    """Updates of a GRPO trainer.

    Args:
        settings: `model` (folder), `rows` (npz file), `samples` of a prompt, `mini_batches`, `rows_per_pass`, `out`.
    """

    def __init__(self, settings: dict[str, Any]):
        self._rows, self._per_pass = np.load(settings["rows"]), settings["rows_per_pass"]
        count = len(self._rows["response_offsets"]) - 1
        self._mini_batches = np.array_split(np.arange(count), settings["mini_batches"])
        passes = len(self._mini_batches[0]) // self._per_pass
        tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b"))
        self._trainer = GRPOTrainer(
            model=settings["model"],
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=settings["out"],
                use_cpu=True,
                beta=0.0,
                num_generations=settings["samples"],
                per_device_train_batch_size=self._per_pass,
                gradient_accumulation_steps=passes,
                # TRL's defaults are for a GPU: bfloat16, and activations computed twice to save memory.
                bf16=False,
                gradient_checkpointing=False,
                model_init_kwargs={"dtype": "float32"},
                report_to="none",
            ),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 64),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="a", eos_token="b"),
        )
        self._trainer.current_gradient_accumulation_steps = passes
        self._trainer.model.train()
        self._optimizer = torch.optim.AdamW(self._trainer.model.parameters(), lr=1e-6, fused=True)

    def __call__(self) -> None:
        """Make one update, on all rows."""
        ends = self._rows["response_offsets"]
        for index in self._mini_batches:
            self._optimizer.zero_grad(set_to_none=True)
            tokens = sum(int(ends[row + 1] - ends[row]) for row in index)
            for first in range(0, len(index), self._per_pass):
                batch = self._batch(index[first : first + self._per_pass], tokens)
                self._trainer._compute_loss(self._trainer.model, batch).backward()
            torch.nn.utils.clip_grad_norm_(self._trainer.model.parameters(), 1.0)
            self._optimizer.step()

    def _batch(self, index: np.ndarray, tokens: int) -> dict[str, torch.Tensor]:
        """Rows as TRL has them: prompts padded on the left, responses on the right."""
        prompts, prompts_mask = self._padded("prompt_ids", "prompt_offsets", index, left=True)
        responses, mask = self._padded("response_ids", "response_offsets", index)
        old, _ = self._padded("old_log_probs", "response_offsets", index)
        first = self._rows["response_offsets"][index]
        return {
            "prompt_ids": prompts,
            "prompt_mask": prompts_mask,
            "completion_ids": responses,
            "completion_mask": mask,
            "old_per_token_logps": old,
            "advantages": torch.from_numpy(self._rows["advantages"][first]),
            "num_items_in_batch": torch.tensor(float(tokens)),
        }

    def _padded(
        self, name: str, offsets: str, index: np.ndarray, left: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pad a column of these rows to [B, L]; also returns a mask that is 0 at the padding."""
        values, ends = self._rows[name], self._rows[offsets]
        parts = [values[ends[row] : ends[row + 1]] for row in index]
        width = max(map(len, parts))
        made = np.zeros((len(parts), width), np.float32 if values.dtype.kind == "f" else np.int64)
        mask = np.zeros((len(parts), width), np.int64)
        for number, part in enumerate(parts):
            where = slice(width - len(part), width) if left else slice(len(part))
            made[number, where], mask[number, where] = part, 1
        return torch.from_numpy(made), torch.from_numpy(mask)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])

    def build() -> Callable[[], None]:
        return Step(settings)

    taking_turns.serve(build)


if __name__ == "__main__":
    main()
