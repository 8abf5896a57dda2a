"""The critic: the value model that is trained, and its update.

    per mini-batch: values ─► clipped value loss against the returns ─► step

The returns come with the rows, and so do the values that the advantages were made from; the loss holds new values near
those. Every row goes through the model: a row without advantage (advantage 0) still says what its tokens were worth.
"""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.track.metrics import Stat, Stats, mean, merge
from pipeline.train.learner import Backward, Learner, UpdateShape
from pipeline.train.losses import agg_loss
from pipeline.train.losses.value import explained_variance, value_loss
from pipeline.train.packing import MicroBatch, Rows
from pipeline.train.value_model import ValueModel, load_value_model


class Critic(Learner):
    """The sharded value model with its optimiser.

    Args:
        config: the run's configuration.
        device: this rank's device.
        iterations: iterations in which the critic is updated, for the schedule.
    """

    module: ValueModel

    def __init__(self, config: Config, device: torch.device, iterations: int):
        critic = config.critic
        shape, model = UpdateShape.of(config, critic), load_value_model(config)
        sharded, mode = (
            (critic.optim, critic.fsdp, critic.grad_clip),
            critic.loss_agg_mode or config.actor.loss_agg_mode,
        )
        super().__init__("critic", model, shape, *sharded, mode, device, iterations, config.model.share_prompts)
        self.config = critic
        self.scale_factor = config.actor.loss_scale_factor or float(config.data.max_response_length)

    def update(self, rows: Rows) -> Stats:
        """Train on one iteration's rows of this rank; a collective. Returns metrics, to be merged over ranks.

        Raises:
            ValueError: the rows have no values.
        """
        begun = time.perf_counter()
        stats = [self.prepare(rows), self.survey(rows, rows.mask)]
        for number, index in self.mini_batches(rows):
            stats.append(self.train(rows, index, number))
        stats.append({"timing_s/update_critic": Stat("max", (time.perf_counter() - begun,))})
        return merge(stats)

    def prepare(self, rows: Rows) -> Stats:
        if rows.values is None:
            raise ValueError(
                "the rows have no values, which the critic's loss is clipped around; run the stage `value`"
            )
        return {}

    def survey(self, rows: Rows, mask: np.ndarray) -> Stats:
        return self._explained_variance(rows)

    def backward(self, number: int) -> Backward:
        return self._backward

    def _backward(self, batch: MicroBatch, tokens: float, sequences: float) -> tuple[Stats, float]:
        assert batch.values is not None
        values = self.module(batch.input_ids, batch.select, batch.positions, batch.owners)
        per_token, sums = value_loss(values, batch.values, batch.returns, batch.mask, self.config.cliprange_value)
        loss = agg_loss(
            per_token,
            batch.mask,
            self.agg_mode,
            global_tokens=tokens,
            global_sequences=sequences,
            segment=batch.segment,
            sequences=batch.sequences,
            scale_factor=self.scale_factor,
        )
        loss.backward()
        return {
            "critic/vf_loss": Stat("sum", (loss.item() / self.shape.steps,)),
            **{f"critic/{name}": mean(total.item(), count.item()) for name, (total, count) in sums.items()},
        }, 0.0

    def _explained_variance(self, rows: Rows) -> Stats:
        """How much of the returns of all ranks' tokens the values explain that came with the rows.

        Left out where it means nothing: without tokens, and where all returns are equal.
        """
        assert rows.values is not None
        values, returns, mask = (torch.from_numpy(x) for x in (rows.values, rows.returns, rows.mask))
        residuals, whole = explained_variance(values, returns, mask)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, {"residuals": Stat("std", residuals), "returns": Stat("std", whole)})
        merged = merge(parts)
        count, centre, spread = merged["returns"].values
        # A spread within rounding of the mean is that of a constant.
        if spread <= count * (1e-12 * centre) ** 2:
            return {}
        return {"critic/vf_explained_var": Stat("max", (1.0 - merged["residuals"].values[2] / spread,))}
