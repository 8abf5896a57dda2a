"""Generated tokens per second of the rollout stage against bare vLLM.

    python -m benchmarks.rollout                           # makes a tiny model and prompts of its own
    python -m benchmarks.rollout --model DIR --data FILE --where process --repeats 6

Bare vLLM is all requests added to an `LLMEngine` at once and stepped until done. It takes turns with the stage on the
very same engine, so weights, threads, arguments and whatever else the machine does are the same for both, and only
ratios within one run are to be trusted. `--where ray` is the whole stream on Ray Data (prompts, rollout, reward,
advantage, record, splits), timed from the publication of a version to its last row at the trainer.

Responses end by chance: several token ids count as end of sequence, so lengths are geometric with a long tail.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from transformers import AutoModelForCausalLM

from benchmarks.stand_in import StandInTrainer
from jobs import tiny
from jobs.prepare import __main__ as prepare
from pipeline import rows
from pipeline.config import Config, load_config
from pipeline.prompts.stage import ANSWER_S, sources, stamp
from pipeline.rollout import vllm
from pipeline.rollout.stage import Policy, Rollout
from pipeline.rollout.weights import Shard
from pipeline.store import Ticket
from pipeline.stream import engine_env
from pipeline.train.broadcast import pack
from pipeline.train.fsdp import torch_dtype
from pipeline.train.run import start_ray

STOP_IDS = [2, *range(100, 107)]
"""Ids that end a response: 8 of the tiny model's 300-odd tokens, for a mean of about 40 tokens."""


class OneVersion:
    """A policy whose newest version is whatever `version` says, always with the same weights."""

    def __init__(self, shards: list[Shard]) -> None:
        self.version, self._shards = 0, shards

    async def admit(self, split: str, chunk: int, version: int) -> Ticket:
        return Ticket(self.version, self._shards)

    async def acknowledge(self, engine: str, version: int, crc: int, load_s: float) -> None:
        pass


class Probe(Rollout):
    """The rollout stage of the stream, whose engine generates each version's requests bare before the stage does."""

    def __init__(self, config: Config, policy: Policy):
        super().__init__(config, policy)
        self._chunks = config.data.train_batch_size // config.rollout.chunk_prompts
        self._tables: list[pa.Table] = []
        self._released = asyncio.Event()

    async def __call__(self, table: pa.Table) -> pa.Table:
        ticket = await self._policy.admit("train", table["chunk"][0].as_py(), 0)
        await self._bring_to(ticket)
        self._tables.append(table)
        released = self._released
        if len(self._tables) == self._chunks:
            tokens, seconds = bare(self, requests(self._config, self._tables, -1 - ticket.version))
            store, generation = self._policy._store, self._policy._generation  # type: ignore[attr-defined]
            await store.post.remote(generation, "bare", {"tokens": tokens, "seconds": seconds})
            self._tables, self._released = [], asyncio.Event()
            released.set()
        await released.wait()
        return await super().__call__(table)


def requests(config: Config, chunks: Sequence[pa.Table], version: int, seeds: bool = True) -> list[tuple[Any, Any]]:
    """What the stage asks its engine for; `version` salts the prefix cache."""
    return [
        pair
        for table in chunks
        for pair in vllm.requests(
            table["prompt_ids"].to_pylist(),
            table["uid"].to_pylist(),
            config.rollout,
            max_tokens=config.data.max_response_length,
            version=version,
            seed=config.trainer.seed if seeds and config.rollout.seed_per_request else None,
            ignore_eos=config.rollout.ignore_eos,
        )
    ]


def bare(stage: Rollout, pairs: list[tuple[Any, Any]]) -> tuple[int, float]:
    """(generated tokens, seconds) of all requests at once, in the engine's own thread."""

    def generate(engine: Any) -> tuple[int, float]:
        begun, tokens = time.perf_counter(), 0
        for number, (prompt, params) in enumerate(pairs):
            engine.add_request(f"bare-{number}", prompt, params)
        while engine.has_unfinished_requests():
            tokens += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
        return tokens, time.perf_counter() - begun

    return stage.engine.call(generate, when_idle=True).result(timeout=600.0)


async def staged(stage: Rollout, policy: OneVersion, chunks: Sequence[pa.Table]) -> tuple[int, float]:
    """(generated tokens, seconds) of the stage with all chunks in flight, its weights loaded anew."""
    policy.version += 1
    begun = time.perf_counter()
    tables = await asyncio.gather(*(stage(chunk) for chunk in chunks))
    return sum(map(response_tokens, tables)), time.perf_counter() - begun


def response_tokens(table: pa.Table) -> int:
    return sum(rows.lengths(table["response_ids"]))


async def in_process(config: Config, repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each repeat, without Ray."""
    policy = OneVersion([weights(config, lambda buffer: buffer)])
    size = config.rollout.chunk_prompts
    train, _ = sources(config)
    prompts = train.chunks(size)
    chunks = [stamp(next(prompts), "train", c, 1) for c in range(config.data.train_batch_size // size)]
    stage = Rollout(config, policy)
    await staged(stage, policy, chunks)
    rates: dict[str, list[float]] = {"bare": [], "bare without seeds": [], "stage": []}
    for repeat in range(repeats):
        for name in list(rates)[:: 1 if repeat % 2 else -1]:
            if name == "stage":
                tokens, seconds = await staged(stage, policy, chunks)
            else:
                seeds = name == "bare"
                tokens, seconds = bare(stage, requests(config, chunks, -1 - 2 * repeat - seeds, seeds))
            rates[name].append(tokens / seconds)
    stage.engine.close()
    return rates


def in_ray(config: Config, repeats: int, run_dir: str) -> dict[str, list[float]]:
    """Tokens per second of each repeat on Ray Data."""
    start_ray(config)
    trainer = StandInTrainer(config, 1000, run_dir, Probe, [weights(config, ray.put)])
    rates: dict[str, list[float]] = {"bare": [], "stream": []}
    read = 0
    for repeat in range(repeats + 1):
        begun = time.perf_counter()
        tokens = sum(map(response_tokens, trainer.iterate()))
        seconds = time.perf_counter() - begun
        read, messages = trainer.messages(read)
        probe = next(message for message in messages if message["kind"] == "bare")
        if repeat:
            rates["bare"].append(probe["tokens"] / probe["seconds"])
            rates["stream"].append(tokens / (seconds - probe["seconds"]))
    ray.get(trainer.store.stop.remote(), timeout=ANSWER_S)
    ray.shutdown()
    return rates


def weights(config: Config, put: Any) -> Shard:
    """The model's weights as one rank would publish them."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype="float32")
    return pack(model, 0, torch_dtype(config.rollout.dtype, "rollout.dtype"), 2**29, put)


def settings(model: str, data: str, args: argparse.Namespace) -> Config:
    return load_config(
        [
            "experiment=countdown_cpu",
            f"model.path={model}",
            f"data.train_files={data}",
            "data.val_files=null",
            f"data.train_batch_size={args.prompts}",
            f"data.max_response_length={args.max_tokens}",
            f"rollout.n={args.samples}",
            f"rollout.chunk_prompts={args.chunk_prompts}",
            f"rollout.num_threads={args.threads}",
            f"rollout.engine_kwargs.override_generation_config.eos_token_id={STOP_IDS}".replace(" ", ""),
            *args.settings,
        ]
    )


def report(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and each mode's ratio to bare vLLM of the same repeat."""
    bases = rates["bare"]
    return {
        name: {
            "tokens_per_s": round(statistics.median(values)),
            "ratio_to_bare": round(statistics.median(np.divide(values, bases)), 3),
            "ratios": [round(float(ratio), 3) for ratio in np.divide(values, bases)],
        }
        for name, values in rates.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="model folder; a tiny one is made when left out")
    parser.add_argument("--data", help="prompts as parquet; Countdown prompts are made when left out")
    parser.add_argument("--where", choices=["process", "ray"], nargs="+", default=["process", "ray"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--chunk-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="further settings of the run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, data = args.model or f"{folder}/tiny", args.data or f"{folder}/countdown/train.parquet"
        if not args.data:
            prepare.main(["countdown", "--out", f"{folder}/countdown", "--template", "short", "--train", "1000",
                          "--test", "10"])  # fmt: skip
        if not args.model:
            tiny.main(["--out", model])
        config = settings(model, data, args)
        for where in args.where:
            if where == "process":
                import os

                os.environ.update(engine_env(config))
                rates = asyncio.run(in_process(config, args.repeats))
            else:
                rates = in_ray(config, args.repeats, folder)
            print(json.dumps({"where": where, **report(rates)}, indent=2), flush=True)


if __name__ == "__main__":
    main()
