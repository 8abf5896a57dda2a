"""The actor: the policy that is trained, and its update.

An update goes over an iteration's rows `actor.ppo_epochs` times in mini-batches of `actor.ppo_mini_batch_size` prompts,
one optimiser step each. A mini-batch is a whole number of chunks dealt to the ranks in turn, so it holds the same rows
whatever the number of ranks; its loss is normalised by counts over all ranks before the first backward pass, so neither
ranks nor micro-batches change loss or gradient.

Rows whose advantages are all 0 (groups whose rewards agree) add nothing to loss or gradient, but count in what it is
normalised by. Without an entropy bonus they are left out of the update's passes: the same step for less work.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import Config
from pipeline.track.metrics import Stat, Stats, log_prob_gap, mean, merge
from pipeline.train.fsdp import clip_grad_norm, shard
from pipeline.train.losses import agg_loss, get_policy_loss
from pipeline.train.optim import build_optimizer, build_scheduler
from pipeline.train.packing import MicroBatch, Rows, collate, minimum_parts, split_micro_batches
from pipeline.train.policy import load_policy


class Actor:
    """The sharded policy with its optimiser.

    Args:
        config: the run's configuration.
        device: this rank's device.
        total_steps: optimiser steps of the whole run, for the schedule.
    """

    def __init__(self, config: Config, device: torch.device, total_steps: int):
        self.config = config.actor
        self.device = device
        self.temperature = config.rollout.temperature
        self.scale_factor = config.actor.loss_scale_factor or float(config.data.max_response_length)
        self.mini_batches = config.data.train_batch_size // (
            config.actor.ppo_mini_batch_size or config.data.train_batch_size
        )
        self.policy = shard(load_policy(config.model), config.actor.fsdp, device)
        self.optimizer = build_optimizer(self.policy, config.actor.optim)
        self.scheduler = build_scheduler(self.optimizer, config.actor.optim, total_steps)
        self.loss = get_policy_loss("vanilla")

    def update(self, rows: Rows) -> Stats:
        """Train on one iteration's rows of this rank; a collective. Returns metrics, to be merged over ranks."""
        stats: list[Stats] = []
        if self.config.old_log_probs == "recompute":
            begun = time.perf_counter()
            stats.append(self._recompute(rows))
            stats.append({"timing_s/old_log_prob": Stat("max", (time.perf_counter() - begun,))})
        begun = time.perf_counter()
        for epoch in range(self.config.ppo_epochs):
            for number, index in enumerate(np.array_split(np.arange(len(rows)), self.mini_batches)):
                # Engine log-probs can be compared until the first step has changed the weights.
                fresh = self.config.old_log_probs == "engine" and epoch == number == 0
                stats.append(self._step(rows, index.tolist(), fresh))
        stats.append({"timing_s/update_actor": Stat("max", (time.perf_counter() - begun,))})
        return merge(stats)

    def restore_schedule(self, steps: int) -> None:
        """Put the learning rate where it stands after `steps` optimiser steps."""
        self.scheduler.last_epoch = steps - 1
        self.scheduler.step()

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        log_probs, entropy = self.policy(
            batch.input_ids,
            batch.select,
            batch.targets,
            temperature=self.temperature,
            chunk_tokens=self.config.logits_chunk_tokens,
            with_entropy=True,
        )
        return log_probs, entropy

    @torch.no_grad()
    def _recompute(self, rows: Rows) -> Stats:
        """Write the trainer's own log-probs into `rows.old_log_probs`."""
        stats = []
        for batch in self._micro_batches(rows, list(range(len(rows)))):
            log_probs, entropy = self._forward(batch)
            rows.old_log_probs[batch.flat] = log_probs.cpu().numpy()
            stats.append(entropy_of(entropy, batch.mask))
        return merge([log_prob_gap(rows.rollout_log_probs, rows.old_log_probs, rows.mask), *stats])

    def _step(self, rows: Rows, index: list[int], fresh: bool) -> Stats:
        """One optimiser step on the mini-batch of rows `index`."""
        tokens, sequences = self._sum(rows.mask_counts(index))
        if not self.config.entropy_coeff:
            index = rows.with_advantages(index)
        stats: list[Stats] = []
        self.optimizer.zero_grad(set_to_none=True)
        for batch in self._micro_batches(rows, index):
            stats.append(self._backward(batch, tokens, sequences, fresh))
        norm = clip_grad_norm(self.policy.parameters(), self.config.grad_clip)
        # Every rank sees the same norm and count. Without tokens the gradient is zero, and a step would still decay.
        step = math.isfinite(norm) and tokens > 0
        stats.append(
            {
                "actor/grad_norm": mean(norm, 1) if math.isfinite(norm) else mean(0, 0),
                "actor/skipped_steps": Stat("sum", (float(not step) / dist.get_world_size(),)),
                "actor/lr": Stat("max", (self.optimizer.param_groups[0]["lr"],)),
            }
        )
        if step:
            self.optimizer.step()
            self.scheduler.step()
        return merge(stats)

    def _backward(self, batch: MicroBatch, tokens: float, sequences: float, fresh: bool) -> Stats:
        config = self.config
        log_probs, entropy = self._forward(batch)
        per_token, sums = self.loss(
            log_probs,
            batch.old_log_probs,
            batch.advantages,
            batch.mask,
            batch.segment,
            clip_ratio_low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
            clip_ratio_c=config.clip_ratio_c,
        )

        def aggregate(values: Tensor) -> Tensor:
            return agg_loss(
                values,
                batch.mask,
                config.loss_agg_mode,
                global_tokens=tokens,
                global_sequences=sequences,
                segment=batch.segment,
                sequences=batch.sequences,
                scale_factor=self.scale_factor,
            )

        pg_loss = aggregate(per_token)
        loss = pg_loss
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * aggregate(entropy)
        loss.backward()
        share = 1.0 / (self.mini_batches * config.ppo_epochs)
        stats = {
            "actor/pg_loss": Stat("sum", (pg_loss.item() * share,)),
            "actor/loss": Stat("sum", (loss.item() * share,)),
            **{f"actor/{name}": mean(total.item(), count.item()) for name, (total, count) in sums.items()},
        }
        if self.config.old_log_probs == "engine":
            stats |= entropy_of(entropy, batch.mask)
        if fresh:
            stats |= log_prob_gap(batch.rollout_log_probs.cpu(), log_probs.detach().cpu(), batch.mask.cpu())
        return stats

    def _micro_batches(self, rows: Rows, index: list[int]) -> Iterator[MicroBatch]:
        """Micro-batches of the rows `index`; every rank gets equally many, since each is a collective."""
        all_lengths = rows.lengths
        lengths = [all_lengths[i] for i in index]
        budget = self.config.ppo_max_token_len_per_gpu
        parts = int(self._reduce([minimum_parts(lengths, budget)], dist.ReduceOp.MAX)[0])
        for part in split_micro_batches(lengths, budget, parts):
            yield collate(rows, [index[i] for i in part]).to(self.device)

    def _sum(self, values: tuple[int, ...]) -> list[float]:
        return self._reduce(list(values), dist.ReduceOp.SUM)

    def _reduce(self, values: list[int], op: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op)
        return tensor.tolist()


def entropy_of(entropy: Tensor, mask: Tensor) -> Stats:
    """Mean entropy of the tokens that train."""
    keep = mask > 0
    return {"actor/entropy": mean(torch.where(keep, entropy.detach(), 0.0).sum().item(), keep.sum().item())}
