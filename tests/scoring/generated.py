"""Rows as the rollout stage leaves them, and what the plain model of `transformers` says about their tokens."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM

from pipeline.rows import KL_COEF, PROMPT, REWARD, ROLLOUT

VOCABULARY = 300
LENGTHS = [(3, 5), (1, 1), (9, 2), (2, 12), (4, 0), (6, 3)]
"""Prompt and response tokens; one response is empty."""


def generated(lengths: list[tuple[int, int]] = LENGTHS, seed: int = 0, version: int = 0) -> pa.Table:
    """One scored group of random tokens, pad and end-of-sequence among them; row i has score i."""
    rng = np.random.default_rng(seed)
    schema = pa.schema([*PROMPT, *ROLLOUT, *REWARD, *KL_COEF])
    rows = [
        dict.fromkeys(schema.names)
        | {"split": "train", "uid": "a", "score": float(number), "policy_version": version, "kl_coef": 1.0}
        | {"prompt_ids": rng.integers(0, VOCABULARY, prompt), "response_ids": rng.integers(0, VOCABULARY, response)}
        | {"response_mask": [1] * response, "rollout_log_probs": [0.0] * response}
        for number, (prompt, response) in enumerate(lengths)
    ]
    return pa.Table.from_pylist(rows, schema=schema)


@torch.no_grad()
def distributions(folder: Path, table: pa.Table, temperature: float) -> list[torch.Tensor]:
    """Log-probs [n, V] float64 at each of the n response tokens, one row at a time, without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt, response in zip(table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist(), strict=True):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        found.append(torch.log_softmax(logits.double() / temperature, dim=-1))
    return found


def assert_near(column: pa.ChunkedArray, want: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """The list column holds these numbers."""
    got = column.to_pylist()
    assert [len(row) for row in got] == [len(row) for row in want]
    torch.testing.assert_close(torch.tensor(sum(got, [])).double(), torch.cat(want), atol=tolerance, rtol=0)
