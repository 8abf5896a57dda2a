"""The actor: the policy that is trained, and its update.

    [recompute the old log-probs ─► correct for the engine's] ─► per mini-batch: [select] ─► loss ─► step

Rows whose advantages are all 0 (groups whose rewards agree) add nothing to most losses, but count in what these are
normalised by. Where that is certain they are left out of the update's passes: the same step for less work.
"""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import Config
from pipeline.overlap import rollout_correction
from pipeline.track.metrics import Stat, Stats, log_prob_gap, mean, merge
from pipeline.train.correction import AllSum, Corrected, correct, parse
from pipeline.train.learner import Backward, Learner, UpdateShape
from pipeline.train.losses import Candidates, LossInput, agg_loss, checked, get_policy_loss
from pipeline.train.losses.kl import kl_loss
from pipeline.train.packing import MicroBatch, Rows
from pipeline.train.policy import Policy, load_policy


class Actor(Learner):
    """The sharded policy with its optimiser.

    Args:
        config: the run's configuration.
        device: this rank's device.
        iterations: iterations in which the policy is updated, for the schedule.
    """

    module: Policy

    def __init__(self, config: Config, device: torch.device, iterations: int):
        actor = config.actor
        shape, policy = UpdateShape.of(config, actor), load_policy(config.model)
        sharded = actor.optim, actor.fsdp, actor.grad_clip
        super().__init__(
            "actor", policy, shape, *sharded, actor.loss_agg_mode, device, iterations, config.model.share_prompts
        )
        self.config = actor
        self.seed = config.trainer.seed
        self.temperature = config.rollout.temperature
        self.scale_factor = actor.loss_scale_factor or float(config.data.max_response_length)
        self.loss = get_policy_loss(actor.policy_loss.loss_mode)
        self.correction = parse(rollout_correction(config))
        self.guards_gap = config.trainer.max_log_prob_gap is not None
        self.skips_without_advantage = (
            self.loss.zero_without_advantage and not actor.entropy_coeff and not actor.use_kl_loss
        )

    def update(self, rows: Rows) -> Stats:
        """Train on one iteration's rows of this rank; a collective. Returns metrics, to be merged over ranks."""
        stats: list[Stats] = []
        if self.prepares:
            begun = time.perf_counter()
            stats.append(self._recompute(rows))
            if self.correction.active:
                stats.append(self._correct(rows))
            stats.append({"timing_s/old_log_prob": Stat("max", (time.perf_counter() - begun,))})
        begun = time.perf_counter()
        for number, index in self.mini_batches(rows):
            stats.append(self.train(rows, index, number))
        stats.append({"timing_s/update_actor": Stat("max", (time.perf_counter() - begun,))})
        return merge(stats)

    @property
    def prepares(self) -> bool:
        # The old log-probs are those of the weights before the first step.
        return self.config.old_log_probs == "recompute"

    def prepare(self, rows: Rows) -> Stats:
        if not self.prepares:
            return {}
        stats = self._recompute(rows)
        if self.correction.active:
            self._apply(rows, self._corrected(rows, rows.mask, None))
        return stats

    def survey(self, rows: Rows, mask: np.ndarray) -> Stats:
        """Metrics of the correction."""
        if not (self.prepares and self.correction.active):
            return {}
        return self._corrected(rows, mask, self.all_reduce).stats

    def _fresh(self, number: int) -> bool:
        # Engine log-probs can be compared until the first step has changed the weights.
        return self.config.old_log_probs == "engine" and number == 0

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return self.module(
            batch.input_ids,
            batch.select,
            batch.targets,
            temperature=self.temperature,
            chunk_tokens=self.config.logits_chunk_tokens,
            with_entropy=True,
            positions=batch.positions,
            owners=batch.owners,
        )

    @torch.no_grad()
    def _recompute(self, rows: Rows) -> Stats:
        """Write the trainer's own log-probs into `rows.old_log_probs`."""
        stats = []
        for batch in self.micro_batches(rows, list(range(len(rows)))):
            log_probs, entropy = self._forward(batch)
            rows.old_log_probs[batch.flat] = log_probs.cpu().numpy()
            stats.append(entropy_of(entropy, batch.mask))
        return merge([log_prob_gap(rows.rollout_log_probs, rows.old_log_probs, rows.mask), *stats])

    def _correct(self, rows: Rows) -> Stats:
        """Decoupled mode: weights and rejection between the engine's and the old policy, once for all steps."""
        corrected = self._corrected(rows, rows.mask, self.all_reduce)
        self._apply(rows, corrected)
        return corrected.stats

    def _corrected(self, rows: Rows, mask: np.ndarray, all_sum: AllSum | None) -> Corrected:
        old, engine = rows.old_log_probs, rows.rollout_log_probs
        return correct(self.correction, old, engine, mask, rows.response_offsets, all_sum)

    @staticmethod
    def _apply(rows: Rows, corrected: Corrected) -> None:
        if corrected.weights is not None:
            rows.weights = corrected.weights.astype(np.float32)
        rows.mask = corrected.keep.astype(np.float32)

    def train(self, rows: Rows, index: list[int], number: int) -> Stats:
        if self.loss.select is not None:
            self._select(rows, index)
        return super().train(rows, index, number)

    def passing(self, rows: Rows, index: list[int], number: int) -> list[int]:
        # A guard on the gap between engine and trainer has to see tokens, also where no group has an advantage.
        skips = self.skips_without_advantage and not (self._fresh(number) and self.guards_gap)
        return rows.with_advantages(index) if skips else index

    def backward(self, number: int) -> Backward:
        fresh = self._fresh(number)

        def backward(batch: MicroBatch, tokens: float, sequences: float) -> tuple[Stats, float]:
            return self._backward(batch, tokens, sequences, fresh)

        return backward

    @torch.no_grad()
    def _select(self, rows: Rows, index: list[int]) -> None:
        """Let the loss choose among all tokens of the global mini-batch, before any of them moves the policy."""
        assert self.loss.select is not None
        log_probs = np.zeros(len(rows.mask))
        for batch in self.micro_batches(rows, index):
            log_probs[batch.flat] = self._forward(batch)[0].double().cpu().numpy()
        places = rows.trained_tokens(index)
        own = np.stack(
            [
                log_probs[places],
                rows.old_log_probs[places],
                rows.advantages[places],
                rows.random_keys(index, self.seed, self.scheduler.last_epoch),
            ]
        ).astype(np.float64)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        chosen = self.loss.select(Candidates(*np.concatenate(parts, axis=1)), self.config)
        before = sum(part.shape[1] for part in parts[: dist.get_rank()])
        rows.selected = np.zeros(len(rows.mask), dtype=bool)
        rows.selected[places] = chosen[before : before + len(places)]

    def _backward(self, batch: MicroBatch, tokens: float, sequences: float, fresh: bool) -> tuple[Stats, float]:
        config = self.config
        log_probs, entropy = self._forward(batch)
        mask, weights, stats = batch.mask, batch.weights, Stats()
        if config.old_log_probs == "engine" and self.correction.active:
            corrected = self._correct_current(batch, log_probs)
            stats |= corrected.stats
            mask = torch.from_numpy(corrected.keep).to(mask)
            if corrected.weights is not None:
                weights = torch.from_numpy(corrected.weights).to(mask)
        data = LossInput(
            log_probs, batch.old_log_probs, batch.advantages, mask, batch.segment, batch.sequences, batch.selected
        )
        per_token, sums = checked(self.loss, data, self.loss.function(data, config))
        if weights is not None:
            per_token = per_token * weights

        def aggregate(values: Tensor) -> Tensor:
            return agg_loss(
                values,
                mask,
                config.loss_agg_mode,
                global_tokens=tokens,
                global_sequences=sequences,
                segment=batch.segment,
                sequences=batch.sequences,
                scale_factor=self.scale_factor,
            )

        share = 1.0 / self.shape.steps
        pg_loss = aggregate(per_token)
        loss = pg_loss
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * aggregate(entropy)
        if config.use_kl_loss:
            assert batch.ref_log_probs is not None
            kl = aggregate(kl_loss(log_probs, batch.ref_log_probs, mask, config.kl_loss_type))
            loss = loss + config.kl_loss_coef * kl
            stats |= {
                "actor/kl_loss": Stat("sum", (kl.item() * share,)),
                "actor/kl_coef": Stat("max", (config.kl_loss_coef,)),
            }
        loss.backward()
        stats |= {
            "actor/pg_loss": Stat("sum", (pg_loss.item() * share,)),
            "actor/loss": Stat("sum", (loss.item() * share,)),
            **{f"actor/{name}": mean(total.item(), count.item()) for name, (total, count) in sums.items()},
        }
        if config.old_log_probs == "engine":
            stats |= entropy_of(entropy, batch.mask)
        if fresh:
            stats |= log_prob_gap(batch.rollout_log_probs.cpu(), log_probs.detach().cpu(), batch.mask.cpu())
        return stats, float((batch.mask > 0).sum() - (mask > 0).sum())

    def _correct_current(self, batch: MicroBatch, log_probs: Tensor) -> Corrected:
        """Bypass mode: weights and rejection between the engine's and the current policy."""
        lengths = torch.bincount(batch.segment, minlength=batch.sequences).cpu().numpy()
        return correct(
            self.correction,
            log_probs.detach().double().cpu().numpy(),
            batch.rollout_log_probs.cpu().numpy(),
            batch.mask.cpu().numpy(),
            np.concatenate([[0], np.cumsum(lengths)]),
        )


def entropy_of(entropy: Tensor, mask: Tensor) -> Stats:
    """Mean entropy of the tokens that train."""
    keep = mask > 0
    return {"actor/entropy": mean(torch.where(keep, entropy.detach(), 0.0).sum().item(), keep.sum().item())}
