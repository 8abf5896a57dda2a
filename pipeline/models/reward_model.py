"""The reward model: a `transformers` sequence classifier with one label, which gives one score per conversation.

1. A decoder is read at the last token of a row, found from the row's length. `transformers` itself looks for the last
   id that is not `config.pad_token_id`: it reads the token before where a conversation ends with the pad token (pad and
   end of sequence are one in many models), and has nowhere to look where there is no pad token.
2. A decoder runs on right-padded ids without an attention mask; why that is safe stands in `pipeline/models/policy.py`.
3. An encoder sees both ways, so it gets an attention mask made of the lengths, and reads its score itself.
4. A head that is new starts at 0, so the first step moves the head alone and all ranks hold the same one.
5. A decoder's head computes in float32, whatever the decoder computes in: a bfloat16 score has no more than three
   digits, and only the difference of two scores counts.
"""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.models.pretrained import Pretrained, check_complete, load_pretrained, without_dropout


class RewardModel(Pretrained):
    """A `transformers` sequence-classification model as a reward model.

    Args:
        lm: decoder with a linear `score` head, or an encoder with a head of its own.

    Raises:
        ValueError: the model has more than one label, or reads its score in a way that is not supported.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        name = type(lm).__name__
        if lm.config.num_labels != 1:
            raise ValueError(f"{name} gives {lm.config.num_labels} numbers where a reward model gives one.")
        without_dropout(lm)
        self.is_decoder = isinstance(getattr(lm, "score", None), nn.Linear)
        causal = {module.is_causal for module in lm.modules() if isinstance(getattr(module, "is_causal", None), bool)}
        if lm.config.is_encoder_decoder or (causal == {False} if self.is_decoder else True in causal):
            raise ValueError(
                f"{name} cannot be a reward model: a causal decoder with a linear `score` head or an encoder is "
                "needed. Use another model."
            )
        if self.is_decoder:
            self._check_head()

    @property
    def max_length(self) -> int | None:
        """Most tokens that a learnt table of positions has room for; None for positions without a table."""
        room = [
            table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
            for name, table in self.lm.named_modules()
            if isinstance(table, nn.Embedding) and ("position" in (last := name.rpartition(".")[2]) or last == "wpe")
        ]
        return min(*room, self.lm.config.get_text_config().max_position_embeddings) if room else None

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """The score of each row.

        Args:
            input_ids: [B, T] int64, padded on the right with any id.
            lengths: [B] int64, tokens of each row; a row of length 0 gets the score of its first position.

        Returns:
            scores [B] float32.
        """
        lengths = lengths.clamp(min=1)
        if not self.is_decoder:
            mask = torch.arange(input_ids.shape[1], device=lengths.device) < lengths[:, None]
            logits: Tensor = self.lm(input_ids=input_ids, attention_mask=mask.long()).logits  # [B, 1]
            return logits.float().sum(-1)  # the only label; of a view of it FSDP would warn
        hidden = self.lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, T, H]
        return self._head(hidden[torch.arange(len(lengths), device=lengths.device), lengths - 1])

    def _head(self, hidden: Tensor) -> Tensor:
        """Scores [B] float32 of hidden states [B, H]."""
        head = self.lm.score
        # The weights are used here and not in the head's own forward, which would compute in their type.
        scores = hidden.float() @ head.weight.float().squeeze(0)
        return scores if head.bias is None else scores + head.bias.float()

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare the head with the model's own on random hidden states of a row that ends with no pad token."""
        from transformers.modeling_outputs import MoeModelOutputWithPast

        head, decoder = self.lm.score, self.lm.base_model
        generator = torch.Generator().manual_seed(0)
        hidden: Any = torch.randn(1, 4, head.in_features, generator=generator).to(head.weight)
        no_pad = int(self.lm.config.get_text_config().pad_token_id == 0)
        with patch.object(decoder, "forward", return_value=MoeModelOutputWithPast(last_hidden_state=hidden)):
            theirs = self.lm(input_ids=torch.full((1, 4), no_pad, device=hidden.device)).logits
        ours = self._head(hidden[:, -1])
        if theirs.shape != (1, 1) or (ours - theirs.float()[0]).abs().max() > 0.02 * ours.abs().max() + 1e-6:
            raise ValueError(
                f"{type(self.lm).__name__} reads its score in a way that is not supported: a linear head on the last "
                "token gives other numbers. Use another model."
            )


def load_reward_model(model: ModelConfig, key: str = "model.path", new_head: bool = False) -> RewardModel:
    """Build the reward model from `model.path` on the CPU.

    Args:
        model: path, type, attention and checkpointing.
        key: the configuration key that the path came from, for errors.
        new_head: give a checkpoint without a reward head, such as that of a language model, one whose scores are 0.

    Raises:
        ValueError: no path, an incomplete model folder, weights missing in the checkpoint, a head with another number
            of labels than one, no head (without `new_head`), or an unsupported model.
    """
    from transformers import AutoModelForSequenceClassification

    options: dict[str, Any] = {"num_labels": 1, "ignore_mismatched_sizes": True}
    if model.attn_implementation == "sdpa":
        options["attn_implementation"] = None  # the same, but eager for models without it, as DeBERTa
    # What is missing is drawn at random: alike on all ranks.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm, report = load_pretrained(AutoModelForSequenceClassification, model, key, **options)
    for name, shape, needed in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"{key}={model.path} holds {name} of shape {list(shape)} where one label needs {list(needed)}: it is a "
            "classifier, not a reward model."
        )
    reward_model = RewardModel(lm)
    missing, last = set(report["missing_keys"]), _last_layer(lm)
    if f"{last}.weight" not in missing:
        check_complete(missing, model, key)
        return reward_model
    if not new_head:
        raise ValueError(f"{key}={model.path} holds no reward head; train one with python -m jobs.reward_model.")
    check_complete({name for name in missing if name.startswith(f"{lm.base_model_prefix}.")}, model, key)
    for parameter in lm.get_submodule(last).parameters():
        nn.init.zeros_(parameter)
    return reward_model


def _last_layer(lm: Any) -> str:
    """Name of the linear layer whose only output is the score."""
    inside = f"{lm.base_model_prefix}."
    layers = [
        name
        for name, part in lm.named_modules()
        if isinstance(part, nn.Linear) and part.out_features == 1 and not name.startswith(inside)
    ]
    if not layers:
        raise ValueError(f"{type(lm).__name__} has no linear layer that gives the score. Use another model.")
    return layers[-1]
