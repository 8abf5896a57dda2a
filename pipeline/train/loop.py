"""The train loop: what every train worker does, iteration by iteration.

    wait for rows ─► update critic and actor ─► publish the next version ─► report

With `trainer.early` the updates begin with the first chunks, while the others are generated (`early.py`).

Version v has seen v iterations; iteration k trains on rows of version k - 1 (up to `algorithm.max_staleness` older) and
publishes version k. Reading the next iteration is what lets the stream go on, so nothing here needs to be told to wait.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from pipeline import checkpoints
from pipeline.advantage.kl import kl_controller
from pipeline.ask import ANSWER_S, ask
from pipeline.cluster import compute_threads
from pipeline.errors import FinalError
from pipeline.export.settings import ModelSettings
from pipeline.overlap import trains_early
from pipeline.prompts.chat import load_tokenizer
from pipeline.rollout.direct import TRANSPORTS
from pipeline.stages import uses_critic
from pipeline.store import CRITIC, POLICY
from pipeline.track.metrics import Stat, Stats, iteration_metrics, reduce
from pipeline.track.performance import derived, memory_metrics, sequence_balance
from pipeline.track.trajectories import discard_trajectories
from pipeline.track.watchdog import describe
from pipeline.train.actor import Actor
from pipeline.train.broadcast import Sender
from pipeline.train.checkpoint import Saver, restore
from pipeline.train.critic import Critic
from pipeline.train.early import EarlyUpdate
from pipeline.train.entry import LoopSettings
from pipeline.train.feed import Blocks, RowsFeed
from pipeline.train.fsdp import save_hf, torch_dtype
from pipeline.train.learner import Learner
from pipeline.train.outbox import Outbox
from pipeline.train.packing import Rows
from pipeline.train.staleness import within_bound

TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
"""How torch words that a collective operation took too long."""


class CollectiveTimeout(TimeoutError):
    """The other train workers did not come to a collective operation."""


class Loop:
    """One train worker."""

    def __init__(self, settings: LoopSettings):
        self.config, self.schedule, self.run_dir = settings.config, settings.schedule, settings.run_dir
        context = ray.train.get_context()
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.device = ray.train.torch.get_device()
        trainer = self.config.trainer
        if self.device.type == "cpu":
            torch.set_num_threads(compute_threads(trainer.num_threads, trainer.cpus_per_worker))
        torch.manual_seed(trainer.seed)
        self._store = settings.store
        self._generation = self._ask_store("current")
        iterations, warmup = self.schedule.iterations, self.config.critic.warmup
        self.actor = Actor(self.config, self.device, iterations - warmup)
        self.critic = Critic(self.config, self.device, iterations) if uses_critic(self.config) else None
        self.learners: list[Learner] = [self.actor, *([self.critic] if self.critic else [])]
        self.kl = kl_controller(self.config.algorithm.kl_ctrl)
        self.senders = self._senders()
        root = checkpoints.root(trainer, self.run_dir)
        self.version, position = restore(
            self.learners, self.kl, root, settings.checkpoint, trainer.deadlines.checkpoint
        )
        self.saved = self.version
        self.saver = Saver(self.config, self.run_dir, self._post_saved)
        if self.rank == 0:
            # What an interrupted try recorded of later iterations would stand beside the rows that come now.
            discard_trajectories(self.run_dir, self.version + 1)
            self._ask("begin", self.version, self.world_size, position)
        dist.barrier()
        blocks = ray.train.get_dataset_shard("rollouts").iter_batches(
            # A batch is a block is a chunk. Prefetching would wait for a chunk that this iteration's update admits.
            batch_size=None,
            batch_format="pyarrow",
            prefetch_batches=0,
        )
        chunks, self.early = self.schedule.chunks_per_iteration // self.world_size, trains_early(self.config)
        self.feed = RowsFeed(Blocks(iter(blocks), trainer.deadlines.rows, self._describe), chunks)

    def run(self) -> dict[str, Any]:
        """Iterate until the last iteration, the end of the data, or a request to stop; then save.

        Returns:
            the last version, and whether it was asked to stop.

        Raises:
            CollectiveTimeout: another train worker did not come to a collective operation.
        """
        try:
            return self._run()
        except RuntimeError as error:
            of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
            if not of_torch or not TIMED_OUT.search(str(error)):
                raise
            limit = self.config.trainer.deadlines.collective
            raise CollectiveTimeout(
                f"collective: train rank {self.rank} waited longer than {limit:.0f} s (trainer.deadlines.collective) "
                f"for the others, after version {self.version}; {describe(self._ask_store('status'))}"
            ) from error

    def _run(self) -> dict[str, Any]:
        self._publish()
        timings: Stats = {}
        stopping = False
        while self.version < self.schedule.iterations and not stopping:
            with timed(timings, "step"):
                updated = self._update_early(timings) if self.early else self._update(timings)
                if updated is None:
                    break
                table, stats = updated
                self._update_kl(table)
                self.version += 1
                with timed(timings, "publish"):
                    self._publish()
            metrics = iteration_metrics(table, max_staleness=self.config.algorithm.max_staleness)
            stopping = self._report(table, [metrics, *stats, timings])
            timings = {}
            if self.config.trainer.save_freq > 0 and self.version % self.config.trainer.save_freq == 0:
                with timed(timings, "save_checkpoint"):
                    self._save()
        if not stopping:
            # What is left of the stream is the validation of the last version.
            self.feed.drain()
        if self.saved != self.version:
            self._save()
        self.saver.wait()
        save_hf(self.actor.module, load_tokenizer(self.config.model), f"{self.run_dir}/model")
        end = {"version": self.version, "stopped": stopping}
        if self.rank == 0:
            ModelSettings.of(self.config, self.version).save(Path(self.run_dir) / "model")
            self._ask("post", "done", end)
        return end

    def _trained(self) -> list[Learner]:
        """Who is updated in the next iteration."""
        policy = [self.actor] if self.version >= self.config.critic.warmup else []
        return [*([self.critic] if self.critic else []), *policy]

    def _update(self, timings: Stats) -> tuple[pa.Table, list[Stats]] | None:
        """Train on the next iteration: its rows, and metrics; None where the stream has ended."""
        with timed(timings, "gen"):
            table = self.feed.next(self.version + 1)
        if table is None:
            return None
        table = within_bound(table, self.config.algorithm)
        rows = Rows.from_table(table)
        return table, [learner.update(rows) for learner in self._trained()]

    def _update_early(self, timings: Stats) -> tuple[pa.Table, list[Stats]] | None:
        """As `_update`, chunk by chunk as they come."""
        updates = [EarlyUpdate(learner, self.feed.chunks) for learner in self._trained()]
        tables: list[pa.Table] = []
        for number in range(self.feed.chunks):
            with timed(timings, "gen"):
                table = self.feed.chunk(self.version + 1, number)
                # Whoever has its rows waits for the others here, and not unseen in their first collective.
                dist.barrier()
            if table is None:
                return None
            tables.append(within_bound(table, self.config.algorithm))
            rows = Rows.from_table(tables[-1])
            for update in updates:
                update.add(rows)
        return pa.concat_tables(tables), [update.finish() for update in updates]

    def _update_kl(self, table: pa.Table) -> None:
        """Steer the coefficient of the KL in the reward by the KL of all ranks' rows."""
        if self.config.algorithm.use_kl_in_reward:
            known = table["kl"].drop_null()
            total, count = self.actor.all_reduce([pc.sum(known).as_py() or 0.0, float(len(known))])
            if count:
                self.kl.update(total / count, len(table) * self.world_size)

    def _publish(self) -> None:
        """Make the current weights version `self.version` of every trained model."""
        stepped_at = time.time()
        shards = {POLICY: self.senders[POLICY].pack(self.actor.module, self.version)}
        if self.critic:
            shards[CRITIC] = self.senders[CRITIC].pack(self.critic.module, self.version)
        if self.config.rollout.sleep and self.device.type == "cuda":
            # An engine that wakes needs what the update has freed and torch still holds.
            torch.cuda.empty_cache()
        validates = self.schedule.validates(self.version, False)
        self._ask("publish", self.version, shards, stepped_at, self.kl.coef, validates)

    def _senders(self) -> dict[str, Sender]:
        """What puts the weights of each model."""
        trainer = self.config.trainer
        limit, way = trainer.weight_bucket_mb * 2**20, trainer.weight_transport
        outbox = None
        if way in TRANSPORTS:
            outbox = Outbox(way, self.rank, self.config.algorithm.max_staleness + 2, self.device)
        kind = torch_dtype(self.config.rollout.dtype, "rollout.dtype")
        name = self.actor.module.hf_name
        senders = {POLICY: Sender(self.rank, kind, limit, ray.put, name, way == "delta", outbox)}
        if self.critic:
            kind = torch_dtype(self.config.model.dtype, "model.dtype")
            senders[CRITIC] = Sender(self.rank, kind, limit, ray.put)
        return senders

    def _save(self) -> None:
        if self.rank == 0:
            # What a restart cut off of earlier versions' validations would not be made again.
            self._wait("reach", self.version, self.config.trainer.deadlines.rows)
            ask(self._store, "settle", self._generation, self.version, ANSWER_S, timeout=2 * ANSWER_S)
        position = self._ask("checkpoint_position", self.version) if self.rank == 0 else None
        self.saver.save(self.learners, self.kl, self.version, position)
        self.saved = self.version

    def _post_saved(self, version: int) -> None:
        self._ask("post", "saved", {"version": version, "rank": self.rank, "ranks": self.world_size})

    def _report(self, table: pa.Table, stats: list[Stats]) -> bool:
        """Merge all ranks' metrics, post them, and say whether to stop; a collective."""
        tokens = {name: pc.sum(pc.list_value_length(table[f"{name}_ids"])).as_py() for name in ("prompt", "response")}
        stats.append({name: Stat("sum", (float(count),)) for name, count in tokens.items()})
        stats += [memory_metrics(self.device), sequence_balance(table), self.senders[POLICY].stats()]
        parts: list[Any] = [None] * self.world_size
        dist.gather_object(stats, parts if self.rank == 0 else None)
        verdict: list[Any] = [None, False]
        if self.rank == 0:
            metrics = reduce(part for rank in parts for part in rank)
            metrics |= derived(metrics, metrics.pop("prompt"), metrics.pop("response"), self.world_size)
            verdict = [self._complaint(metrics, table), self._ask_store("should_stop")]
            self._ask("post", "iteration", {"iteration": self.version, "metrics": metrics})
        dist.broadcast_object_list(verdict)
        if verdict[0] is not None:
            raise FinalError(verdict[0])
        return verdict[1]

    def _complaint(self, metrics: dict[str, float], table: pa.Table) -> str | None:
        """Why the run must not go on, if so."""
        limit = self.config.reward.max_error_rate
        if metrics["reward/error_rate"] > limit:
            errors = [error for error in table["reward_error"].to_pylist() if error is not None]
            first = f"; one of them: {errors[0]}" if errors else ""
            return (
                f"the reward failed for {metrics['reward/error_rate']:.0%} of the rows of iteration {self.version}, "
                f"more than reward.max_error_rate={limit:.0%}{first}"
            )
        bound, gap = self.config.trainer.max_log_prob_gap, metrics.get("training/rollout_log_probs_diff_max", 0.0)
        if bound is not None and gap > bound:
            return (
                f"engine and trainer disagree about a token's log-prob by {gap:.2g} in iteration {self.version}, "
                f"more than trainer.max_log_prob_gap={bound:g}: the engine does not run the published weights, or "
                "computes in another precision (rollout.dtype, actor.fsdp.param_dtype)"
            )
        return None

    def _describe(self) -> str:
        return f"trainer.deadlines.rows; {describe(self._ask_store('status'))}"

    def _ask(self, method: str, *args: Any) -> Any:
        return self._ask_store(method, self._generation, *args)

    def _wait(self, method: str, *args: Any) -> None:
        """Call a method of the store that waits; its last argument is its deadline, which a living run extends."""
        ray.get(getattr(self._store, method).remote(self._generation, *args), timeout=None)

    def _ask_store(self, method: str, *args: Any) -> Any:
        return ask(self._store, method, *args)


@contextmanager
def timed(timings: Stats, name: str) -> Iterator[None]:
    """Record the wall-clock seconds of the block, and of others of its name, as `timing_s/{name}` (the slowest
    rank's)."""
    begun = time.perf_counter()
    yield
    (before,) = timings[f"timing_s/{name}"].values if f"timing_s/{name}" in timings else (0.0,)
    timings[f"timing_s/{name}"] = Stat("max", (before + time.perf_counter() - begun,))
