"""Sampled tokens per second of episodes against one request of the same sampled tokens.

    python -m benchmarks.agent                      # makes a tiny model and prompts of its own
    python -m benchmarks.agent --turns 4 --turn-tokens 16 --pause 0.1 --repeats 4

The modes take turns with one engine: `single` samples all tokens of a row in one request, `episodes` in several turns
with an environment that replies at once, `slow` with one that sleeps `--pause` seconds before each reply. Every answer
has the same length. Only ratios within one run are to be trusted.
"""

import argparse
import asyncio
import copy
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks import rollout
from pipeline import rows
from pipeline.config import Config
from pipeline.rollout.stage import Rollout, sections

ENVIRONMENT = '''
import time
from pipeline.agent import Environment, Observation

class Ready(Environment):
    """Replies the same to every answer."""

    def open(self, row, seed):
        self.pause_s = float(row["extra_info"].get("pause_s", 0))

    def step(self, message):
        time.sleep(self.pause_s)
        return Observation("go on", reward=0.0)
'''


class Measured(NamedTuple):
    """One generation of all rows."""

    rate: float
    """Sampled tokens per second."""
    outside_ms: float
    """CPU milliseconds of a turn that are not the engine's steps."""
    idle: float
    """Share of the time in which the engine took no step."""


def sampled(table: pa.Table) -> int:
    """Tokens that the policy wrote."""
    return int(rows.flat(table, "response_mask")[0].sum())


async def generate(stage: Rollout, policy: rollout.OneVersion, chunks: Sequence[pa.Table], turns: int) -> Measured:
    policy.version += 1
    begun, busy = rollout.clocks(), stage.engine.busy_s
    tables = await asyncio.gather(*(stage(chunk) for chunk in chunks))
    busy = stage.engine.busy_s - busy
    found = rollout.Generated.since(begun, sum(map(sampled, tables)))
    errors = [
        error for table in tables if "env_error" in table.column_names for error in table["env_error"].to_pylist()
    ]
    if any(errors):
        raise RuntimeError(f"an environment failed: {next(filter(None, errors))}")
    count = sum(map(len, tables)) * turns
    return Measured(found.tokens / found.seconds, (found.cpu_s - busy) / count * 1e3, 1 - busy / found.seconds)


def paused(table: pa.Table, seconds: float) -> pa.Table:
    """The chunk, whose environments sleep so long before each reply."""
    column = table.column_names.index("extra_info")
    texts = pa.array([f'{{"pause_s": {seconds}}}'] * len(table))
    return table.set_column(column, table.schema.field(column), texts)


async def measure(config: Config, args: argparse.Namespace) -> dict[str, list[Measured]]:
    policy = rollout.OneVersion([rollout.weights(config, lambda buffer: buffer)])
    chunks = rollout.prompt_chunks(config)
    episodes = Rollout(*sections(config), policy)
    single = copy.copy(episodes)
    single._episodes = None
    single._rollout = copy.copy(config.rollout)
    single._max_response_length = single._rollout.min_tokens = args.turns * args.turn_tokens
    modes = {"single": (single, 0.0), "episodes": (episodes, 0.0), "slow": (episodes, args.pause)}
    found: dict[str, list[Measured]] = {name: [] for name in modes}
    for repeat in range(args.repeats + 1):
        for name in list(modes)[:: 1 if repeat % 2 else -1]:
            stage, pause = modes[name]
            stage._version = policy.version
            turns = 1 if name == "single" else args.turns
            measured = await generate(stage, policy, [paused(chunk, pause) for chunk in chunks], turns)
            if repeat:  # everything starts in the first one
                found[name].append(measured)
    episodes.engine.close()
    return found


def settings(model: str, data: str, folder: str, args: argparse.Namespace) -> Config:
    environment = Path(folder) / "ready.py"
    environment.write_text(ENVIRONMENT)
    args.max_tokens = args.turns * (args.turn_tokens + 32)
    args.settings = [
        f"agent.environment={environment}:Ready",
        f"agent.max_turns={args.turns}",
        f"agent.max_turn_tokens={args.turn_tokens}",
        f"rollout.min_tokens={args.turn_tokens}",
        "rollout.max_num_seqs=1024",
        *args.settings,
    ]
    return rollout.settings(model, data, args)


def report(found: dict[str, list[Measured]]) -> None:
    """Print medians, and ratios to the other modes of the same repeat."""
    against = {"episodes": "single", "slow": "episodes"}
    for name, all_of_them in found.items():
        rates = [measured.rate for measured in all_of_them]
        line = f"{name:9} {statistics.median(rates):7.0f} tokens per second"
        line += (
            f", {statistics.median(one.outside_ms for one in all_of_them):.2f} ms of CPU per turn outside the engine"
        )
        line += f", engine idle {statistics.median(one.idle for one in all_of_them):.0%}"
        if name in against:
            ratios = np.divide(rates, [measured.rate for measured in found[against[name]]])
            line += f", {statistics.median(ratios):.2f} of {against[name]}"
            line += f" ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
        print(line, flush=True)


def main() -> None:
    own = rollout.parser()
    own.description = (__doc__ or "").splitlines()[0]
    own.add_argument("--turns", type=int, default=4)
    own.add_argument("--turn-tokens", type=int, default=16)
    own.add_argument("--pause", type=float, default=0.1)
    args = own.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(args.threads):
        # OpenMP reads it when the process starts; the stream sets it for its engines.
        os.execve(sys.executable, sys.orig_argv, os.environ | {"OMP_NUM_THREADS": str(args.threads)})
    with tempfile.TemporaryDirectory() as folder:
        model, data = rollout.inputs(args.model, args.data, folder)
        report(asyncio.run(measure(settings(model, data, folder, args), args)))


if __name__ == "__main__":
    main()
