"""The mean ratio of trainer to engine for tokens that were sampled from a part of the vocabulary.

    python -m benchmarks.support --model models/tiny-sft-1 --data data/countdown-1/train.parquet
    python -m benchmarks.support --model models/smollm2 --data data/sums-1/train.parquet rollout.name=hf

Each restriction samples the same prompts, in float32. The trainer computes the tokens' log-probs twice: over the whole
vocabulary, and over the support that the engine returned. If both belong to one distribution, the mean of exp(trainer -
engine) over all tokens is 1.
"""

import argparse
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.rollout import prompt_chunks, weights
from pipeline.config import Config, load_config
from pipeline.generation import EngineRequest, Generation
from pipeline.models.batch import TokenBatch
from pipeline.models.packing import pack
from pipeline.models.policy import Policy, load_policy
from pipeline.rollout import engines
from pipeline.rows import UNKNOWN
from pipeline.sampling import Sampling

RESTRICTIONS: tuple[dict[str, Any], ...] = (
    *({}, {"top_p": 0.95}, {"top_p": 0.8}, {"top_k": 20}, {"top_k": 5}, {"min_p": 0.05}, {"min_tokens": 8}),
)
TOKENS = 16
"""Maximum number of tokens in a response."""


def sampled(engine: engines.Engine, prompts: list[list[int]], own: Sampling) -> list[Generation]:
    """Return a response to each prompt."""
    for number, ids in enumerate(prompts):
        engine.add(str(number), EngineRequest(ids, own, seed=number, for_training=True))
    done: dict[int, Generation] = {}
    while len(done) < len(prompts):
        done |= {int(output.request_id): output.generation for output in engine.step()}
    return [done[number] for number in range(len(prompts))]


def ratios(policy: Policy, prompts: list[list[int]], made: list[Generation], temperature: float) -> tuple[float, ...]:
    """Return the mean ratio over the whole vocabulary and over the supports, the largest gap over the supports, and the
    share of tokens whose support is unknown."""
    rows = TokenBatch.of(prompts, [one.token_ids for one in made])
    none = np.empty(0, np.int32)
    supports = [one.support or (none, np.zeros(len(one.token_ids), np.int32)) for one in made]
    rows.support_ids, rows.support_sizes = (np.concatenate([own[part] for own in supports]) for part in (0, 1))
    engine = np.concatenate([one.log_probs for one in made])
    found = {}
    for name in ("whole", "support"):
        found[name] = np.zeros_like(engine)
        for row in range(len(rows)):
            inputs = pack(rows, [[row]])
            given = inputs.arguments | ({"support": None} if name == "whole" else {})
            with torch.no_grad():
                found[name][inputs.token_index] = policy(**given, temperature=temperature).log_probs.numpy()
    known = rows.support_sizes != UNKNOWN
    gap = np.abs(found["support"] - engine)[known].max()
    means = (float(np.exp(values - engine)[known].mean()) for values in found.values())
    return (*means, float(gap), float((~known).mean()))


def options(name: str, description: str) -> argparse.Namespace:
    """Return the options of the benchmark `name`: model, prompts, and settings of a run."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description.split("\n")[0])
    parser.add_argument("--model", required=True, metavar="DIR", help="the policy")
    parser.add_argument("--data", required=True, metavar="FILE", help="its prompts, as parquet")
    parser.add_argument("--prompts", type=int, default=256, help="number of prompts (default: %(default)s)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of jobs.train")
    return parser.parse_args()


def settings(args: argparse.Namespace, *more: str) -> Config:
    """Return the settings of a run with an engine in float32, with `more` in addition."""
    files = f"model.path={args.model}", f"data.train_files={args.data}"
    plain = "rollout.dtype=float32", "rollout.enforce_eager=true", f"data.max_response_length={TOKENS}"
    config = load_config([*files, *plain, *args.settings, *more])
    config.data.train_batch_size = args.prompts
    return config


def begun(config: Config) -> tuple[list[list[int]], engines.Engine]:
    """Return the prompts of a batch, and an engine with the weights of version 0."""
    prompts = [ids for chunk in prompt_chunks(config) for ids in chunk["prompt_ids"].to_pylist()]
    engine = engines.build(config.model, config.rollout, config.data.longest_row, 0)
    engine.load([weights(config, lambda data: data.copy())], 60.0, 0)
    return prompts[: config.data.train_batch_size], engine


def main() -> None:
    """Sample with each restriction, and print a table."""
    config = settings(options("support", __doc__ or ""))
    policy = load_policy(config.model).eval()
    prompts, engine = begun(config)
    table = Table("restriction", "mean ratio, whole vocabulary", "mean ratio, support", "largest gap", "unknown")
    plain = Sampling.of(config.rollout, TOKENS, "train")
    for restriction in RESTRICTIONS:
        own = Sampling(**{**vars(plain), **restriction})
        whole, support, gap, unknown = ratios(policy, prompts, sampled(engine, prompts, own), own.temperature)
        text = " ".join(f"{key}={value}" for key, value in restriction.items()) or "none"
        table.add_row(text, f"{whole:.4f}", f"{support:.5f}", f"{gap:.1e}", f"{unknown:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
