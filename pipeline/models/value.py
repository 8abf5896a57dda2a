"""The value model (critic): the decoder of a causal language model with a linear head that gives one value per token.

1. Inputs are the same as the policy's (`policy.py`). The value of a response token is read at the position that
   predicts the token, so it is the value of the state before the token.
2. The language-model head is dropped, unless it is tied to the embedding.
3. If the policy reads images, the critic has a vision tower of its own.
4. The value head starts at 0, so that the first advantages are plain returns, without the noise of a random head.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.models.attention import Layout
from pipeline.models.mesh import Mesh
from pipeline.models.packing import ImageInputs
from pipeline.models.policy import load_lm
from pipeline.models.pretrained import float32_head
from pipeline.models.processor import load_vision
from pipeline.models.repeatable import few_tokens, without_dropout
from pipeline.models.tokenizer import load_tokenizer
from pipeline.models.tokenizer_fit import check_vocabulary
from pipeline.models.vision import ImageReader, read


class ValueModel(nn.Module):
    """A `transformers` decoder with a value head.

    Args:
        lm: model with a decoder (`get_decoder()`). Nothing else of it is kept, except the tower for images.
        image_reader: reads the images of prompts with the tower of `lm`; None for text.

    Raises ValueError if the model has no separate decoder, or still draws random numbers in training mode after dropout
    was switched off.
    """

    def __init__(self, lm: Any, image_reader: ImageReader | None = None) -> None:
        super().__init__()
        self.decoder = lm.get_decoder()
        self.image_reader = image_reader
        reads = lm.base_model.named_children() if image_reader else ()
        self.tower = nn.ModuleDict({name: part for name, part in reads if part is not self.decoder})
        embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
        if self.decoder is lm or not isinstance(head, nn.Linear):
            raise ValueError(f"{type(lm).__name__} has no decoder with a linear head, so it cannot become a critic.")
        for part in (self.decoder, *self.tower.values()):
            without_dropout(part)
        self.vocab_size = embedding.num_embeddings
        # FSDP wants one type of the trained weights of a group, and the head is in the root's, with the last norm.
        # With a frozen decoder it is float32, as adapters are.
        dtype = embedding.weight.dtype if embedding.weight.requires_grad else torch.float32
        self.head = nn.Linear(head.in_features, 1, dtype=dtype, device=embedding.weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        input_ids: Tensor,
        logit_index: Tensor,
        positions: Tensor | None = None,
        packing: Layout | None = None,
        images: ImageInputs | None = None,
    ) -> Tensor:
        """Compute values of response tokens.

        Args:
            input_ids: [1, T] int64 packed (`attention.py`), or [B, T] padded on the right with any id.
            logit_index: [N] int64, flat positions in B*T, as in `Policy.forward`.
            positions: [1, T] int64, positions in each context, if packed.
            packing: layout of the contexts, if packed.
            images: images of the prompts, if packed; None for text.

        Returns:
            values [N] float32. They are part of the autograd graph also for N = 0, so that this rank joins the
            collectives of the backward pass.
        """
        values = float32_head(self.head, read(self, input_ids, logit_index, positions, packing, images))
        return packing.share.join(values, len(logit_index)) if packing and packing.share else values

    def try_pass(self, device: torch.device) -> None:
        """Run a forward pass over a few tokens, for `check_repeatable`."""
        ids = few_tokens(self.decoder, device)
        self(ids, torch.arange(ids.numel(), device=device))


def load_value_model(
    policy: ModelConfig, path: str | None = None, mesh: Mesh | None = None, longest: int | None = None
) -> ValueModel:
    """Load the critic, with a value head of zeros.

    Args:
        policy: settings of the policy's model, which also apply to the critic.
        path: `critic.path`; None for the policy's model. The checkpoint may lack a language-model head, as a reward
            model does.
        mesh: ranks that each load a slice of the weights (`load_pretrained`); None loads whole weights, on the CPU.
        longest: length of the longest row in tokens; None for the model's own limit.

    Raises ValueError for no path, an incomplete or unsupported model, or an embedding that lacks tokens of the policy's
    tokenizer.
    """
    key = "critic.path" if path else "model.path"
    # The adapter that training starts from is the policy's.
    lora = dataclasses.replace(policy.lora, path=None)
    config = dataclasses.replace(policy, path=path or policy.path, lora=lora)
    lm = load_lm(config, key, mesh, False, longest)
    # The processor is the policy's, which has made the prompts.
    reader = None if policy.vision == "none" else ImageReader(lm, load_vision(policy), policy.vision == "trained")
    model = ValueModel(lm, reader)
    if path:
        tokenizer = load_tokenizer(policy, needs_chat_template=False)
        check_vocabulary(tokenizer, policy.tokenizer_path or policy.path, model.vocab_size, f"critic.path={path}")
    return model
