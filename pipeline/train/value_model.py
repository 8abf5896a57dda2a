"""The value model: the decoder of a causal language model with a linear head that gives one value per token.

1. It reads what the policy reads, at the same positions: right-padded ids without an attention mask (why that is safe
   stands in `pipeline/train/policy.py`), and the value of a response token is read where the token is predicted. It
   is the value before the token: of what came before it, without knowing the token itself.
2. The language model's head is dropped and never held beside the decoder. A tied one is the embedding, which stays.
3. The value head starts at 0. The first values are then 0 for every token, so the first advantages are plain returns;
   a random head would add noise of its own size to them. The first step moves the head alone.
4. The head computes in float32, whatever the decoder computes in: values are regressed on returns, and a bfloat16
   value has no more than three digits.
"""

import dataclasses
from typing import Any

from torch import Tensor, nn

from pipeline.config import Config
from pipeline.prompts.chat import load_tokenizer
from pipeline.train.policy import load_lm
from pipeline.train.pretrained import without_dropout
from pipeline.train.sharing import hidden_states


class ValueModel(nn.Module):
    """A `transformers` decoder with a value head.

    Args:
        lm: model with a decoder (`get_decoder()`), of which nothing else is kept.

    Raises:
        ValueError: the model has no decoder of its own.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.decoder = lm.get_decoder()
        embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
        if self.decoder is lm or not isinstance(head, nn.Linear):
            raise ValueError(f"{type(lm).__name__} has no decoder with a linear head, so it cannot become a critic.")
        without_dropout(self.decoder)
        self.vocab_size = embedding.num_embeddings
        # Like the decoder's weights: FSDP wants one type in a group, and the head is in the root's.
        self.head = nn.Linear(head.in_features, 1, dtype=embedding.weight.dtype, device=embedding.weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, input_ids: Tensor, select: Tensor, positions: Tensor | None = None, owners: Tensor | None = None
    ) -> Tensor:
        """Values of response tokens.

        Args:
            input_ids: [B, T] int64, padded on the right with any id.
            select: [N] int64, flat positions in B*T whose value is wanted: the value before token t of row b is read at
                `b * T + t - 1`, as `Policy.forward` reads the token's distribution there.
            positions: [B, T] int64 where responses share a prompt, as `owners`; see `sharing.attention_inputs`.
            owners: [B, T] int64.

        Returns:
            values [N] float32; for N = 0 still in the graph, and so in the ranks' collectives.
        """
        hidden = hidden_states(self.decoder, input_ids, select, positions, owners)
        # The weights are used here and not in the head's own forward, which would compute in their type.
        return hidden.float() @ self.head.weight.float().squeeze(0) + self.head.bias.float()


def load_value_model(config: Config) -> ValueModel:
    """Build the critic from `critic.path`, or else `model.path`, on the CPU, with a value head of zeros.

    A checkpoint without a language-model head will do, such as that of a reward model.

    Raises:
        ValueError: no path, an incomplete or unsupported model, or one whose vocabulary is too small for the policy's
            tokens.
    """
    path = config.critic.path
    key = "critic.path" if path else "model.path"
    model = ValueModel(load_lm(dataclasses.replace(config.model, path=path or config.model.path), key, with_head=False))
    if path:
        tokens = len(load_tokenizer(config.model, needs_chat_template=False))
        if model.vocab_size < tokens:
            raise ValueError(
                f"critic.path={path} knows {model.vocab_size} tokens, but the policy's tokenizer "
                f"({config.model.tokenizer_path or config.model.path}) has {tokens}; the critic reads the policy's "
                "token ids, so give a model with the same vocabulary."
            )
    return model
