"""The critic: the value model that is trained, and its loss.

    per mini-batch: values ─► clipped value loss against the returns ─► step

The returns come with the rows, and so do the values that the advantages were made from. The loss holds new values near
those. Every row goes through the model, because a row with advantage 0 still says what its tokens were worth.
"""

from typing import Any

import torch
import torch.distributed as dist

from pipeline.config.learner import CriticConfig
from pipeline.config.model import ModelConfig
from pipeline.derived import UpdateShape
from pipeline.losses import agg_loss
from pipeline.losses.value import explained_variance, value_loss
from pipeline.models.batch import TrainBatch
from pipeline.models.packing import MicroBatch
from pipeline.models.value import ValueModel, load_value_model
from pipeline.stats import Stat, Stats, mean, merge
from pipeline.train.learner import Learner


class Critic(Learner):
    """The sharded value model with its optimiser.

    Args:
        config: the critic's settings.
        model: the settings of the policy's model.
        shape: how an iteration's rows are divided into steps.
        device: this rank's device.
        iterations: iterations in which the critic is updated, for the schedule.
        agg_mode: how token losses become one number, one of `losses.AGG_MODES`.
        scale_factor: divisor of `seq-mean-token-sum-norm`.
    """

    module: ValueModel

    def __init__(
        self,
        config: CriticConfig,
        model: ModelConfig,
        shape: UpdateShape,
        device: torch.device,
        iterations: int,
        *,
        agg_mode: str,
        scale_factor: float,
    ):
        module = load_value_model(model, config.path)
        super().__init__("critic", module, config, shape, agg_mode, device, iterations, model.share_prompts)
        self.config = config
        self.scale_factor = scale_factor

    def backward(self, batch: MicroBatch, number: int) -> tuple[Stats, float]:
        """See `Learner.backward`. Raises ValueError where the rows have no values."""
        if batch.values is None:
            raise ValueError(
                "the rows have no values, which the critic's loss is clipped around; run the stage `value`"
            )
        values = self.module(batch.input_ids, batch.logit_index, batch.positions, batch.segment_ids)
        per_token, sums = value_loss(values, batch.values, batch.returns, batch.loss_mask, self.config.cliprange_value)
        loss = agg_loss(
            per_token,
            batch.loss_mask,
            self.agg_mode,
            global_tokens=1.0,
            global_sequences=1.0,
            row_index=batch.row_index,
            sequences=batch.sequences,
            scale_factor=self.scale_factor,
        )
        loss.backward()
        return {
            "critic/vf_loss": Stat("sum", (loss.item() / self.shape.steps,)),
            **{f"critic/{name}": mean(total.item(), count.item()) for name, (total, count) in sums.items()},
        }, 0.0

    def iteration_metrics(self, rows: TrainBatch) -> Stats:
        """How much of the variance of all ranks' returns the values explain that came with the rows.

        It is left out where it is undefined: without trained tokens, and where all returns are equal.
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
