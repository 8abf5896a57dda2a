"""What the longest responses cost: an engine with few of them, and the ways not to wait for them.

    python -m benchmarks.tails
    python -m benchmarks.tails --cases kept "first_come correct" --staleness 1 2 4 --iterations 40

Stream, policy store, schedule, rollout stage and engine loop are those of a run. The engine sleeps for every step,
which gives each of up to 32 running responses a token, as a GPU does whose steps take about as long for few responses
as for many. Lengths are log-normal: half of the responses have fewer than 30 tokens, the mean is 50, and one of an
iteration has some 200. The trainer sleeps for a quarter of what the engine needs for an iteration that keeps it busy,
so that rollouts limit. Told are seconds an iteration against that need, and how old rows are.
"""

import argparse
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
from rich.console import Console
from rich.table import Table

from benchmarks.overlap import STARTING
from benchmarks.prompt_stream import byte_tokenizer, write_prompts
from benchmarks.stand_in import RANKS, StandInTrainer, shard
from pipeline.config import Config, load_config
from pipeline.rollout import vllm
from pipeline.rollout.stage import Policy, Rollout
from pipeline.train.run import start_ray
from pipeline.train.staleness import staleness

CHUNKS, CHUNK_PROMPTS, SAMPLES = 8, 4, 2
SEQUENCES, STEP_S = 32, 0.005
MEDIAN, SPREAD, LONGEST = 30, 1.0, 512
MEAN = MEDIAN * np.exp(SPREAD**2 / 2)
NEED_S = CHUNKS * CHUNK_PROMPTS * SAMPLES * MEAN / SEQUENCES * STEP_S
"""Seconds of an iteration with an engine that is full all the time."""
CORRECT = "algorithm.on_stale=correct"
CARRY = ["rollout.oversample=0.25", "rollout.oversample_policy=carry", CORRECT]
BETWEEN = "rollout.update=between_chunks"
CASES = {
    "kept": ["stream.order=kept"],
    "first_come": ["stream.order=first_come"],
    "first_come correct": ["stream.order=first_come", CORRECT],
    "carry correct": CARRY,
    "kept between": ["stream.order=kept", BETWEEN],
    "partial correct between": [*CARRY, f"rollout.partial_tokens={3 * MEDIAN}", BETWEEN],
}
"""Weights change in flight where it is not said that they change between chunks."""


class TailedEngine:
    """Stands in for vLLM's `LLMEngine`; how long a response is follows from its prompt."""

    def __init__(self) -> None:
        self._lengths: dict[bytes, tuple[int, int]] = {}
        self._waiting: list[tuple[str, int, str]] = []
        self._running: dict[str, tuple[int, str, list[str]]] = {}
        self._version = "0"
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=None))

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        ids = prompt["prompt_token_ids"]
        key = np.asarray(ids[:200]).tobytes()
        if key not in self._lengths:
            drawn = np.random.default_rng(zlib.crc32(key)).lognormal(np.log(MEDIAN), SPREAD)
            self._lengths[key] = len(ids), int(min(max(drawn, 1), LONGEST))
        own, length = self._lengths[key]
        # A response that goes on has its tokens so far behind the prompt.
        left = length - (len(ids) - own)
        wanted = min(left, params.max_tokens)
        self._waiting.append((request_id, wanted, "stop" if wanted == left else "length"))

    def step(self) -> list[Any]:
        while self._waiting and len(self._running) < SEQUENCES:
            request_id, wanted, reason = self._waiting.pop(0)
            self._running[request_id] = wanted, reason, []
        time.sleep(STEP_S)
        done = []
        for request_id, (wanted, reason, versions) in list(self._running.items()):
            versions.append(self._version)
            if len(versions) == wanted:
                del self._running[request_id]
                done.append(_output(request_id, versions, reason))
        return done

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)
        self._waiting = [one for one in self._waiting if one[0] not in request_ids]

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        """Weights mean nothing to it."""

    def set_weight_version(self, version: str) -> None:
        self._version = version

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        """It has none."""


def _output(request_id: str, versions: list[str], reason: str) -> Any:
    starts = [place for place, version in enumerate(versions) if place == 0 or version != versions[place - 1]]
    spans = [
        SimpleNamespace(version=versions[start], start=start, end=end)
        for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)
    ]
    log_probs = SimpleNamespace(logprobs=[-0.5] * len(versions))
    completion = SimpleNamespace(
        token_ids=[65] * len(versions), logprobs=log_probs, finish_reason=reason, weight_versions=spans
    )
    return SimpleNamespace(request_id=request_id, finished=True, outputs=[completion])


class TailedRollout(Rollout):
    """The rollout stage with `TailedEngine`."""

    def __init__(self, config: Config, policy: Policy):
        with patch.object(vllm, "build", lambda *args: TailedEngine()):
            super().__init__(config, policy)


def measure(overrides: list[str], folder: Path, iterations: int) -> tuple[list[float], list[int]]:
    """Seconds of each iteration after the first ones, and the ages of their rows; Ray must be running."""
    config = settings(folder, *overrides)
    shards = [shard(rank) for rank in range(RANKS)]
    trainer = StandInTrainer(config, STARTING + iterations, tempfile.mkdtemp(dir=folder), TailedRollout, shards)
    ends, ages = [], []
    for _ in range(STARTING + iterations):
        tables = trainer.iterate(NEED_S / 4)
        ages += [age for table in tables for age in staleness(table).tolist()] if len(ends) >= STARTING else []
        ends.append(time.perf_counter())
    trainer.finish()
    return [end - begin for begin, end in zip(ends[STARTING - 1 :], ends[STARTING:], strict=False)], ages


def settings(folder: Path, *overrides: str) -> Config:
    return load_config(
        [
            f"model.path={folder / 'model'}",
            f"data.train_files={folder / 'prompts'}",
            f"data.train_batch_size={CHUNKS * CHUNK_PROMPTS}",
            "data.max_prompt_length=512",
            f"data.max_response_length={LONGEST}",
            f"rollout.chunk_prompts={CHUNK_PROMPTS}",
            f"rollout.n={SAMPLES}",
            "rollout.num_cpus=0.2",
            f"rollout.chunks_in_flight={3 * CHUNKS}",
            "rollout.update=in_flight",
            "reward.num_cpus=0.5",
            "trainer.total_training_steps=1000",
            "trainer.ray_num_cpus=4",
            *overrides,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    result = Table(title=f"engine full all the time: {NEED_S:.2f} s an iteration", title_justify="left")
    for name in ("max_staleness", "way", "s/iteration", "of the need", "slowest", "mean age", "oldest"):
        result.add_column(name, justify="right")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        byte_tokenizer().save_pretrained(folder / "model")
        write_prompts(folder / "prompts", 5000, 1, 500)
        start_ray(settings(folder))
        for bound in args.staleness:
            for name in args.cases:
                taken, ages = measure([f"algorithm.max_staleness={bound}", *CASES[name]], folder, args.iterations)
                mean = statistics.mean(taken)
                numbers = f"{mean:.3f}", f"{mean / NEED_S:.2f}", f"{max(taken):.3f}"
                row = str(bound), name, *numbers, f"{statistics.mean(ages):.2f}", str(max(ages))
                Console().print(" ".join(row))
                result.add_row(*row)
        ray.shutdown()
    Console().print(result)


if __name__ == "__main__":
    main()
