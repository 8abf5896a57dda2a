"""Sides of `benchmarks.train`: an update of the actor, and bare torch loops that compute the same.

python -m benchmarks.train_sides SIDE SHAPE --threads N --model FOLDER
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.taking_turns import serve
from pipeline.config import Config
from pipeline.models.batch import TrainBatch
from pipeline.models.policy import Policy
from pipeline.rows import SCHEMA
from pipeline.train import actor as actors
from pipeline.train.freed import give_back
from pipeline.train.setup import build_actor
from pipeline.train.update import StreamedUpdate

COLUMNS = ("uid", "sample", "prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "advantages", "returns")
CLIP = 0.2


@dataclass(frozen=True)
class Shape:
    """Rows and model of a measurement."""

    prompts: int
    samples: int
    mini_batches: int
    budget: int
    hidden: int
    layers: int
    vocabulary: int
    lengths: Callable[[np.random.Generator], tuple[int, int]]
    """Tokens of a prompt, and of one response."""
    path: str | None = None
    """Folder of a model that takes the place of the random one."""

    def of(self, path: str | None) -> "Shape":
        """Return the shape with the model in the folder `path`; None keeps the random one."""
        vocabulary = self.vocabulary if path is None else AutoConfig.from_pretrained(path).vocab_size
        return replace(self, path=path, vocabulary=vocabulary)


def _long(random: np.random.Generator) -> tuple[int, int]:
    return 256, int(np.clip(random.lognormal(np.log(512) - 0.125, 0.5), 64, 1024))


def _mix(random: np.random.Generator) -> tuple[int, int]:
    tokens = int(np.exp(random.uniform(np.log(64), np.log(2048))))
    return tokens // 4, tokens - tokens // 4


def _shared(random: np.random.Generator) -> tuple[int, int]:
    return int(random.integers(15, 20)), int(np.clip(random.normal(11, 2), 6, 16))


def _context(random: np.random.Generator) -> tuple[int, int]:
    return 1536, int(random.integers(96, 161))


def _sums(random: np.random.Generator) -> tuple[int, int]:
    return int(random.integers(42, 47)), int(random.integers(4, 17))


SHAPES = {
    "long": Shape(4, 4, 1, 4096, 320, 8, 8192, _long),
    "mix": Shape(16, 1, 1, 4096, 320, 8, 8192, _mix),
    "shared": Shape(64, 8, 4, 16384, 192, 4, 512, _shared),
    "context": Shape(2, 8, 1, 16384, 320, 4, 8192, _context),
    "sums": Shape(16, 8, 1, 4096, 320, 4, 8192, _sums),
}


def rows_of(shape: Shape) -> pa.Table:
    """Random rows of one iteration."""
    random = np.random.default_rng(0)
    rows = []
    for prompt in range(shape.prompts):
        ids = random.integers(5, shape.vocabulary, shape.lengths(random)[0])
        for sample in range(shape.samples):
            length = shape.lengths(random)[1]
            rows.append(
                {
                    "uid": str(prompt),
                    "sample": sample,
                    "prompt_ids": ids,
                    "response_ids": random.integers(5, shape.vocabulary, length),
                    "response_mask": np.ones(length, np.int8),
                    "rollout_log_probs": random.normal(-np.log(shape.vocabulary), 0.4, length),
                    "advantages": np.full(length, random.normal()),
                    "returns": np.zeros(length),
                }
            )
    return pa.Table.from_pylist(rows, schema=pa.schema([SCHEMA.field(name) for name in COLUMNS]))


def model(shape: Shape) -> Any:
    """Make a random Qwen3, the same on every call, or load the shape's model."""
    if shape.path is not None:
        return AutoModelForCausalLM.from_pretrained(shape.path, dtype="float32", attn_implementation="sdpa").train()
    torch.manual_seed(0)
    heads = shape.hidden // 64
    config = Qwen3Config(  # type: ignore[call-arg]
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).train()


def _attend_row_by_row(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, ends: list[int], **_: Any
) -> tuple[torch.Tensor, None]:
    attend = partial(
        scaled_dot_product_attention, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    found = [attend(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b]) for a, b in pairwise(ends)]
    return torch.cat(found, 2).transpose(1, 2), None


class Bare:
    """A loop as one writes it by hand."""

    def __init__(self, shape: Shape, packed: bool):
        self.shape, self.packed, self.lm = shape, packed, model(shape)
        if packed:
            AttentionInterface.register("row_by_row", _attend_row_by_row)
            AttentionMaskInterface.register("row_by_row", lambda *_, **__: None)
            self.lm.config._attn_implementation = "row_by_row"
        self.optimizer = torch.optim.AdamW(self.lm.parameters(), lr=1e-6, fused=True)

    def update(self, rows: TrainBatch) -> None:
        """Train on all rows, in as many mini-batches as the shape has."""
        lengths = np.array(rows.lengths)
        for index in np.array_split(np.arange(len(rows)), self.shape.mini_batches):
            self.optimizer.zero_grad(set_to_none=True)
            tokens = int(np.diff(rows.response_offsets)[index].sum())
            for batch in self._batches(index[np.argsort(-lengths[index])], lengths):
                self._backward(rows, batch, tokens)
            torch.nn.utils.clip_grad_norm_(self.lm.parameters(), 1.0)
            self.optimizer.step()

    def _batches(self, index: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for row in index.tolist():
            joined = [*batches[-1], row]
            size = sum(lengths[joined]) if self.packed else max(lengths[joined]) * len(joined)
            if batches[-1] and size > self.shape.budget:
                batches.append([])
            batches[-1].append(row)
        return batches

    def _backward(self, rows: TrainBatch, batch: list[int], tokens: int) -> None:
        prompts, responses = rows.prompt_offsets, rows.response_offsets
        parts = [
            torch.from_numpy(
                np.concatenate(
                    [
                        rows.prompt_ids[prompts[row] : prompts[row + 1]],
                        rows.response_ids[responses[row] : responses[row + 1]],
                    ]
                ).astype(np.int64)
            )
            for row in batch
        ]
        sizes = [len(part) for part in parts]
        more: dict[str, Any] = {}
        if self.packed:
            ends = np.cumsum([0, *sizes]).tolist()
            ids, starts = torch.cat(parts)[None], ends[:-1]
            more = {"position_ids": torch.cat([torch.arange(size) for size in sizes])[None], "ends": ends}
        else:
            ids = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
            starts = [number * ids.shape[1] for number in range(len(parts))]
        behind = np.diff(prompts)[batch]
        predicts = np.concatenate(
            [np.arange(s + p - 1, s + n - 1) for s, p, n in zip(starts, behind, sizes, strict=True)]
        )
        chosen = np.concatenate([np.arange(responses[row], responses[row + 1]) for row in batch])
        hidden = self.lm.model(input_ids=ids, use_cache=False, **more).last_hidden_state.flatten(0, 1)
        logits = self.lm.lm_head(hidden[torch.from_numpy(predicts)]).float()
        targets = torch.from_numpy(rows.response_ids[chosen].astype(np.int64))
        log_probs = torch.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(-1)
        advantages, old = (torch.from_numpy(values[chosen]) for values in (rows.advantages, rows.old_log_probs))
        ratio = torch.exp(log_probs - old)
        (torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).sum() / tokens).backward()


class Ours:
    """The actor of a run."""

    def __init__(self, shape: Shape, share: str = "auto", gives_back: bool = False):
        self.gives_back, config = gives_back, Config()
        config.data.train_batch_size, config.rollout.n = shape.prompts, shape.samples
        config.data.max_response_length = 2048
        config.model.share_prompts = share
        config.actor.old_log_probs = "engine"
        config.actor.optim.lr = 1e-6
        config.actor.ppo_mini_batch_size = shape.prompts // shape.mini_batches
        config.actor.ppo_max_token_len_per_gpu = shape.budget
        actors.load_policy = lambda *_, **__: Policy(model(shape))
        self.actor = build_actor(config, torch.device("cpu"), 1000)

    def update(self, rows: TrainBatch) -> None:
        """Train on all rows."""
        update = StreamedUpdate(self.actor, 1)
        update.add(rows)
        update.finish()
        if self.gives_back:
            give_back()


SIDES: dict[str, Callable[[Shape], Any]] = {
    "packed": lambda shape: Bare(shape, True),
    "padded": lambda shape: Bare(shape, False),
    "slipstream": Ours,
    "slipstream, share_prompts=never": lambda shape: Ours(shape, "never"),
}

FREED: dict[str, Callable[[Shape], Any]] = {
    "slipstream, malloc_trim": lambda shape: Ours(shape, gives_back=True),
    "slipstream, MALLOC_MMAP_THRESHOLD_": Ours,
}
"""Sides that give freed memory back to the system."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES | FREED)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shape = SHAPES[args.shape].of(args.model)

    def build() -> Callable[[], None]:
        side, table = (SIDES | FREED)[args.side](shape), rows_of(shape)
        return lambda: side.update(TrainBatch.from_table(table))

    serve(build)


if __name__ == "__main__":
    main()
