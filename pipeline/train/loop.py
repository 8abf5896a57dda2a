"""The train loop: what every train worker does, iteration by iteration.

    wait for rows ─► update the actor ─► publish the next policy version ─► report

Version v has seen v iterations; iteration k trains on rows of version k - 1 (up to `algorithm.max_staleness` older) and
publishes version k. Reading the next iteration is what lets the stream go on, so nothing here needs to be told to wait.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.prompts.chat import load_tokenizer
from pipeline.prompts.stage import ANSWER_S, Schedule
from pipeline.track.metrics import Stat, Stats, iteration_metrics, mean, reduce
from pipeline.train import checkpoint
from pipeline.train.actor import Actor
from pipeline.train.broadcast import pack
from pipeline.train.feed import RowsFeed
from pipeline.train.fsdp import save_hf, torch_dtype
from pipeline.train.packing import Rows


@dataclass(frozen=True)
class LoopSettings:
    """What the driver gives every train worker."""

    config: Config
    schedule: Schedule
    store: Any
    run_dir: str


def train_loop(settings: dict[str, LoopSettings]) -> None:
    """Entry point of a Ray Train worker."""
    Loop(settings["settings"]).run()


class Loop:
    """One train worker."""

    def __init__(self, settings: LoopSettings):
        self.config, self.schedule, self.run_dir = settings.config, settings.schedule, settings.run_dir
        context = ray.train.get_context()
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.device = ray.train.torch.get_device()
        trainer = self.config.trainer
        if self.device.type == "cpu":
            torch.set_num_threads(trainer.num_threads or max(1, round(trainer.cpus_per_worker)))
        torch.manual_seed(trainer.seed)
        self._store = settings.store
        self._generation = ray.get(self._store.current.remote(), timeout=ANSWER_S)
        self.actor = Actor(self.config, self.device, self._optimizer_steps())
        self.version, position = checkpoint.restore(self.actor)
        if self.rank == 0:
            self._ask("begin", self.version, self.world_size, position)
        dist.barrier()
        blocks = ray.train.get_dataset_shard("rollouts").iter_batches(
            # A batch is a block is a chunk. Prefetching would wait for a chunk that this iteration's update admits.
            batch_size=None,
            batch_format="pyarrow",
            prefetch_batches=0,
        )
        chunks = self.schedule.chunks_per_iteration // self.world_size
        self.feed = RowsFeed(iter(blocks), chunks, trainer.deadlines.rows, self._describe)

    def run(self) -> None:
        """Iterate until the last iteration, the end of the data, or a request to stop."""
        self._publish(time.time())
        stopping = False
        while self.version < self.schedule.iterations and not stopping:
            iteration, begun, timings = self.version + 1, time.perf_counter(), {}
            with timed(timings, "gen"):
                table = self.feed.next(iteration)
            if table is None:
                break
            stats = [self.actor.update(Rows.from_table(table)), iteration_metrics(table)]
            self.version = iteration
            with timed(timings, "publish"):
                self._publish(time.time())
            timings["timing_s/step"] = Stat("max", (time.perf_counter() - begun,))
            stopping = self._report(iteration, table, [*stats, timings])
            save_freq = self.config.trainer.save_freq
            if stopping or iteration == self.schedule.iterations or (save_freq > 0 and iteration % save_freq == 0):
                with timed(timings, "save_checkpoint"):
                    checkpoint.save(self.actor, iteration, self._ask("position", iteration))
        if not stopping:
            # What is left of the stream is the validation of the last version.
            self.feed.drain()
        save_hf(self.actor.policy, load_tokenizer(self.config.model), f"{self.run_dir}/model")
        self._ask("post", "done", {"version": self.version, "stopped": stopping})

    def _publish(self, stepped_at: float) -> None:
        """Make the current weights the policy version `self.version`."""
        shard = pack(
            self.actor.policy,
            self.rank,
            torch_dtype(self.config.rollout.dtype, "rollout.dtype"),
            self.config.trainer.weight_bucket_mb * 2**20,
            ray.put,
            self.actor.policy.hf_name,
        )
        self._ask("publish", self.version, shard, stepped_at)

    def _report(self, iteration: int, table: pa.Table, stats: list[Stats]) -> bool:
        """Merge all ranks' metrics, post them, and say whether to stop; a collective."""
        tokens = sum(len(ids) for name in ("prompt_ids", "response_ids") for ids in table[name])
        stats.append({"perf/total_num_tokens": Stat("sum", (float(tokens),))})
        parts: list[Any] = [None] * self.world_size if self.rank == 0 else []
        dist.gather_object(stats, parts if self.rank == 0 else None)
        verdict: list[Any] = [None, False]
        if self.rank == 0:
            metrics = reduce(part for rank in parts for part in rank)
            step = metrics["timing_s/step"]
            metrics["perf/time_per_step"] = step
            metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / step / self.world_size
            verdict = [self._complaint(metrics, table), self._ask_store("should_stop")]
            self._ask("post", "iteration", {"iteration": iteration, "metrics": metrics})
        dist.broadcast_object_list(verdict)
        if verdict[0] is not None:
            raise RuntimeError(verdict[0])
        return verdict[1]

    def _complaint(self, metrics: dict[str, float], table: pa.Table) -> str | None:
        """Why the run must not go on, if so."""
        limit = self.config.reward.max_error_rate
        if metrics["reward/error_rate"] > limit:
            errors = [error for error in table["reward_error"].to_pylist() if error is not None]
            first = f"; one of them: {errors[0]}" if errors else ""
            return (
                f"the reward failed for {metrics['reward/error_rate']:.0%} of the rows of iteration {self.version}, more "
                f"than reward.max_error_rate={limit:.0%}{first}"
            )
        bound, gap = self.config.trainer.max_log_prob_gap, metrics.get("training/rollout_log_probs_diff_max", 0.0)
        if bound is not None and gap > bound:
            return (
                f"engine and trainer disagree about a token's log-prob by {gap:.2g} in iteration {self.version}, more than "
                f"trainer.max_log_prob_gap={bound:g}: the engine does not run the published weights, or computes in "
                "another precision (rollout.dtype, actor.fsdp.param_dtype)"
            )
        return None

    def _optimizer_steps(self) -> int:
        actor, data = self.config.actor, self.config.data
        mini_batches = data.train_batch_size // (actor.ppo_mini_batch_size or data.train_batch_size)
        return self.schedule.iterations * mini_batches * actor.ppo_epochs

    def _describe(self) -> str:
        status = self._ask_store("status")
        waits = ", ".join(f"{count} in {phase}" for phase, count in status["waiting"].items() if count) or "none"
        return (
            f"policy version {status['version']} is out, store waits: {waits}, last sign of life "
            f"{status['alive_s']:.0f} s ago from {status['alive_by']}"
        )

    def _ask(self, method: str, *args: Any) -> Any:
        return self._ask_store(method, self._generation, *args)

    def _ask_store(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self._store, method).remote(*args), timeout=ANSWER_S)


@contextmanager
def timed(timings: Stats, name: str) -> Iterator[None]:
    """Record the wall-clock seconds of the block as `timing_s/{name}` (the slowest rank's)."""
    begun = time.perf_counter()
    yield
    timings[f"timing_s/{name}"] = Stat("max", (time.perf_counter() - begun,))
