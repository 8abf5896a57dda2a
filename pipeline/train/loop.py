"""The train loop, which every train worker runs, iteration by iteration.

    wait for rows ─► deal them by their work ─► update critic and actor ─► publish the next version ─► report

Policy version v is the policy after v iterations; version 0 is the initial one. Iteration k trains on rows of version
k - 1, or of up to `algorithm.max_staleness` versions before it, and publishes version k. The loop controls the stream
only by reading rows and publishing versions. With `trainer.stream_gradients` it trains on each chunk while engines
generate the next ones.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.train
import ray.train.torch
import torch

from pipeline.advantage.kl_controller import kl_controller
from pipeline.config import save_yaml
from pipeline.derived import streams_gradients, uses_critic
from pipeline.errors import FinalError
from pipeline.greeting import Greeting
from pipeline.models.batch import TrainBatch
from pipeline.models.ends import find_ends
from pipeline.models.fsdp import NotSavedError, rescue, save_hf, try_save
from pipeline.models.precision import torch_dtype
from pipeline.models.settings import ModelSettings
from pipeline.models.tokenizer import load_tokenizer
from pipeline.rows import flat, policy_tokens, prompt_tokens
from pipeline.stats import Stat, Stats, merge, reduce
from pipeline.storage import checkpoints
from pipeline.store.client import ANSWER_S, StoreClient
from pipeline.store.events import CheckpointSaved, IterationTrained, Noted, TrainingEnded, Trouble
from pipeline.store.policy_store import PolicyStore
from pipeline.store.status import TrainerState
from pipeline.store.versions import CRITIC, POLICY
from pipeline.threads import compute_threads
from pipeline.track.metrics import iteration_metrics, missing_rates
from pipeline.track.performance import derived, memory_metrics, sequence_balance
from pipeline.track.trajectories import Record, discard_trajectories, why_unrecorded
from pipeline.train import ranks
from pipeline.train.checkpoint import NotStored, Saver
from pipeline.train.deal import Dealer
from pipeline.train.feed import RowsFeed, TimedIterator
from pipeline.train.handshake import Handshake
from pipeline.train.learner import Learner
from pipeline.train.loop_settings import LoopSettings
from pipeline.train.report import CollectiveTimeout, is_collective_timeout, stop_reason, timed
from pipeline.train.restore import restore
from pipeline.train.setup import build_actor, build_critic, build_publishers
from pipeline.train.update import StreamedUpdate


class Loop:
    """The train loop of one train worker."""

    def __init__(self, settings: LoopSettings):
        self.config, self.schedule, self.run_dir = settings.config, settings.schedule, settings.run_dir
        self.rank, self.world_size = ranks.rank(), ranks.count()
        self.device = ray.train.torch.get_device()
        trainer = self.config.trainer
        if self.device.type == "cpu":
            torch.set_num_threads(compute_threads(trainer.num_threads, trainer.cpus_per_worker))
        torch.manual_seed(trainer.seed)
        store = StoreClient(settings.store)
        self._store = StoreClient(settings.store, store.ask(PolicyStore.current_attempt))
        iterations, warmup = self.schedule.iterations, self.config.critic.warmup
        self.actor = build_actor(self.config, self.device, iterations - warmup)
        self.critic = (
            build_critic(self.config, self.device, iterations, self.actor.mesh) if uses_critic(self.config) else None
        )
        self.learners: list[Learner] = [self.actor, *([self.critic] if self.critic else [])]
        self._try_to_save()
        self.kl = kl_controller(self.config.algorithm.kl_ctrl)
        self.publishers = build_publishers(self.config, self.actor, self.critic, self.rank, self.device)
        root = checkpoints.root(trainer, self.run_dir)
        state = restore(self.learners, self.kl, root, settings.policy, trainer.deadlines.checkpoint, self._say)
        self.version = self.saved = state.version
        last = self.version >= self.schedule.iterations
        self.handshake = Handshake(self.config, self.actor, self.learners, self.run_dir, settings.start, last)
        self.record = Record(self.run_dir)
        save_settings = partial(save_yaml, self.config)
        self.saver = Saver(self.run_dir, root, trainer.deadlines.checkpoint, save_settings, self._post_saved, self._say)
        self.saver.check_room(self.learners)
        if self.rank == 0:
            # An interrupted attempt may have recorded later iterations.
            discard_trajectories(self.run_dir, self.version + 1)
            self._store.call(PolicyStore.register_trainer, state, self.world_size, self.handshake.shaking)
            for note in (note for learner in self.learners for note in learner.passes.notes):
                self._store.call(PolicyStore.post, Noted(note))
        ranks.barrier()

    def run(self) -> TrainingEnded:
        """Iterate until the last iteration, the end of the data, or a request to stop; then save.

        Raises:
            CollectiveTimeout: another train worker did not reach a collective operation in time.
            FinalError: a checkpoint or the model could not be stored; the message names the folder that has the model.
        """
        try:
            return self._run()
        except NotStored as error:
            folders = (self._model_folder, self._elsewhere)
            raise FinalError(rescue(self._save_model, folders, str(error))) from error
        except RuntimeError as error:
            if not is_collective_timeout(error):
                raise
            limit = self.config.trainer.deadlines.collective
            raise CollectiveTimeout(
                f"collective: train rank {self.rank} waited longer than {limit:.0f} s (trainer.deadlines.collective) "
                f"for the others, after version {self.version}; {self._store.ask(PolicyStore.status).describe()}"
            ) from error

    def _begin(self) -> None:
        """Publish the first version, then begin to read rows, for which engines start.

        vLLM measures a GPU's memory as it starts, and fails if a train worker on the GPU frees memory meanwhile.
        """
        self._publish()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        ranks.barrier()
        blocks = ray.train.get_dataset_shard("rollouts").iter_batches(
            # One batch is one block, which is one chunk. Prefetching would wait for a chunk that waits for this update.
            batch_size=None,
            batch_format="pyarrow",
            prefetch_batches=0,
        )
        chunks = self.schedule.chunks_per_iteration // self.world_size
        parts = chunks if streams_gradients(self.config) else 1
        limit = self.config.trainer.deadlines.rows
        rows = TimedIterator(iter(blocks), limit, self._describe)
        self.feed = RowsFeed(rows, chunks, parts)
        if self.handshake.due and not self.config.rollout.sleep:
            # The engines generate the first rows meanwhile.
            self._shake_hands(rows.wait(self._greeting, "rows of an engine for the handshake"))
        self.deal = Dealer.of(self.actor, self.critic, self.config.rollout.n, parts)

    def _greeting(self) -> Greeting | None:
        return self._store.call(PolicyStore.greeting)

    def _shake_hands(self, greeting: Greeting | None) -> None:
        """Compare the engine's log-probs with the trainer's; a collective."""
        greeting = ranks.broadcast(greeting)
        text = self.handshake.settle(greeting) if greeting else "the engines sent no rows to compare the trainer with"
        if self.rank == 0:
            self._store.call(PolicyStore.settle, self.handshake.change)
            self._say(text)

    def _run(self) -> TrainingEnded:
        self._begin()
        timings: Stats = {}
        stopping = False
        while self.version < self.schedule.iterations and not stopping:
            with timed(timings, "step"):
                updated = self._update(timings)
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
                    self._save(stopping)
        if not stopping:
            # The stream may still be validating the last version.
            self.feed.drain()
        if self.saved != self.version:
            self._save(stopping)
        self.saver.wait()
        try:
            self._save_model(self._model_folder)
        except NotSavedError as error:
            raise FinalError(rescue(self._save_model, (self._elsewhere,), str(error))) from error
        end = TrainingEnded(self.version, stopping)
        if self.rank == 0:
            self._store.call(PolicyStore.post, end)
        return end

    @property
    def _model_folder(self) -> str:
        return f"{self.run_dir}/model"

    @property
    def _elsewhere(self) -> str:
        """Return the folder for the model in case the run's folder cannot be written."""
        return f"{self.saver.staging}/{Path(self.run_dir).name}-model-{os.getpid()}"

    def _try_to_save(self) -> None:
        """Try to write the files of the run's end, without weights; a collective.

        Raises FinalError on every rank.
        """
        shared = (Path(self.run_dir) / "config.yaml").is_file()
        nodes = [node for node in ranks.all_gather(None if shared else socket.gethostname()) if node]
        if nodes:
            raise FinalError(
                f"{self.run_dir} is not on the node {nodes[0]}, which trains; set trainer.default_local_dir to a "
                "folder that all nodes share"
            )
        try:
            self._save_model(self._model_folder, try_save)
        except NotSavedError as error:
            raise FinalError(str(error)) from error

    def _save_model(self, folder: str, save: Callable[..., None] = save_hf) -> None:
        """Save the model with the settings of its training; a collective. Raises NotSavedError on every rank."""
        dtype = torch_dtype(self.config.rollout.dtype, "rollout.dtype")
        tokenizer = load_tokenizer(self.config.model, needs_chat_template=False)
        ends = find_ends(self.config.model, tokenizer, self.config.data.apply_chat_template_kwargs)
        save(self.actor.module, tokenizer, folder, dtype, ends.ids, replace=True)
        problem = None
        if self.rank == 0 and save is save_hf:
            try:
                ModelSettings.of(self.config, self.version).save(Path(folder))
            except OSError as error:
                problem = f"the model's settings could not be saved in {folder}: {error.strerror or error}"
        if problem := ranks.broadcast(problem):
            raise NotSavedError(problem)

    def _trained(self) -> list[Learner]:
        """Return the learners that the next iteration updates."""
        policy = [self.actor] if self.version >= self.config.critic.warmup else []
        return [*([self.critic] if self.critic else []), *policy]

    def _update(self, timings: Stats) -> tuple[pa.Table, list[Stats]] | None:
        """Train on the next iteration's rows. Returns the rows that came to this rank, in whole groups and chunks, and
        metrics; None if the stream has ended."""
        updates = [StreamedUpdate(learner, self.feed.parts) for learner in self._trained()]
        tables: list[pa.Table] = []
        dealt: list[pa.Table] = []
        for part in range(self.feed.parts):
            # Ranks wait for each other here, so that the time counts as waiting for rows.
            with timed(timings, "gen"), self._recorded():
                table = self.feed.next(self.version + 1, part)
            if table is None:
                return None
            if self.handshake.due and self.config.rollout.sleep:
                # All engines that share GPUs with the train workers have given back their memory.
                self._shake_hands(self._greeting())
                self.deal = Dealer.of(self.actor, self.critic, self.config.rollout.n, self.feed.parts)
            tables.append(table)
            with timed(timings, "balance"):
                dealt.append(self.deal(table))
            batch = TrainBatch.from_table(dealt[-1])
            for update in updates:
                update.add(batch)
        rows = pa.concat_tables(dealt)
        stats = [*(update.finish() for update in updates), sequence_balance(rows)]
        for update in updates:
            if update.learner.needs_old_log_probs:
                with self._recorded():
                    if self.actor.leads:
                        self.record.old_log_probs(rows, self.version + 1, self.rank, update.rows.old_log_probs)
        return pa.concat_tables(tables), stats if self.actor.leads else []

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Have all ranks end with the model saved if rows cannot be recorded for one of them; a collective.

        Raises NotStored on every rank.
        """
        problem = None
        try:
            yield
        # An error of an engine comes in Ray's own.
        except Exception as error:
            if (problem := why_unrecorded(error)) is None:
                raise
        if problems := [text for text in ranks.all_gather(problem) if text]:
            raise NotStored(problems[0])

    def _update_kl(self, table: pa.Table) -> None:
        """Adapt the coefficient of the KL in the reward to the mean KL of all ranks' rows."""
        if self.config.algorithm.use_kl_in_reward:
            known = table["kl"].drop_null()
            total, count = self.actor.all_reduce([pc.sum(known).as_py() or 0.0, float(len(known))])
            if count:
                self.kl.update(total / count, len(table) * self.world_size)

    def _publish(self) -> None:
        """Publish the current weights of every trained model as version `self.version`."""
        stepped_at = time.time()
        shards = {POLICY: self.publishers[POLICY].pack(self.actor.module, self.version)}
        if self.critic:
            shards[CRITIC] = self.publishers[CRITIC].pack(self.critic.module, self.version)
        if self.config.rollout.sleep and self.device.type == "cuda":
            # An engine that wakes up needs the memory that torch has cached during the update.
            torch.cuda.empty_cache()
        validates = self.schedule.validates(self.version, False)
        self._store.call(PolicyStore.publish, self.version, shards, stepped_at, self.kl.coef, validates)

    def _save(self, stopping: bool) -> None:
        """Save a checkpoint. Unless the run is stopping, wait first until the version has been validated."""
        state = None
        if self.rank == 0:
            # A run that resumes from this checkpoint would not repeat an earlier version's validation.
            wait = PolicyStore.wait_version if stopping else PolicyStore.wait_validated
            self._store.wait(wait, self.version, self.config.trainer.deadlines.rows)
            validated = self._store.call(PolicyStore.is_validated, self.version)
            self._store.wait(PolicyStore.flush_events, self.version, ANSWER_S)
            cursor = self._store.call(PolicyStore.end_of_iteration, self.version)
            state = TrainerState(self.version, cursor, validated)
        self.saver.save(self.learners, self.kl, self.version, state)
        self.saved = self.version

    def _say(self, text: str) -> None:
        self._store.call(PolicyStore.post, Trouble(text))

    def _post_saved(self, version: int) -> None:
        self._store.call(PolicyStore.post, CheckpointSaved(version, self.rank, self.world_size))

    def _report(self, table: pa.Table, stats: list[Stats]) -> bool:
        """Merge the metrics of all ranks and post them to the driver; a collective. Returns whether to stop.

        Raises FinalError if the metrics exceed a limit that ends the run (`stop_reason`).
        """
        tokens = {"prompt": prompt_tokens(table), "response": len(flat(table, "response_ids")[0])}
        tokens["policy"] = int(policy_tokens(table).sum())
        stats.append({name: Stat("sum", (float(count),)) for name, count in tokens.items()})
        stats += [memory_metrics(self.device), self.publishers[POLICY].stats()]
        parts = ranks.all_gather(stats)
        verdict: tuple[str | None, bool] = (None, False)
        if self.rank == 0:
            merged = merge(part for rank in parts for part in rank)
            metrics = reduce([merged, missing_rates(merged)])
            prompt, response, policy = (metrics.pop(name) for name in tokens)
            metrics |= derived(metrics, prompt, response, policy, self.world_size)
            reason = stop_reason(metrics, table, self.version, self.config)
            verdict = reason, self._store.ask(PolicyStore.status).stopping
            self._store.call(PolicyStore.post, IterationTrained(self.version, metrics))
        reason, stopping = ranks.broadcast(verdict)
        if reason is not None:
            raise FinalError(reason)
        return stopping

    def _describe(self) -> str:
        return f"trainer.deadlines.rows; {self._store.ask(PolicyStore.status).describe()}"
