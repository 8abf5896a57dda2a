"""The reward model: a `transformers` sequence classifier with one label, which gives one score per conversation.

1. The score of a decoder is read at the last token of the row, which the row's length gives. (`transformers` reads it
   at the last id that is not the pad token. This is the wrong token if a conversation ends with the pad token, which is
   also the end-of-sequence token of many models, and fails for a model without a pad token.) A decoder runs on packed
   or padded rows, as in `policy.py`.
2. An encoder has bidirectional attention, so it gets an attention mask made from the lengths, and uses its own head.
3. A new head starts at 0. So it is equal on all ranks, and the first optimiser step changes only the head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.models.attention import Layout, hidden_states
from pipeline.models.lora import inject
from pipeline.models.mesh import Mesh
from pipeline.models.pretrained import (
    Pretrained,
    check_complete,
    differs,
    float32_head,
    load_pretrained,
    random_states,
)
from pipeline.models.repeatable import few_tokens


class RewardModel(Pretrained):
    """A `transformers` sequence-classification model as a reward model.

    Args:
        lm: decoder with a linear `score` head, or an encoder with any head.

    Raises ValueError if the model has more than one label, computes its score in a way that is not supported, or still
    draws random numbers in training mode after dropout was switched off.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__(lm)
        name = type(lm).__name__
        if lm.config.num_labels != 1:
            raise ValueError(f"{name} gives {lm.config.num_labels} numbers, but a reward model gives one.")
        self.is_decoder = isinstance(getattr(lm, "score", None), nn.Linear)
        causal = {module.is_causal for module in lm.modules() if isinstance(getattr(module, "is_causal", None), bool)}
        if lm.config.is_encoder_decoder or (causal == {False} if self.is_decoder else True in causal):
            raise ValueError(
                f"{name} cannot be a reward model: a causal decoder with a linear `score` head or an encoder is "
                "needed. Use another model."
            )
        if self.is_decoder and lm.device.type != "meta":
            self._check_head()

    @property
    def max_length(self) -> int | None:
        """Longest row, in tokens, for a model with a learnt table of position embeddings; None for other models."""
        room = [
            table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
            for name, table in self.lm.named_modules()
            if isinstance(table, nn.Embedding) and ("position" in (last := name.rpartition(".")[2]) or last == "wpe")
        ]
        return min(*room, self.lm.config.get_text_config().max_position_embeddings) if room else None

    @property
    def decoder(self) -> Any:
        """The model without its head; None for an encoder."""
        return self.lm.base_model if self.is_decoder else None

    def forward(
        self, input_ids: Tensor, lengths: Tensor, positions: Tensor | None = None, packing: Layout | None = None
    ) -> Tensor:
        """Compute the score of each row.

        Args:
            input_ids: [1, T] int64, B rows end to end (`attention.py`), or [B, T] padded on the right with any id.
            lengths: [B] int64, tokens of each row, at least 1 if packed; a row of length 0 gets the score of its first
                position.
            positions: [1, T] int64, positions in each row, if packed.
            packing: layout of the rows, if packed.

        Returns:
            scores [B] float32.
        """
        lengths = lengths.clamp(min=1)
        if not self.is_decoder:
            mask = torch.arange(input_ids.shape[1], device=lengths.device) < lengths[:, None]
            logits: Tensor = self.lm(input_ids=input_ids, attention_mask=mask.long()).logits  # [B, 1]
            return logits.float().sum(-1)  # the only label; of a view of it FSDP would warn
        starts = torch.arange(len(lengths), device=lengths.device) * input_ids.shape[1]
        if packing is not None:
            starts = lengths.cumsum(0) - lengths
        hidden = hidden_states(self.decoder, input_ids, starts + lengths - 1, positions, packing)
        return float32_head(self.lm.score, hidden)

    def try_pass(self, device: torch.device) -> None:
        """Run a forward pass over a few tokens, for `check_repeatable`."""
        ids = few_tokens(self.lm, device)
        self(ids, torch.full((len(ids),), ids.shape[1], device=device))

    @torch.no_grad()
    def _check_head(self) -> None:
        """Check that `float32_head` at the last token gives the score that `lm` itself computes.

        Both get the same random hidden states, of a row that does not end with the pad token. Raises ValueError if they
        differ.
        """
        no_pad = int(self.lm.config.get_text_config().pad_token_id == 0)
        hidden, theirs = random_states(self.lm, self.lm.base_model, self.lm.score, no_pad)
        if differs(float32_head(self.lm.score, hidden[:, -1])[:, None], theirs):
            raise ValueError(
                f"{type(self.lm).__name__} reads its score in a way that is not supported: a linear head on the last "
                "token gives other numbers. Use another model."
            )


def load_reward_model(
    model: ModelConfig,
    key: str = "model.path",
    new_head: bool = False,
    mesh: Mesh | None = None,
    longest: int | None = None,
) -> RewardModel:
    """Load the reward model of `model.path`, in training mode.

    Args:
        model: settings of the model: path, dtype, attention, gradient checkpointing.
        key: configuration key of the path, for errors.
        new_head: whether a checkpoint without a reward head, such as a language model's, gets one whose scores are 0.
        mesh: ranks that each load a slice of the weights (`load_pretrained`); None loads whole weights, on the CPU.
        longest: length of the longest row in tokens; None for the model's own limit.

    Raises:
        ValueError: no path, an incomplete model folder, weights missing in the checkpoint, a head with several labels,
            no head (without `new_head`), or an unsupported model.
    """
    from transformers import AutoModelForSequenceClassification

    options: dict[str, Any] = {"num_labels": 1, "other_head": True}
    if model.attn_implementation == "sdpa":
        options["attn_implementation"] = None  # sdpa, or eager for models without it, such as DeBERTa
    # Missing weights are drawn at random; the seed makes them equal on all ranks.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm, report = load_pretrained(AutoModelForSequenceClassification, model, key, mesh, longest, **options)
    for name, shape, needed in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"{key}={model.path} holds {name} of shape {list(shape)} but one label needs {list(needed)}: it is a "
            "classifier, not a reward model."
        )
    reward_model = RewardModel(lm)
    missing, unread, last = set(report["missing_keys"]), report["unexpected_keys"], _last_layer(lm)
    if f"{last}.weight" not in missing:
        check_complete(missing, model, key, unread)
        inject(lm, model.lora, key, train_head=True)
        return reward_model
    if not new_head:
        raise ValueError(f"{key}={model.path} holds no reward head; train one with python -m jobs.reward_model.")
    inside = {name for name in missing if name.startswith(f"{lm.base_model_prefix}.")}
    check_complete(inside, model, key, unread)
    for parameter in lm.get_submodule(last).parameters():
        nn.init.zeros_(parameter)
    inject(lm, model.lora, key, train_head=True)
    return reward_model


def _last_layer(lm: Any) -> str:
    """Return the name of the last linear layer outside of the base model with a single output, which is the score."""
    inside = f"{lm.base_model_prefix}."
    layers = [
        name
        for name, part in lm.named_modules()
        if isinstance(part, nn.Linear) and part.out_features == 1 and not name.startswith(inside)
    ]
    if not layers:
        raise ValueError(f"{type(lm).__name__} has no linear layer that gives the score. Use another model.")
    return layers[-1]
