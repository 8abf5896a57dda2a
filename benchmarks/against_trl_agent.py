"""Episodes per second against TRL's `environment_factory`: the same model, games and lengths on the same cores.

    python -m benchmarks.against_trl_agent --out runs/against-trl-agent
    python -m benchmarks.against_trl_agent --out DIR --trl-python PATH --turns 4 --turn-tokens 16

Both run `examples/agents/higher_lower.py` with a tiny model of random weights. Its answers all have the same length and
are never the number, so every episode has all its turns; tokens are counted on both sides. The sides take turns, and
only the generation counts: ours is the rollout stage with its processes of episodes, weights loaded each time; TRL's is
`GRPOTrainer`, from the reset of its environments on. TRL cannot put new weights into a CPU build of vLLM, so it
generates with `transformers`. CPU seconds include all processes of a side.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import rollout, trl_env
from benchmarks.against_trl import environment
from benchmarks.agent import below, own
from jobs import tiny
from jobs.prepare import __main__ as prepare
from pipeline import rows
from pipeline.config import Config, load_config
from pipeline.rollout.stage import Rollout, sections

SIDE = Path(__file__).with_name("trl_agent_side.py")
ROOT = Path(__file__).parents[1]


def settings(args: argparse.Namespace) -> Config:
    """Make the settings of our side."""
    return load_config(
        [
            "experiment=higher_lower_cpu",
            f"model.path={args.out / 'tiny'}",
            f"data.train_files={args.out / 'games' / 'train.parquet'}",
            "data.val_files=null",
            f"data.train_batch_size={args.prompts}",
            f"data.max_response_length={args.turns * (args.turn_tokens + 32)}",
            f"agent.environment={ROOT / 'examples/agents/higher_lower.py'}:HigherLower",
            f"agent.kwargs.guesses={args.turns}",
            f"agent.max_turns={args.turns}",
            f"agent.max_turn_tokens={args.turn_tokens}",
            f"rollout.min_tokens={args.turn_tokens}",
            f"rollout.n={args.samples}",
            "rollout.max_num_seqs=1024",
            "rollout.chunk_prompts=16",
            "rollout.num_threads=1",
            *args.settings,
        ]
    )


class Trl:
    """TRL's process, which waits for its turns."""

    def __init__(self, python: Path, config: Config, args: argparse.Namespace) -> None:
        asked = {
            "model": config.model.path,
            "train_file": config.data.train_files,
            "scratch": str(args.out / "scratch"),
            "prompts": args.prompts,
            "n": args.samples,
            "turns": args.turns,
            "turn_tokens": args.turn_tokens,
            "max_response_length": config.data.max_response_length,
            "generation": args.generation,
            "threads": args.cores,
        }
        file = args.out / "settings.json"
        file.write_text(json.dumps(asked, indent=1))
        variables = {"OMP_NUM_THREADS": str(args.cores), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        with open(args.out / "trl.log", "wb") as log:
            self._process = subprocess.Popen(
                [python, "-P", SIDE, file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(variables | {"HF_HOME": str(args.out / "huggingface")}),
                text=True,
            )
        self._log = args.out / "trl.log"

    def play(self) -> dict[str, Any]:
        """Run one batch of episodes.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("play\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("FOUND "):
                return dict(json.loads(line.removeprefix("FOUND ")))
        raise RuntimeError(f"TRL's side has ended; see {self._log}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


async def measure(python: Path, config: Config, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    policy = rollout.OneVersion([rollout.weights(config, lambda buffer: buffer)])
    chunks = rollout.prompt_chunks(config)
    stage = Rollout(*sections(config), policy)
    trl = Trl(python, config, args)

    async def ours() -> dict[str, Any]:
        policy.version += 1
        cpu, begun = sum(own(stage)) + below(), time.perf_counter()
        tables = await asyncio.gather(*(stage(chunk) for chunk in chunks))
        seconds, cpu_s = time.perf_counter() - begun, sum(own(stage)) + below() - cpu
        tokens = [len(rows.flat(table, name)[0]) for table in tables for name in ("prompt_ids", "response_ids")]
        sampled = sum(int(rows.flat(table, "response_mask")[0].sum()) for table in tables)
        return {"seconds": seconds, "cpu_s": cpu_s, "tokens": sum(tokens), "sampled": sampled}

    found: dict[str, list[dict[str, Any]]] = {"TRL": [], "ours": []}
    try:
        for repeat in range(args.repeats + 1):
            for name in list(found)[:: 1 if repeat % 2 else -1]:
                played = await ours() if name == "ours" else await asyncio.to_thread(trl.play)
                if repeat:  # everything starts in the first one
                    found[name].append(played)
                print(name, json.dumps(played), flush=True)
    finally:
        trl.close()
        stage.engine.close()
    return found


def report(found: dict[str, list[dict[str, Any]]], episodes: int) -> None:
    """Print medians and ratios."""
    for name, played in found.items():
        line = f"{name:5}{statistics.median(episodes / each['seconds'] for each in played):7.1f} episodes per second"
        line += f", {statistics.median(each['cpu_s'] for each in played) / episodes * 1e3:.1f} ms of CPU per episode"
        line += f", {played[0]['sampled'] / episodes:.0f} sampled of {played[0]['tokens'] / episodes:.0f} tokens each"
        for unit, words in {"seconds": "of TRL", "cpu_s": "of TRL per CPU second"}.items():
            if name != "TRL":
                ratios = [one[unit] / other[unit] for one, other in zip(found["TRL"], played, strict=True)]
                line += f"; {statistics.median(ratios):.2f} {words} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of all that is made")
    parser.add_argument(
        "--trl-python", type=Path, metavar="PATH", help="Python of an environment with TRL; else it is made"
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turn-tokens", type=int, default=8)
    parser.add_argument("--cores", type=int, default=2, help="threads of TRL (default: %(default)s)")
    parser.add_argument("--generation", choices=["generate", "continuous"], default="generate", help="of TRL")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="more settings of ours; write -- before them")
    args = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        # OpenMP reads it when the process starts; the stream sets it for its engines.
        os.execve(sys.executable, sys.orig_argv, os.environ | {"OMP_NUM_THREADS": "1"})
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.trl_python:
        trl_env.check(args.trl_python)
    python = Path(os.path.abspath(args.trl_python)) if args.trl_python else trl_env.make(args.out / "trl-env")
    if not (args.out / "tiny" / "config.json").exists():
        prepare.main(["higher_lower", "--out", f"{args.out}/games", "--train", "1000", "--sft", "1000"])
        tiny.main(["--out", f"{args.out}/tiny", "--data", f"{args.out}/games/sft_train.parquet", "--digits", "2"])
    report(asyncio.run(measure(python, settings(args), args)), args.prompts * args.samples)


if __name__ == "__main__":
    main()
