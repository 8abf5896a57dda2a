"""The policy: a causal language model that returns log-probs of chosen tokens.

1. The decoder runs once on right-padded ids without an attention mask. Under causal attention a token sees only earlier
   tokens, and padding comes after every real token, so it changes nothing that is read. No mask can be wrong, whatever
   ids are sampled, and the fast causal kernels apply.
2. Only the hidden states that predict a wanted token reach the head, in chunks whose logits are recomputed in the
   backward pass: logits of the whole batch never exist.
3. The head is used inside `Policy.forward`, because FSDP2 gathers the root's weights only there.
4. Dropout is off: the ratio of two log-probs of one token must measure the policy, not the noise.
"""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.config.model import ModelConfig
from pipeline.models.pretrained import Pretrained, check_complete, load_pretrained, without_dropout
from pipeline.models.sharing import hidden_states


class Policy(Pretrained):
    """A `transformers` causal language model with a log-prob head.

    Args:
        lm: model with a decoder (`get_decoder()`) and a linear head (`get_output_embeddings()`).

    Raises:
        ValueError: the model computes its logits in a way this head does not reproduce.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        config = lm.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        without_dropout(lm)
        self._check_head()

    def forward(
        self,
        input_ids: Tensor,
        logit_index: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
        with_entropy: bool = False,
        positions: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of `targets` under the policy at `temperature`.

        Args:
            input_ids: [B, T] int64, padded on the right with any id.
            logit_index: [N] int64, flat positions in B*T whose next-token distribution is wanted: token t of row b is
                predicted at `b * T + t - 1`.
            targets: [N] int64, the token looked up in each distribution.
            temperature: divides the logits; above 0.
            chunk_tokens: positions whose logits exist at a time.
            with_entropy: also compute the entropy of each distribution.
            positions: [B, T] int64 where responses share a prompt, as `segment_ids`; see `sharing.attention_inputs`.
            segment_ids: [B, T] int64.

        Returns:
            log-probs [N] float32 and entropies [N] float32 in nats (None without `with_entropy`).
        """
        hidden = hidden_states(self.decoder, input_ids, logit_index, positions, segment_ids)
        log_probs, entropies = [], []
        # At least one chunk even for N = 0: the head stays in the graph, and so in the ranks' collectives.
        for start in range(0, max(1, len(logit_index)), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            log_prob, entropy = checkpoint(
                self._head, hidden[part], targets[part], temperature, with_entropy, use_reentrant=False
            )
            log_probs.append(log_prob)
            entropies.append(entropy)
        return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None

    @torch.no_grad()
    def sum_pi_squared(
        self,
        input_ids: Tensor,
        logit_index: Tensor,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
        positions: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Sum over the vocabulary of squared probabilities, [N] float32, between 1 / V and 1.

        It is not part of `forward`, so the policy must not be sharded. Arguments are those of `forward`.
        """
        hidden = hidden_states(self.decoder, input_ids, logit_index, positions, segment_ids)
        sums = hidden.new_empty(len(logit_index), dtype=torch.float32)
        for start in range(0, len(logit_index), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            sums[part] = torch.softmax(self._logits(hidden[part]) / temperature, dim=-1).square_().sum(-1)
        return sums

    @property
    def decoder(self) -> Any:
        """The model without its head."""
        return self.lm.get_decoder()

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] float32 of hidden states [N, H], as the model itself computes them."""
        logits = self.lm.get_output_embeddings()(hidden) * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.float()

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        log_probs = torch.log_softmax(self._logits(hidden) / temperature, dim=-1)  # [N, V]
        chosen = log_probs.gather(-1, targets[:, None]).squeeze(-1)
        return chosen, -(log_probs.exp() * log_probs).sum(-1) if with_entropy else None

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare the head with the model's own on random hidden states: families scale or cap logits in many ways."""
        from transformers.modeling_outputs import MoeModelOutputWithPast

        head, decoder = self.lm.get_output_embeddings(), self.decoder
        name = type(self.lm).__name__
        if not isinstance(head, nn.Linear) or decoder is self.lm:
            raise ValueError(f"{name} has no decoder with a linear head, so it cannot be trained as a policy.")
        generator = torch.Generator().manual_seed(0)
        hidden: Any = torch.randn(1, 4, head.in_features, generator=generator).to(head.weight)
        with patch.object(decoder, "forward", return_value=MoeModelOutputWithPast(last_hidden_state=hidden)):
            theirs = self.lm(input_ids=torch.zeros(1, 4, dtype=torch.long, device=hidden.device)).logits[0].float()
        ours = self._logits(hidden[0])
        if ours.shape != theirs.shape or (ours - theirs).abs().max() > 0.02 * theirs.abs().max() + 1e-6:
            raise ValueError(
                f"{name} computes its logits in a way that is not supported: a linear head with "
                "final_logit_softcapping, logit_scale or logits_scaling gives other numbers. Use another model."
            )


def load_policy(config: ModelConfig, key: str = "model.path") -> Policy:
    """Build the policy from `config.path` on the CPU; `key` is the configuration key that the path came from.

    Raises:
        ValueError: no path, an incomplete model folder, weights missing in the checkpoint, or an unsupported model.
    """
    return Policy(load_lm(config, key))


def load_lm(config: ModelConfig, key: str = "model.path", with_head: bool = True) -> Any:
    """The `transformers` causal language model of `config.path` on the CPU, ready to train.

    Args:
        config: path, type, attention and checkpointing.
        key: the configuration key that the path came from, for errors.
        with_head: the head's weights are needed; without, a checkpoint may lack them.

    Raises:
        ValueError: no path, an incomplete model folder, or weights missing in the checkpoint.
    """
    # `transformers` takes seconds to import, and every process that sees the stream imports this module.
    from transformers import AutoModelForCausalLM

    lm, report = load_pretrained(AutoModelForCausalLM, config, key)
    missing = set(report["missing_keys"])
    if not with_head:
        decoder = {id(parameter) for parameter in lm.get_decoder().parameters()}
        missing -= {name for name, parameter in lm.named_parameters() if id(parameter) not in decoder}
    check_complete(missing, config, key)
    return lm
