"""The critic: the trained value model, and its loss.

    per mini-batch: values ─► clipped value loss against the returns ─► step

The rows of the stream have the returns, and the old values from which the advantages were computed. Every row is
trained on, also one whose advantages are all 0.
"""

import torch
from torch import Tensor

from pipeline.config.learner import CriticConfig
from pipeline.config.model import ModelConfig
from pipeline.derived import UpdateShape
from pipeline.losses import explained_variance, value_loss
from pipeline.models.batch import TrainBatch
from pipeline.models.mesh import Mesh, make_mesh
from pipeline.models.packing import MicroBatch
from pipeline.models.value import ValueModel, load_value_model
from pipeline.stats import Stat, Stats, mean, merge
from pipeline.train import ranks
from pipeline.train.learner import Learner
from pipeline.train.strategy import fsdp


class Critic(Learner):
    """The sharded value model with its optimiser.

    Args, in addition to the arguments of `Learner`:
        model: settings of the policy's model.
        mesh: the actor's mesh; None makes one of all ranks, without tensor parallelism.
    """

    module: ValueModel

    def __init__(
        self,
        config: CriticConfig,
        model: ModelConfig,
        shape: UpdateShape,
        device: torch.device,
        iterations: int,
        mesh: Mesh | None = None,
    ):
        mesh = mesh or make_mesh(device)
        module = load_value_model(model, config.path, mesh, shape.longest)
        prepared = fsdp(module, config, iterations * shape.steps, device, model.share_prompts, mesh)
        super().__init__("critic", prepared, config, shape, device, mesh)
        self.config = config

    def forward(self, batch: MicroBatch, number: int, hidden: Tensor | None = None) -> Tensor:
        """[N] values of the predicted tokens; see `Learner.forward`."""
        values: Tensor = self.module(batch.input_ids, batch.logit_index, batch.positions, batch.packing, batch.images)
        return values

    def compute_loss(
        self, rows: TrainBatch, batch: MicroBatch, found: Tensor, number: int
    ) -> tuple[Tensor, Stats, float]:
        """See `Learner.compute_loss`. Raises ValueError if the rows have no old values."""
        if batch.values is None:
            raise ValueError(
                "the rows have no values, which the critic's loss is clipped around; run the stage `value`"
            )
        per_token, sums = value_loss(found, batch.values, batch.returns, batch.loss_mask, self.config.cliprange_value)
        loss = self.aggregate(per_token, batch.loss_mask, batch)
        stats = {
            "critic/vf_loss": Stat("sum", (loss.item() / self.shape.steps,)),
            **{f"critic/{name}": mean(total.item(), count.item()) for name, (total, count) in sums.items()},
        }
        return loss, stats, 0.0

    def iteration_metrics(self, rows: TrainBatch) -> Stats:
        """Return `critic/vf_explained_var`, the fraction of the variance of all ranks' returns that the old values
        explain; nothing if the returns have no variance."""
        assert rows.values is not None
        values, returns, mask = (torch.from_numpy(x) for x in (rows.values, rows.returns, rows.mask))
        residuals, total = explained_variance(values, returns, mask)
        merged = merge(ranks.all_gather({"residuals": Stat("std", residuals), "returns": Stat("std", total)}))
        count, centre, spread = merged["returns"].values
        # A spread within rounding of the mean comes from a constant.
        if spread <= count * (1e-12 * centre) ** 2:
            return {}
        return {"critic/vf_explained_var": Stat("max", (1.0 - merged["residuals"].values[2] / spread,))}
