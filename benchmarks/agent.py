"""Sampled tokens per second of episodes against one request of the same sampled tokens.

    python -m benchmarks.agent                      # makes a tiny model and prompts of its own
    python -m benchmarks.agent --turns 4 --turn-tokens 16 --pause 0.1 --repeats 4
    python -m benchmarks.agent --modes episodes used --episodes-per-process 16

The modes take turns with one engine: `single` samples all tokens of a row in one request, `episodes` in several turns
with an environment that replies at once, `slow` with one that sleeps `--pause` seconds before each reply, and `used` as
`episodes`, in processes that serve `--episodes-per-process` one after the other. `turns` is the bound of `episodes`:
bare vLLM with the same prompts, without an environment, and with each next prompt at once. Every answer has the same
length. Only ratios within one run are to be trusted.

CPU time of a turn is given for the engine's thread, for all other threads of the run's process (`outside`), and for the
processes of the environments, with the processes that start and end them.
"""

import argparse
import asyncio
import contextlib
import copy
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pyarrow as pa

from benchmarks import rollout
from pipeline import rows
from pipeline.config import Config
from pipeline.generation import EngineRequest
from pipeline.rollout.engines import Engine
from pipeline.rollout.episodes import Episodes
from pipeline.rollout.seeds import seed_of
from pipeline.rollout.stage import Rollout, sections
from pipeline.rows import token_lists
from pipeline.sampling import Sampling
from pipeline.store.versions import Ticket

ENVIRONMENT = '''
import time
from pipeline.agent import Environment, Observation

class Ready(Environment):
    """Replies the same to every answer."""

    def reset(self, row, seed):
        self.pause_s = float(row["extra_info"].get("pause_s", 0))

    def step(self, message):
        time.sleep(self.pause_s)
        return Observation("go on", reward=0.0)
'''
REPLY = "go on"
AGAINST = {
    "single": (),
    "turns": ("single",),
    "episodes": ("single", "turns"),
    "slow": ("episodes",),
    "used": ("episodes",),
}
"""Modes that each mode is compared with."""


class Clocks(NamedTuple):
    """CPU seconds."""

    engine: float
    """Seconds of the engine's thread."""
    outside: float
    """Seconds of all other threads of this process."""
    environments: float
    """Seconds of the processes below this one, ended ones included."""


def own(stage: Rollout) -> tuple[float, float]:
    """Return the CPU seconds so far of the engine's thread, and of all other threads of this process."""
    thread = stage.engine._thread.ident
    assert thread is not None
    engine = time.clock_gettime(time.pthread_getcpuclockid(thread))
    return engine, time.process_time() - engine


def below() -> float:
    """Sum the CPU seconds so far of the processes below this one."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            # The clock of clock_getcpuclockid(3): `cpu_times` drops less than a tick of each process.
            seconds += time.clock_gettime(~process.pid << 3 | 2) + sum(process.cpu_times()[2:4])
    return seconds


class Measured(NamedTuple):
    """One generation of all rows."""

    rate: float
    """Sampled tokens per second."""
    cpu_rate: float
    """Sampled tokens per CPU second of this process."""
    cpu_ms: Clocks
    """CPU milliseconds of a turn."""
    idle: float
    """Share of the time in which the engine took no step."""
    steps: int
    """Steps of the engine."""


def sampled(table: pa.Table) -> int:
    """Count the tokens that the policy sampled."""
    return int(rows.flat(table, "response_mask")[0].sum())


async def generate(stage: Rollout, chunks: Sequence[pa.Table]) -> int:
    """Let the stage generate; returns the number of sampled tokens."""
    tables = await asyncio.gather(*(stage(chunk) for chunk in chunks))
    for table in tables:
        for error in filter(None, table["env_error"].to_pylist() if "env_error" in table.column_names else ()):
            raise RuntimeError(f"an environment failed: {error}")
    return sum(map(sampled, tables))


async def bare(stage: Rollout, policy: rollout.OneVersion, config: Config, chunks: Sequence[pa.Table]) -> int:
    """Let bare vLLM generate with the requests of the episodes; returns the number of sampled tokens."""
    assert stage._episodes is not None
    language = await stage._episodes._agents[None].start()
    observation = language.bridge.after([], [{"role": config.agent.observation_role, "content": REPLY}])
    sampling = replace(Sampling.of(config.rollout, 1, "train"), max_tokens=config.agent.max_turn_tokens or 1)
    prompts = [ids for chunk in chunks for ids in token_lists(chunk, "prompt_ids") for _ in range(config.rollout.n)]
    await stage._bring_to(Ticket(policy.version, policy.shards))

    def play(engine: Engine) -> int:
        tokens, turns = 0, Counter[int]()

        def ask(number: int) -> None:
            engine.add(str(number), EngineRequest(prompts[number], sampling, seed_of(f"{number}/{turns[number]}")))
            turns[number] += 1

        for number in range(len(prompts)):
            ask(number)
        running = len(prompts)
        while running:
            for output in engine.step():
                number, answer = int(output.request_id), output.generation.token_ids.tolist()
                tokens += len(answer)
                running -= 1
                if turns[number] < config.agent.max_turns:
                    prompts[number] = [*prompts[number], *answer, *observation]
                    running += 1
                    ask(number)
        return tokens

    return await asyncio.wrap_future(stage.engine.call(play, when_idle=True))


def paused(table: pa.Table, seconds: float) -> pa.Table:
    """Return the chunk with environments that sleep so long before each reply."""
    column = table.column_names.index("extra_info")
    texts = pa.array([f'{{"pause_s": {seconds}}}'] * len(table))
    return table.set_column(column, table.schema.field(column), texts)


async def measure(config: Config, args: argparse.Namespace) -> dict[str, list[Measured]]:
    policy = rollout.OneVersion([rollout.weights(config, lambda buffer: buffer)])
    chunks = rollout.prompt_chunks(config)
    slow = [paused(chunk, args.pause) for chunk in chunks]
    episodes = Rollout(*sections(config), policy)
    single = copy.copy(episodes)
    single._episodes = None
    single._rollout = copy.copy(config.rollout)
    single._max_response_length = single._rollout.min_tokens = args.turns * args.turn_tokens
    used = copy.copy(episodes)
    used._episodes = Episodes(
        {None: replace(config.agent, episodes_per_process=args.episodes_per_process)},
        config.data,
        episodes._tokenizer,
        episodes.engine,
        config.trainer.seed,
        config.rollout.seed_per_request,
    )
    modes: dict[str, tuple[int, Callable[[], Awaitable[int]]]] = {
        "single": (1, lambda: generate(single, chunks)),
        "turns": (args.turns, lambda: bare(episodes, policy, config, chunks)),
        "episodes": (args.turns, lambda: generate(episodes, chunks)),
        "slow": (args.turns, lambda: generate(episodes, slow)),
        "used": (args.turns, lambda: generate(used, chunks)),
    }
    found: dict[str, list[Measured]] = {name: [] for name in args.modes}
    for repeat in range(args.repeats + 1):
        for name in args.modes[:: 1 if repeat % 2 else -1]:
            turns, play = modes[name]
            # Each mode loads the weights again, so that no prefix is cached.
            single._version = used._version = episodes._version
            policy.version += 1
            steps, busy, before = episodes.engine.steps, episodes.engine.busy_s, below()
            clocks, begun = own(episodes), time.perf_counter()
            tokens = await play()
            seconds = time.perf_counter() - begun
            engine, outside = np.subtract(own(episodes), clocks)
            spent = Clocks(engine, outside, below() - before)
            if repeat:  # everything starts in the first one
                each = 1e3 / (config.data.train_batch_size * config.rollout.n * turns)
                found[name].append(
                    Measured(
                        tokens / seconds,
                        tokens / (spent.engine + spent.outside),
                        Clocks(*np.multiply(spent, each)),
                        1 - (episodes.engine.busy_s - busy) / seconds,
                        episodes.engine.steps - steps,
                    )
                )
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
    for name, repeats in found.items():
        rate, cpu_rate = [each.rate for each in repeats], [each.cpu_rate for each in repeats]
        engine, outside, environments = np.median([each.cpu_ms for each in repeats], axis=0)
        print(f"{name:9}{statistics.median(rate):7.0f} tokens per second, CPU ms per turn: ", end="")
        print(f"engine {engine:.2f}, outside {outside:.2f}, environments {environments:.2f}", end="")
        if name != "turns":
            idle, steps = (
                statistics.median(values) for values in zip(*((each.idle, each.steps) for each in repeats), strict=True)
            )
            print(f"; {steps:.0f} steps, engine idle {idle:.0%}", end="")
        print()
        for other in AGAINST[name]:
            if other in found:
                ratios = np.divide(rate, [each.rate for each in found[other]])
                by_cpu = np.divide(cpu_rate, [each.cpu_rate for each in found[other]])
                listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                print(f"{'':9}{statistics.median(ratios):7.2f} of {other} ({listed})", end="")
                print(f", {statistics.median(by_cpu):.2f} by CPU of the process", flush=True)


def main() -> None:
    parser = rollout.parser()
    parser.description = (__doc__ or "").splitlines()[0]
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=16)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--episodes-per-process", type=int, default=16)
    parser.add_argument("--modes", nargs="+", choices=list(AGAINST), default=list(AGAINST))
    args = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(args.threads):
        # OpenMP reads it when the process starts; the stream sets it for its engines.
        os.execve(sys.executable, sys.orig_argv, os.environ | {"OMP_NUM_THREADS": str(args.threads)})
    with tempfile.TemporaryDirectory() as folder:
        model, data = rollout.inputs(args.model, args.data, folder)
        report(asyncio.run(measure(settings(model, data, folder, args), args)))


if __name__ == "__main__":
    main()
