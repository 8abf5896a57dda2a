"""The train worker of `jobs.sft`: supervised fine-tuning on conversations.

The loss is the mean negative log-prob, in nats, over the trained tokens of the global batch: tokens of the assistant.
`sft_data.py` makes the tokens.
"""

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from pipeline.config.supervised import SFTConfig
from pipeline.derived import frozen_model
from pipeline.losses.distill import distill_loss
from pipeline.models.head import TokenLists
from pipeline.models.packing import ModelInputs, PlaceImages, lay_out
from pipeline.models.policy import Policy, load_policy
from pipeline.supervised.data import lists
from pipeline.supervised.loop import SupervisedLoop
from pipeline.supervised.sft_data import SFTEncoder
from pipeline.train.reference import ShardedReference


def collate(
    table: pa.Table, index: list[int], packed: bool = False, place_images: PlaceImages | None = None
) -> tuple[ModelInputs, Tensor, Tensor]:
    """Build the micro-batch of the rows with the numbers `index`. `place_images` is as in `packing.pack`.

    Returns:
        the model inputs; [N] indices into the flattened `input_ids` of the positions that predict trained tokens; and
        the ids of these N tokens. Without rows the inputs have a single padding token, and N = 0.
    """
    rows = table.take(pa.array(index, pa.int64()))
    images = rows["images"].to_pylist() if place_images else None
    inputs = lay_out(lists(rows["input_ids"]), packed, images, place_images)
    masks = lists(rows["loss_mask"])
    for mask in masks:
        mask[:1] = 0  # nothing predicts the first token
    learnt = lay_out(masks, packed).input_ids.flatten()
    targets = learnt.nonzero()[:, 0]
    return inputs, targets - 1, inputs.input_ids.flatten()[targets]


class SFTLoop(SupervisedLoop[SFTConfig]):
    """The train loop of one train worker of `jobs.sft`."""

    encoder = SFTEncoder
    measured = ("loss",)

    def load(self) -> Policy:
        config, longest = self.config, self.config.data.max_length
        policy = load_policy(config.model, mesh=self.mesh, longest=longest)
        if config.teacher.path is not None:
            gpu = self.device.type == "cuda"
            model = frozen_model(config.model, config.teacher.dtype, config.fsdp, config.teacher.path, gpu)
            where = self.device, self.mesh, config.teacher.offload
            self.teacher = ShardedReference.load(model, config.model, *where, longest, "teacher.path")
        return policy

    def count(self, table: pa.Table) -> int:
        return sum(int(mask[1:].sum()) for mask in lists(table["loss_mask"]))

    def lengths(self, table: pa.Table) -> list[int]:
        return list(pc.list_value_length(table["input_ids"]).to_pylist())

    def sums(self, table: pa.Table, index: list[int]) -> Tensor:
        reader = self.model.image_reader
        batch, places, targets = collate(table, index, self.packed, reader and reader.place)
        given = batch.to(self.device).arguments | {
            "logit_index": places.to(self.device),
            "targets": targets.to(self.device),
            "chunk_tokens": self.config.trainer.logits_chunk_tokens,
        }
        if self.teacher is None:
            return -self.model(**given).log_probs.sum(dim=0, keepdim=True)
        settings = self.config.teacher
        with torch.no_grad():
            ids, teacher = self.teacher.module(**given, top=settings.distill_top_k).top
        found = self.model(**given, lists=TokenLists.of(ids))
        divergence = distill_loss(found.listed.view_as(teacher), teacher, settings.distill_beta).sum()
        loss = settings.weight * divergence - (1 - settings.weight) * found.log_probs.sum()
        return loss[None]
