"""Generated tokens per second of the rollout stage against the bare engine.

    python -m benchmarks.rollout                           # makes a tiny model and prompts of its own
    python -m benchmarks.rollout --model DIR --data FILE --where process --repeats 6

For bare vLLM, all requests for token ids and log-probs are added to an `LLMEngine` at once, which takes steps until
they are done; another engine (`rollout.name=NAME`) gets them as the stage gives them to it. The bare engine takes turns
with the stage, so that weights, threads, arguments, samples and other work of the machine are the same for both. Only
ratios within one run are to be trusted; on a busy machine, ratios by CPU seconds are better than ratios by the clock.
`chunk by chunk` is the stage with one chunk at a time, whose engine runs empty at the end of each. `--where ray` is the
whole stream on Ray Data (prompts, rollout, reward, advantage, record, splits), timed from the publication of a version
to its last row at the trainer.

Responses of the tiny model end by chance: to it all tokens are about equally likely, and several of them count as end
of sequence, so lengths are geometric with a long tail.
"""

import argparse
import asyncio
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.stand_in import StandInTrainer
from jobs import tiny
from jobs.prepare import __main__ as prepare
from pipeline import rows
from pipeline.config import Config, load_config
from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.derived import chunk_prompts
from pipeline.generation import EngineRequest
from pipeline.greeting import Greeting
from pipeline.models.precision import torch_dtype
from pipeline.prompts.encode import stamp, to_table
from pipeline.prompts.stage import loaders
from pipeline.rollout.engines import Engine
from pipeline.rollout.engines.vllm.engine import VLLM, params
from pipeline.rollout.requests import requests
from pipeline.rollout.stage import Rollout, sections
from pipeline.rows import token_lists
from pipeline.run.driver import start_ray
from pipeline.sampling import Sampling, row_limits
from pipeline.store.client import StoreClient
from pipeline.store.events import PromptsMade
from pipeline.store.policy_store import PolicyStore
from pipeline.store.versions import Ticket
from pipeline.weights.load import Shard
from pipeline.weights.publish import pack, parts

CPU = " by CPU"
STOP_IDS = [2, *range(100, 107)]
"""Ids that end a response: 8 of the tiny model's 300-odd tokens, for a mean of about 40 tokens."""


class Generated(NamedTuple):
    """Tokens and time of one generation of all requests."""

    tokens: int
    seconds: float
    cpu_s: float
    """CPU seconds of this process."""

    @classmethod
    def since(cls, begun: tuple[float, float], tokens: int) -> "Generated":
        now = clocks()
        return cls(tokens, now[0] - begun[0], now[1] - begun[1])


def clocks() -> tuple[float, float]:
    """Read the wall-clock and CPU seconds of this process."""
    return time.perf_counter(), time.process_time()


BARE = -1
"""Iteration under which the probe posts its numbers."""


class OneVersion:
    """A policy with the newest version `version`, always with the same weights."""

    def __init__(self, shards: list[Shard]) -> None:
        self.version, self.shards = 0, shards

    async def admit(self, split: str, chunk: int, version: int) -> Ticket:
        return Ticket(self.version, self.shards)

    async def acknowledge(
        self, engine: str, version: int, crc: int, load_s: float, idle_s: float, busy_s: float
    ) -> None:
        pass

    async def greet(self, greeting: Greeting) -> None:
        """Do nothing: never called, because no ticket requests a greeting."""

    def beat(self, engine: str) -> None:
        pass


class Probe(Rollout):
    """The rollout stage of the stream, whose engine generates each version's requests bare before the stage does."""

    def __init__(self, data: DataConfig, model: ModelConfig, rollout: RolloutConfig, *args: Any):
        super().__init__(data, model, rollout, *args)
        assert rollout.chunk_prompts is not None, "the benchmark sets it"
        self._data, self._chunks = data, data.train_batch_size // rollout.chunk_prompts
        self._tables: list[pa.Table] = []
        self._released = asyncio.Event()

    async def __call__(self, table: pa.Table) -> pa.Table:
        ticket = await self._policy.admit("train", table["chunk"][0].as_py(), 0)
        assert ticket is not None
        await self._bring_to(ticket)
        self._tables.append(table)
        released = self._released
        if len(self._tables) == self._chunks:
            asked = samples(self._data, self._rollout, self._seed, self._tables)
            found = bare(self, asked, -1 - ticket.version)
            store: StoreClient = self._policy._store  # type: ignore[attr-defined]
            await store.awaited(PolicyStore.post, PromptsMade(BARE, found._asdict()))
            self._tables, self._released = [], asyncio.Event()
            released.set()
        await released.wait()
        return await super().__call__(table)


def samples(
    data: DataConfig, rollout: RolloutConfig, seed: int | None, chunks: Sequence[pa.Table]
) -> list[EngineRequest]:
    """Make the requests for the samples of the stage."""
    made = []
    for table in chunks:
        prompts = token_lists(table, "prompt_ids")
        made += requests(
            prompts,
            table["uid"].to_pylist(),
            [Sampling.of(rollout, data.max_response_length, "train")] * len(prompts),
            rollout.n,
            seed=seed if rollout.seed_per_request else None,
            ignore_eos=rollout.ignore_eos,
        )
    return made


def bare(stage: Rollout, asked: list[EngineRequest], version: int) -> Generated:
    """Generate for all requests at once, in the engine's own thread; `version` salts vLLM's prefix cache."""

    def generate(engine: Engine) -> Generated:
        if isinstance(engine, VLLM):
            return bare_vllm(engine.llm, asked, version)
        begun, tokens, running = clocks(), 0, len(asked)
        for number, request in enumerate(asked):
            engine.add(f"bare-{number}", request)
        while running:
            done = engine.step()
            running -= len(done)
            tokens += sum(len(output.generation.token_ids) for output in done)
        return Generated.since(begun, tokens)

    return stage.engine.call(generate, when_idle=True).result(timeout=600.0)


def bare_vllm(llm: Any, asked: list[EngineRequest], version: int) -> Generated:
    """Generate for all requests at once, with requests as vLLM documents them."""
    pairs = []
    for request in asked:
        own = copy.copy(params(request.sampling, request.ends, request.ignore_eos))
        own.seed, own.skip_clone = request.seed, False
        pairs.append(({"prompt_token_ids": request.prompt_ids, "cache_salt": f"v{version}"}, own))
    begun, tokens = clocks(), 0
    for number, (prompt, own) in enumerate(pairs):
        llm.add_request(f"bare-{number}", prompt, own)
    while llm.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in llm.step() if output.finished)
    return Generated.since(begun, tokens)


async def staged(stage: Rollout, policy: OneVersion, chunks: Sequence[pa.Table]) -> Generated:
    """Run the stage with all chunks in flight, after it has loaded the weights again."""
    policy.version += 1
    begun = clocks()
    tables = await asyncio.gather(*(stage(chunk) for chunk in chunks))
    return Generated.since(begun, sum(map(response_tokens, tables)))


async def one_by_one(stage: Rollout, policy: OneVersion, chunks: Sequence[pa.Table]) -> Generated:
    """Run the stage with one chunk at a time."""
    policy.version += 1
    begun = clocks()
    tables = [await stage(chunk) for chunk in chunks]
    return Generated.since(begun, sum(map(response_tokens, tables)))


def response_tokens(table: pa.Table) -> int:
    return len(rows.flat(table, "response_ids")[0])


def lengths(table: pa.Table) -> str:
    """Describe the lengths of the responses."""
    tokens = np.diff(rows.flat(table, "response_ids")[1])
    quantiles = ", ".join(f"{share:.0%} {np.quantile(tokens, share):.0f}" for share in (0.5, 0.9, 0.99))
    return f"{len(tokens)} responses of {tokens.mean():.1f} tokens on average ({quantiles}, longest {tokens.max()})"


def prompt_chunks(config: Config) -> list[pa.Table]:
    """Load the chunks of one iteration."""
    train, _ = loaders(config.data, config.model, row_limits(config), config.trainer.seed)
    size = chunk_prompts(config)
    rows = train.iteration(1, config.data.train_batch_size)
    return [stamp(to_table(rows[c * size : (c + 1) * size]), "train", c, 1) for c in range(len(rows) // size)]


async def in_process(config: Config, repeats: int) -> dict[str, list[float]]:
    """Measure tokens per second and per CPU second of each repeat, without Ray."""
    policy = OneVersion([weights(config, lambda buffer: buffer)])
    chunks = prompt_chunks(config)
    stage = Rollout(*sections(config), policy)
    print(lengths(pa.concat_tables(await asyncio.gather(*(stage(chunk) for chunk in chunks)))), flush=True)
    modes = ["bare", "bare without seeds", "stage", "chunk by chunk"]
    rates: dict[str, list[float]] = {name + unit: [] for unit in ("", CPU) for name in modes}
    for repeat in range(repeats):
        for name in modes[:: 1 if repeat % 2 else -1]:
            if name == "stage":
                found = await staged(stage, policy, chunks)
            elif name == "chunk by chunk":
                found = await one_by_one(stage, policy, chunks)
            else:
                seeds = name == "bare"
                seed = config.trainer.seed if seeds else None
                asked = samples(config.data, config.rollout, seed, chunks)
                found = bare(stage, asked, -1 - 2 * repeat - seeds)
            rates[name].append(found.tokens / found.seconds)
            rates[name + CPU].append(found.tokens / found.cpu_s)
    stage.engine.close()
    return rates


def in_ray(config: Config, repeats: int, run_dir: str) -> dict[str, list[float]]:
    """Measure tokens per second of each repeat on Ray Data."""
    start_ray(config)
    trainer = StandInTrainer(config, repeats + 1, run_dir, Probe, [weights(config, ray.put)])
    rates: dict[str, list[float]] = {"bare": [], "stream": []}
    read = 0
    for repeat in range(repeats + 1):
        begun = time.perf_counter()
        tokens = sum(map(response_tokens, trainer.iterate()))
        seconds = time.perf_counter() - begun
        read, events = trainer.events(read)
        probe = next(event.metrics for event in events if isinstance(event, PromptsMade) and event.iteration == BARE)
        if repeat:  # in the first one the engine starts
            rates["bare"].append(probe["tokens"] / probe["seconds"])
            rates["stream"].append(tokens / (seconds - probe["seconds"]))
    trainer.close()
    ray.shutdown()
    return rates


def weights(config: Config, put: Any) -> Shard:
    """Pack the model's weights as one rank would publish them."""
    assert config.model.path is not None
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype="float32")
    return pack(parts(model, 0, torch_dtype(config.rollout.dtype, "rollout.dtype")), 0, 2**29, put)


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
            *args.settings,
        ]
    )


def report(where: str, rates: dict[str, list[float]]) -> None:
    """Print medians, and each mode's ratio to the bare engine in the same repeat."""
    for name, values in rates.items():
        ratios = np.divide(values, rates["bare" + CPU * name.endswith(CPU)])
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        unit = "tokens per CPU second" if name.endswith(CPU) else "tokens per second"
        median = f"{statistics.median(values):8.0f} {unit}, {statistics.median(ratios):.2f} of bare"
        print(f"{where:8} {name.removesuffix(CPU):19}{median} ({listed})", flush=True)


def inputs(model: str | None, data: str | None, folder: str) -> tuple[str, str]:
    """Return the given model and prompts; if one is left out, make a tiny one in `folder`."""
    if data is None:
        data = f"{folder}/countdown/train.parquet"
        prepare.main(
            ["countdown", "--out", f"{folder}/countdown", "--template", "short", "--train", "1000", "--test", "10"]
        )
    if model is None:
        model = f"{folder}/tiny"
        tiny.main(["--out", model])
        # vLLM takes these only from the model's folder, and not from the engine's arguments.
        GenerationConfig(eos_token_id=STOP_IDS).save_pretrained(model)
    return model, data


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    own.add_argument("--model", help="model folder; a tiny one is made when left out")
    own.add_argument("--data", help="prompts as parquet; Countdown prompts are made when left out")
    own.add_argument("--where", choices=["process", "ray"], nargs="+", default=["process", "ray"])
    own.add_argument("--prompts", type=int, default=64)
    own.add_argument("--samples", type=int, default=8)
    own.add_argument("--chunk-prompts", type=int, default=16)
    own.add_argument("--max-tokens", type=int, default=256)
    own.add_argument("--threads", type=int, default=1)
    own.add_argument("--repeats", type=int, default=4)
    own.add_argument("settings", nargs="*", metavar="key=value", help="further settings of the run")
    return own


def main() -> None:
    args = parser().parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(args.threads):
        # OpenMP reads it when the process starts; the stream sets it for its engines.
        os.execve(sys.executable, sys.orig_argv, os.environ | {"OMP_NUM_THREADS": str(args.threads)})
    with tempfile.TemporaryDirectory() as folder:
        config = settings(*inputs(args.model, args.data, folder), args)
        for where in args.where:
            if where == "process":
                rates = asyncio.run(in_process(config, args.repeats))
            else:
                rates = in_ray(config, args.repeats, folder)
            report(where, rates)


if __name__ == "__main__":
    main()
