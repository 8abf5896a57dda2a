"""The best environment of a CPU engine: the same rollouts in fresh processes, taking turns.

    python -m benchmarks.engine_env --rounds 2 --variants plain iomp no-dynamo

Each process starts an engine, generates once (cold) and then several times (warm). The output has, per variant and as
ratios to `plain` of the same round: CPU seconds of the start and of the cold generation, tokens per second and per CPU
second when warm, and the CPUs that the engine's process keeps busy while it has nothing to do.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

IDLE_S = 2.0
VENV = Path(sys.prefix) / "lib"
VARIANTS: dict[str, dict[str, str]] = {
    "plain": {},
    "iomp": {"LD_PRELOAD": str(VENV / "libiomp5.so")},
    "iomp-passive": {"LD_PRELOAD": str(VENV / "libiomp5.so"), "KMP_BLOCKTIME": "0"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "active": {"OMP_WAIT_POLICY": "active"},
    "no-bind": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    "no-dynamo": {"TORCHDYNAMO_DISABLE": "1"},
    "no-dynamo-passive": {"TORCHDYNAMO_DISABLE": "1", "OMP_WAIT_POLICY": "passive"},
}


def child(arguments: list[str]) -> None:
    """Measure in this process, which runs in one variant; prints the measurements as JSON."""
    from benchmarks import rollout
    from pipeline.rollout.stage import Rollout, sections

    args = rollout.parser().parse_args(arguments)
    config = rollout.settings(args.model, args.data, args)

    async def measure() -> dict[str, float]:
        policy = rollout.OneVersion([rollout.weights(config, lambda buffer: buffer)])
        chunks = rollout.prompt_chunks(config)
        begun = rollout.clocks()
        stage = Rollout(*sections(config), policy)
        start = rollout.Generated.since(begun, 0)
        cold = await rollout.staged(stage, policy, chunks)
        warm = [await rollout.staged(stage, policy, chunks) for _ in range(args.repeats)]
        begun = rollout.clocks()
        await asyncio.sleep(IDLE_S)
        idle = rollout.Generated.since(begun, 0)
        return {
            "start_cpu_s": start.cpu_s,
            "cold_cpu_s": cold.cpu_s,
            "tokens_per_s": statistics.median(one.tokens / one.seconds for one in warm),
            "tokens_per_cpu_s": statistics.median(one.tokens / one.cpu_s for one in warm),
            "idle_cpus": idle.cpu_s / idle.seconds,
        }

    print("RESULT " + json.dumps(asyncio.run(measure())), flush=True)


def run(variant: str, threads: int, arguments: list[str]) -> dict[str, float]:
    """Run a fresh process of `variant`; returns its measurements.

    Raises:
        RuntimeError: the process failed.
    """
    base = {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "benchmarks.engine_env", "--child", *arguments]
    done = subprocess.run(
        command, env=os.environ | base | VARIANTS[variant], capture_output=True, text=True, timeout=900, check=False
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not results:
        raise RuntimeError(f"variant {variant} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(results[0].removeprefix("RESULT "))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    from benchmarks import rollout

    own = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    own.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["iomp", "passive", "no-dynamo"])
    own.add_argument("--rounds", type=int, default=2)
    own.add_argument("--repeats", type=int, default=2)
    own.add_argument("--threads", type=int, default=1)
    own.add_argument("--model")
    own.add_argument("--data")
    own.add_argument("settings", nargs="*", metavar="key=value")
    args = own.parse_args()
    variants = ["plain", *(name for name in args.variants if name != "plain")]
    with tempfile.TemporaryDirectory() as folder:
        model, data = rollout.inputs(args.model, args.data, folder)
        arguments = ["--model", model, "--data", data, "--repeats", str(args.repeats), *args.settings]
        arguments += ["--threads", str(args.threads)]
        rounds = []
        for number in range(args.rounds):
            order = variants if number % 2 == 0 else variants[::-1]
            found = {}
            for name in order:
                found[name] = run(name, args.threads, arguments)
                print(f"round {number + 1} {name}: {json.dumps(found[name])}", flush=True)
            rounds.append(found)
    for name in variants:
        for key in rounds[0][name]:
            values = [one[name][key] for one in rounds]
            line = f"{name:18} {key:14} {statistics.median(values):10.2f}"
            if key != "idle_cpus":
                ratios = [one[name][key] / one["plain"][key] for one in rounds]
                line += f"   to plain: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
            print(line)


if __name__ == "__main__":
    main()
