"""The actor: the trained policy, and its loss.

    [recompute old log-probs ─► off-policy correction] ─► per mini-batch: [choose tokens] ─► loss ─► step

If an iteration has one step, the policy has not moved before it. The pass of the step then also computes the old
log-probs, unless the correction or the loss needs them earlier, and only rows that skip it have a pass of their own.

Rows whose advantages are all 0 (in groups of equal rewards) add nothing to most losses, but count in the normalisation.
If the loss allows it, they skip the forward and backward pass; the optimiser step is the same.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config.algorithm import RolloutCorrectionConfig
from pipeline.config.learner import ActorConfig
from pipeline.config.model import ModelConfig
from pipeline.derived import UpdateShape
from pipeline.greeting import Way
from pipeline.losses import Candidates, LossInput, checked, distill_loss, get_policy_loss, kl_loss
from pipeline.models.backend import MicroBatches
from pipeline.models.batch import TrainBatch
from pipeline.models.head import HeadOutput, TokenLists
from pipeline.models.lora import without_adapters
from pipeline.models.mesh import Mesh
from pipeline.models.packing import MicroBatch
from pipeline.models.policy import Policy, load_policy
from pipeline.stats import Stat, Stats, mean, merge
from pipeline.track.metrics import log_prob_gap
from pipeline.train import ranks
from pipeline.train.correction import AllSum, Corrected, correct, parse
from pipeline.train.learner import Learner
from pipeline.train.reference import ShardedReference
from pipeline.train.strategy import fsdp, megatron


class Actor(Learner):
    """The sharded policy with its optimiser.

    Args, in addition to the arguments of `Learner`:
        correction: settings of the off-policy correction (`derived.rollout_correction`).
        temperature: temperature at which responses were sampled.
        seed: seed of the run, for losses that choose tokens at random.
        guards_gap: whether `trainer.max_log_prob_gap` is set.
        own_reference: whether the actor computes the reference's log-probs; else the rows of the stream have them.
        reference: the reference model for `own_reference`; None for the policy with its adapters switched off.
        teacher: the teacher in the train workers; None if the rows of the stream have its log-probs, or need none.
        teacher_coef: `algorithm.teacher_coef`, for that teacher.
    """

    module: Policy
    replays_routes = True

    def __init__(
        self,
        config: ActorConfig,
        model: ModelConfig,
        shape: UpdateShape,
        device: torch.device,
        iterations: int,
        mesh: Mesh,
        *,
        correction: RolloutCorrectionConfig,
        temperature: float,
        seed: int,
        guards_gap: bool = False,
        own_reference: bool = False,
        reference: ShardedReference | None = None,
        teacher: ShardedReference | None = None,
        teacher_coef: float = 0.0,
    ):
        steps = iterations * shape.steps
        if config.strategy == "megatron":
            prepared = megatron(model, config, steps, device, mesh)
        else:
            policy = load_policy(model, mesh=mesh, longest=shape.longest)
            prepared = fsdp(policy, config, steps, device, model.share_prompts, mesh)
        super().__init__("actor", prepared, config, shape, device, mesh)
        self.config = config
        self.seed = seed
        self.temperature = temperature
        self.loss = get_policy_loss(config.policy_loss.loss_mode)
        self.correction = parse(correction)
        self.guards_gap = guards_gap
        self.own_reference = own_reference or teacher is not None
        self._computes_reference, self.reference = own_reference, reference
        self.teacher, self.teacher_coef = teacher, teacher_coef
        further = config.entropy_coeff or config.use_kl_loss or config.distill_coef
        self.skips_without_advantage = self.loss.of_pairs or (self.loss.zero_without_advantage and not further)
        self.in_one_pass = (
            self.needs_old_log_probs
            and shape.steps == 1
            and not (self.correction.active or self.loss.of_pairs or self.loss.token_mask_fn)
        )
        """True if the pass of the only step computes the old log-probs, too."""

    @property
    def needs_old_log_probs(self) -> bool:
        """True if the trainer recomputes the old log-probs (`actor.old_log_probs=recompute`)."""
        return self.config.old_log_probs == "recompute"

    def take(self, way: Way) -> None:
        """Let rows pass in another way from now on: through the policy, and through a reference of the same class."""
        super().take(way)
        for other in (self.reference, self.teacher):
            if other and type(other.module.decoder) is type(self.module.decoder):
                other.passes = other.passes.taking(way, other.module)

    @torch.no_grad()
    def compute_reference(self, rows: TrainBatch) -> None:
        """Write the log-probs of reference and teacher into `rows`, if the actor has to compute them; a collective."""
        if self.teacher is not None:
            self._compute_teacher(rows, self.teacher)
        if not self._computes_reference:
            return
        rows.ref_log_probs = np.zeros_like(rows.old_log_probs)
        other = self.reference
        with without_adapters(other.module if other else self.module):
            batches = self.micro_batches(rows, list(range(len(rows))), passes=other.passes if other else None)
            # A reference has experts of its own, also one that is the policy without adapters.
            for batch, found in self._predict(batches, other, routes=None):
                rows.ref_log_probs[batch.token_index] = found.log_probs.cpu().numpy()

    def _compute_teacher(self, rows: TrainBatch, teacher: ShardedReference) -> None:
        """Add the teacher's advantages to `rows`, and write its most likely tokens into them; a collective."""
        top = self.config.distill_top_k if self.config.distill_coef else 0
        log_probs = np.zeros_like(rows.old_log_probs)
        if top:
            rows.teacher_top_ids = np.zeros((len(log_probs), top), np.int32)
            rows.teacher_top_log_probs = np.zeros((len(log_probs), top), np.float32)
        batches = self.micro_batches(rows, list(range(len(rows))), passes=teacher.passes)
        for batch, found in self._predict(batches, teacher, top=top):
            log_probs[batch.token_index] = found.log_probs.cpu().numpy()
            for into, values in zip((rows.teacher_top_ids, rows.teacher_top_log_probs), found.top or (), strict=False):
                assert into is not None
                into[batch.token_index] = values.cpu().numpy()
        if not np.isfinite(log_probs).all():
            raise ValueError(
                "a log-prob of the teacher is not finite; a type such as float16 may overflow (teacher.dtype)"
            )
        # Rows share this array with the critic, which learns from rewards only.
        rows.advantages = rows.advantages + self.teacher_coef * (log_probs - rows.rollout_log_probs) * rows.mask

    @torch.no_grad()
    def compute_old_log_probs(self, rows: TrainBatch) -> Stats:
        """Write the trainer's log-probs before the first step, and the off-policy correction, into `rows`.

        A collective. For a loss that compares pairs, rows that are in no pair also leave the loss mask. Returns
        metrics.
        """
        if self.loss.of_pairs:
            in_pair = np.isin(np.arange(len(rows)), rows.pairs(list(range(len(rows)))))
            rows.loss_mask = rows.loss_mask * np.repeat(in_pair, np.diff(rows.row_offsets))
            rows.pair_margin = np.zeros(len(rows.mask), dtype=np.float32)
        if not self.needs_old_log_probs:
            return {}
        index = list(range(len(rows)))
        if self.in_one_pass:
            index = sorted({*index} - {*self.rows_to_train(rows, index, 0)})
        stats = []
        for batch, found in self._predict(self.micro_batches(rows, index), with_entropy=True):
            rows.old_log_probs[batch.token_index] = found.log_probs.cpu().numpy()
            stats += [_entropy_stats(found.entropies, batch), _gap(rows, batch, found.log_probs, rows.mask)]
            stats.append(self._differing(batch))
        if self.correction.active:
            # Normalised weights need all ranks' rows of the whole iteration, which are never streamed.
            corrected = self._correct(rows, self.all_reduce if self.correction.normalize else None)
            if corrected.weights is not None:
                rows.weights = corrected.weights.astype(np.float32)
            rows.loss_mask = corrected.keep.astype(np.float32)
        return merge(stats)

    def iteration_metrics(self, rows: TrainBatch) -> Stats:
        """Compute the metrics of the off-policy correction, some of them over all ranks' rows; a collective."""
        if not (self.needs_old_log_probs and self.correction.active):
            return {}
        return self._correct(rows, self.all_reduce).stats

    def rows_to_train(self, rows: TrainBatch, index: list[int], number: int) -> list[int]:
        """Return the rows of `index`, without rows whose advantages are all 0 if they add nothing to the loss."""
        # A guard on the gap between engine and trainer needs tokens even if no group has an advantage.
        skips = self.skips_without_advantage and not (self._shows_gap(number) and self.guards_gap)
        return rows.with_advantages(index) if skips else index

    @torch.no_grad()
    def select_tokens(self, rows: TrainBatch, index: list[int]) -> None:
        """Write the tokens that the loss chooses, or the margins of pairs, into `rows`, before the first backward pass.

        A collective. `token_mask_fn` of the loss chooses among all trained tokens of the global mini-batch.
        """
        if self.loss.of_pairs:
            self._compare(rows, rows.pairs(index))
        if self.loss.token_mask_fn is None:
            return
        log_probs = np.zeros(len(rows.mask))
        for batch, found in self._predict(self.micro_batches(rows, index)):
            log_probs[batch.token_index] = found.log_probs.double().cpu().numpy()
        tokens = rows.trained_tokens(index)
        keys = rows.random_keys(index, self.seed, self.scheduler.last_epoch)
        own = np.stack([log_probs[tokens], rows.old_log_probs[tokens], rows.advantages[tokens], keys])
        every = ranks.all_gather(own.astype(np.float64))
        parts = [part for rank, part in enumerate(every) if self.mesh.leads(rank)]
        chosen = self.loss.choose_tokens(Candidates(*np.concatenate(parts, axis=1)), self.config)
        before = sum(part.shape[1] for part in parts[: self.mesh.rows_group(ranks.rank())])
        rows.token_mask = np.zeros(len(rows.mask), dtype=bool)
        rows.token_mask[tokens] = chosen[before : before + len(tokens)]

    def _compare(self, rows: TrainBatch, pairs: np.ndarray) -> None:
        """Write the margin of each pair, under the current policy, into `rows.pair_margin`; a collective.

        Args:
            rows: the rows.
            pairs: [P, 2] row numbers, the better response and the worse one.
        """
        assert rows.ref_log_probs is not None
        assert rows.pair_margin is not None
        log_ratio = np.zeros(len(rows.mask))
        for batch, found in self._predict(self.micro_batches(rows, pairs.flatten().tolist())):
            difference = found.log_probs.double().cpu().numpy() - rows.ref_log_probs[batch.token_index]
            log_ratio[batch.token_index] = np.where(rows.loss_mask[batch.token_index] > 0, difference, 0.0)
        offsets = rows.row_offsets
        for better, worse in pairs:
            sides = (slice(offsets[row], offsets[row + 1]) for row in (better, worse))
            tokens = list(sides)
            margin = log_ratio[tokens[0]].sum() - log_ratio[tokens[1]].sum()
            for side in tokens:
                rows.pair_margin[side] = margin

    @property
    def _first_seen(self) -> bool:
        """True if no earlier pass has brought the entropy of the policy before the first step."""
        return self.in_one_pass or not self.needs_old_log_probs

    def forward(self, batch: MicroBatch, number: int, hidden: Tensor | None = None) -> HeadOutput:
        """See `Learner.forward`."""
        top = batch.teacher_top_ids
        lists = None if top is None else TokenLists.of(top)
        entropy = bool(self.config.entropy_coeff) or self._first_seen
        return self._pass(batch, with_entropy=entropy, lists=lists, hidden=hidden)

    def compute_loss(
        self, rows: TrainBatch, batch: MicroBatch, found: HeadOutput, number: int
    ) -> tuple[Tensor, Stats, float]:
        """See `Learner.compute_loss`."""
        config = self.config
        log_probs, entropy = found.log_probs, found.entropies
        mask, weights, stats = batch.loss_mask, batch.weights, Stats()
        if self.in_one_pass:
            batch.old_log_probs = log_probs.detach()
            rows.old_log_probs[batch.token_index] = batch.old_log_probs.cpu().numpy()
        if not self.needs_old_log_probs and self.correction.active:
            corrected = self._correct_batch(batch, log_probs)
            stats |= corrected.stats
            mask = torch.from_numpy(corrected.keep).to(mask)
            if corrected.weights is not None:
                weights = torch.from_numpy(corrected.weights).to(mask)
        data = LossInput(
            *(log_probs, batch.old_log_probs, batch.advantages, mask, batch.row_index, batch.sequences),
            *(batch.token_mask, batch.pair_margin),
        )
        per_token, sums = checked(self.loss, data, self.loss.function(data, config))
        if weights is not None:
            per_token = per_token * weights
        weight = 1.0 / self.shape.steps
        pg_loss = self.aggregate(per_token, mask, batch)
        loss = pg_loss
        if config.entropy_coeff:
            assert entropy is not None
            loss = loss - config.entropy_coeff * self.aggregate(entropy, mask, batch)
        if config.use_kl_loss:
            assert batch.ref_log_probs is not None
            log_ratio = data.log_ratio if config.kl_loss_ratio else None
            per_token_kl = kl_loss(log_probs, batch.ref_log_probs, mask, config.kl_loss_type, log_ratio)
            kl = self.aggregate(per_token_kl, mask, batch)
            loss = loss + config.kl_loss_coef * kl
            stats["actor/kl_loss"] = Stat("sum", (kl.item() * weight,))
            stats["actor/kl_coef"] = Stat("max", (config.kl_loss_coef,))
        if config.distill_coef:
            assert found.listed is not None and batch.teacher_top_log_probs is not None
            teacher = batch.teacher_top_log_probs
            per_token = distill_loss(found.listed.view_as(teacher), teacher, config.distill_beta)
            divergence = self.aggregate(per_token, mask, batch)
            loss = loss + config.distill_coef * divergence
            stats["actor/distill_loss"] = Stat("sum", (divergence.item() * weight,))
        stats["actor/pg_loss"] = Stat("sum", (pg_loss.item() * weight,))
        stats["actor/loss"] = Stat("sum", (loss.item() * weight,))
        stats |= {f"actor/{name}": mean(total.item(), count.item()) for name, (total, count) in sums.items()}
        if self._first_seen:
            stats |= _entropy_stats(entropy, batch)
        if self.in_one_pass or self._shows_gap(number):
            stats |= _gap(rows, batch, log_probs, rows.loss_mask) | self._differing(batch)
        return loss, stats, float((batch.loss_mask > 0).sum() - (mask > 0).sum())

    def _predict(
        self, batches: MicroBatches, other: ShardedReference | None = None, **options: Any
    ) -> Iterator[tuple[MicroBatch, HeadOutput]]:
        """Yield each micro-batch with the output of `other`, None for the policy; a collective. `options` are further
        arguments of `Policy.forward`."""

        def forward(batch: MicroBatch, hidden: Tensor | None = None) -> HeadOutput:
            return self._pass(batch, other.module if other else None, hidden=hidden, **options)

        return (other or self).backend.predict(batches, forward)

    def _pass(self, batch: MicroBatch, module: Policy | None = None, **options: Any) -> HeadOutput:
        chosen: dict[str, Any] = {"temperature": self.temperature, "chunk_tokens": self.config.logits_chunk_tokens}
        found: HeadOutput = (module or self.module)(**batch.arguments | chosen | options)
        return found

    def _shows_gap(self, number: int) -> bool:
        """Return whether step `number` reports the gap to the engine's log-probs.

        Only the first step does, because its weights have not changed since the version was published; and only if old
        log-probs are not recomputed, which reports the gap already.
        """
        return not self.needs_old_log_probs and number == 0

    def _differing(self, batch: MicroBatch) -> Stats:
        """Metric of the experts that the engine chose and the routers, in the pass of `batch`, would not have."""
        return {} if batch.routes is None else {"actor/routes_differing": mean(*self.module.routers.differing())}

    def _correct(self, rows: TrainBatch, all_sum: AllSum | None) -> Corrected:
        """Correct in decoupled mode: from the engine's policy to the old policy, once for all steps."""
        old, engine = rows.old_log_probs, rows.rollout_log_probs
        return correct(self.correction, old, engine, rows.mask, rows.row_offsets, all_sum)

    def _correct_batch(self, batch: MicroBatch, log_probs: Tensor) -> Corrected:
        """Correct in bypass mode: from the engine's policy to the current policy, for one micro-batch.

        Args:
            batch: the micro-batch.
            log_probs: [N] log-probs of the current policy.
        """
        lengths = torch.bincount(batch.row_index, minlength=batch.sequences).cpu().numpy()
        current = log_probs.detach().double().cpu().numpy()
        engine, mask = batch.rollout_log_probs.cpu().numpy(), batch.loss_mask.cpu().numpy()
        return correct(self.correction, current, engine, mask, np.concatenate([[0], np.cumsum(lengths)]))


def _gap(rows: TrainBatch, batch: MicroBatch, log_probs: Tensor, mask: np.ndarray) -> Stats:
    """Metrics of the gap between the engine's log-probs and the trainer's, `log_probs` [N], over tokens in `mask`."""
    tokens = batch.token_index
    trainer = log_probs.detach().cpu()
    return log_prob_gap(rows.rollout_log_probs[tokens], trainer, mask[tokens], rows.places(tokens))


def _entropy_stats(entropy: Tensor | None, batch: MicroBatch) -> Stats:
    """Metric `actor/entropy`: mean entropy, in nats, over tokens that count in the loss. `entropy` is [N]."""
    assert entropy is not None
    keep = batch.loss_mask > 0
    return {"actor/entropy": mean(torch.where(keep, entropy.detach(), 0.0).sum().item(), keep.sum().item())}
