"""Models of real sizes with random weights, rows of real lengths, and their arithmetic operations.

Speed, memory and agreement do not need trained weights.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.models.batch import TrainBatch
from pipeline.plan.gpus import known
from pipeline.rows import SCHEMA

COLUMNS = ("uid", "sample", "prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "advantages", "returns")


@dataclass(frozen=True)
class Shape:
    """A Qwen2.5 model, and the rows of an iteration that suit it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    prompts: int = 16
    samples: int = 8
    prompt: int = 512
    """Tokens of a prompt."""
    response: int = 1000
    """Mean tokens of a response; the longest has four times as many."""
    budget: int = 32768
    """Most tokens of a forward pass."""

    @property
    def longest(self) -> int:
        """Most tokens of a response."""
        return 4 * self.response

    def flops(self, lengths: list[int], responses: int) -> float:
        """Count the operations of a forward pass over contexts of these lengths, with the head for the responses."""
        tokens, squares = sum(lengths), sum(length**2 / 2 for length in lengths)
        matrices = 2 * self.hidden * (self.hidden + self.kv_heads * (self.hidden // self.heads))
        body = 2 * self.layers * (matrices + 3 * self.hidden * self.intermediate) * tokens
        return body + 4 * self.layers * self.hidden * squares + 2 * self.hidden * self.vocabulary * responses


SHAPES = {
    "tiny": Shape(64, 160, 2, 4, 2, 320, True, prompts=4, samples=4, prompt=24, response=16, budget=512),
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "7b": Shape(3584, 18944, 28, 28, 4, 152064, False, prompts=8),
}


def model_folder(name: str, work: Path, device: str = "cpu") -> Path:
    """Return a folder with the shape's model in bfloat16; make the model on `device` if it is missing."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape, folder = SHAPES[name], work / f"model-{name}"
    if (folder / "config.json").is_file():
        return folder
    config = Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=32768,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    # The configuration is written last: a folder with one is whole.
    partial = work / f".model-{name}.partial"
    model.save_pretrained(partial)
    partial.rename(folder)
    return folder


def rows(shape: Shape, seed: int = 0) -> pa.Table:
    """Make the rows of an iteration: groups of responses of log-normal lengths."""
    rng, made = np.random.default_rng(seed), []
    for group in range(shape.prompts):
        prompt = rng.integers(5, shape.vocabulary, shape.prompt)
        for sample in range(shape.samples):
            drawn = rng.lognormal(np.log(shape.response) - 0.18, 0.6)
            length = int(np.clip(drawn, 4, shape.longest))
            made.append(
                {
                    "uid": str(group),
                    "sample": sample,
                    "prompt_ids": prompt,
                    "response_ids": rng.integers(5, shape.vocabulary, length),
                    "response_mask": np.ones(length, np.int8),
                    "rollout_log_probs": rng.normal(-np.log(shape.vocabulary), 0.4, length),
                    "advantages": np.full(length, rng.normal()),
                    "returns": np.zeros(length),
                }
            )
    return pa.Table.from_pylist(made, schema=pa.schema([SCHEMA.field(name) for name in COLUMNS]))


def batch(shape: Shape, seed: int = 0) -> TrainBatch:
    """Make `rows` in the form that an update reads."""
    return TrainBatch.from_table(rows(shape, seed))


def peak_flops(card: str) -> float | None:
    """Return a card's dense bfloat16 FLOP/s by its datasheet; None if they are not known."""
    gpu = known(card)
    return gpu.flops if gpu else None
