"""The policy: a causal language model that returns log-probs of chosen tokens.

1. The decoder runs on packed rows (`attention.py`), or on right-padded ids without an attention mask: under causal
   attention no token attends to the padding after it, and the fast causal kernels apply.
2. Only the hidden states that predict a target reach the head (`head.py`). The head works in chunks and recomputes
   their logits in the backward pass, so the logits of the whole batch never exist.
3. The head is used inside of `Policy.forward`, because FSDP2 gathers the root module's weights only there.
4. Nothing is random in training (`repeatable.py`), so that two log-probs of a token differ only if the weights differ.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pipeline.config.model import ModelConfig
from pipeline.models.attention import Layout, decode, hidden_states
from pipeline.models.head import (
    HeadOutput,
    LogitRule,
    TokenLists,
    VocabularyPart,
    own_rows,
    token_log_probs,
    top_log_probs,
)
from pipeline.models.lora import inject, policy_class
from pipeline.models.mesh import Mesh, PipelineStage
from pipeline.models.packing import ImageInputs
from pipeline.models.pretrained import (
    PREFIX,
    Pretrained,
    check_complete,
    differs,
    load_pretrained,
    random_states,
    small_head,
)
from pipeline.models.processor import load_vision
from pipeline.models.repeatable import few_tokens
from pipeline.models.routes import Routers
from pipeline.models.stages import borrowed
from pipeline.models.support import Support
from pipeline.models.vision import ImageReader, read


class Policy(Pretrained):
    """A `transformers` causal language model with a log-prob head.

    Args:
        lm: model with a decoder (`get_decoder()`) and a linear head (`get_output_embeddings()`).
        image_reader: reads the images of prompts; None for text.
        stage: the stage of a pipeline that `lm` is.

    Raises ValueError if the head does not reproduce the model's logits, or the model still draws random numbers in
    training mode after dropout was switched off.
    """

    def __init__(self, lm: Any, image_reader: ImageReader | None = None, stage: PipelineStage | None = None) -> None:
        super().__init__(lm)
        self.image_reader = image_reader
        self.stage = stage or PipelineStage()
        self.borrowed = frozenset(PREFIX + name for name in borrowed(lm, self.stage))
        self.processor = image_reader and image_reader.vision.processor
        config = lm.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.routers = Routers(lm)
        if self.stage.last:
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
        packing: Layout | None = None,
        images: ImageInputs | None = None,
        support: Support | None = None,
        routes: Tensor | None = None,
        lists: TokenLists | None = None,
        top: int = 0,
        hidden: Tensor | None = None,
    ) -> HeadOutput | Tensor:
        """Compute log-probs of `targets` under the policy at `temperature`, and of the tokens in `lists`.

        A stage of a pipeline other than the last one returns its hidden states, [B, T, H] or [1, T / S, H].

        Log-probs of `targets` are renormalised over their supports. Entropies, and log-probs of `lists`, belong to the
        whole vocabulary.

        Args:
            input_ids: [1, T] int64 packed (`attention.py`), or [B, T] padded on the right with any id.
            logit_index: [N] int64, the flat position in B*T that predicts each target: `b * T + t - 1` for token t of
                row b.
            targets: [N] int64.
            temperature: divides the logits; above 0.
            chunk_tokens: number of positions for which logits exist at the same time.
            with_entropy: whether to compute the entropy of each distribution too.
            positions: [1, T] int64, positions in each context, if packed.
            packing: layout of the contexts, if packed.
            images: images of the prompts, if packed; None for text.
            support: supports of the targets; None if every target was sampled from the whole vocabulary.
            routes: [B*T, W] int16, experts to replay (`Routers`); None if the routers choose.
            lists: further tokens whose log-probs are wanted, for each target.
            top: number of most likely tokens that are wanted, without gradients.
            hidden: hidden states of the stage before; None in the first stage.
        """
        if not self.stage.last:
            return self._pass_on(input_ids, positions, packing, hidden)
        share = packing.share if packing else None
        self.routers.replay(routes if routes is None or share is None else share.cut(routes[None])[0])
        states = self._states(input_ids, logit_index, positions, packing, images, hidden)
        wanted = lists
        if share:
            targets = targets.index_select(0, share.own)
            support = None if support is None else support.select(share.own)
            wanted = None if lists is None else lists.select(share.own)
        both, places = TokenLists.joined([None if support is None else support.inside, wanted])
        left_out = support.outside if support is not None and len(support.outside.ids) else None
        (weight, bias, part), rule = self._head(states.dtype), LogitRule(self.scale, self.softcap, temperature)
        found = token_log_probs(states, weight, bias, targets, rule, chunk_tokens, with_entropy, part, both, left_out)
        log_probs, entropies, listed, kept, _ = found
        of_support, of_lists = (None if listed is None or at is None else listed[at] for at in places)
        if support is not None:
            assert of_support is not None
            log_probs = support.renormalise(log_probs, of_support, kept)
        if share is not None:
            log_probs = share.join(log_probs, len(logit_index))
            entropies = None if entropies is None else share.join(entropies, len(logit_index))
            if of_lists is not None:
                assert lists is not None
                of_lists = replace(share, own=lists.places(share.own)).join(of_lists, len(lists.ids))
        likeliest = None
        if top:
            likeliest = top_log_probs(states, weight, bias, rule, chunk_tokens, top, part)
            if share is not None:
                likeliest = (
                    share.join_all(likeliest[0], len(logit_index)),
                    share.join_all(likeliest[1], len(logit_index)),
                )
        return HeadOutput(log_probs, entropies, of_lists, None, likeliest)

    def _pass_on(
        self, input_ids: Tensor, positions: Tensor | None, packing: Layout | None, hidden: Tensor | None
    ) -> Tensor:
        """Return the hidden states that the next stage of a pipeline gets. Arguments are as in `forward`."""
        return decode(self.decoder, input_ids, positions, packing, _embedded(hidden))

    def _states(
        self,
        input_ids: Tensor,
        logit_index: Tensor,
        positions: Tensor | None,
        packing: Layout | None,
        images: ImageInputs | None,
        hidden: Tensor | None,
    ) -> Tensor:
        """[n, H], the hidden states from which this rank predicts. Arguments are as in `forward`."""
        if hidden is None:
            return read(self, input_ids, logit_index, positions, packing, images)
        return hidden_states(self.decoder, input_ids, logit_index, positions, packing, _embedded(hidden))

    def _head(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, VocabularyPart | None]:
        """Return this rank's rows of the head's weights and bias, and the part of the vocabulary that they cover.

        The weights have the type of the computation, `dtype`.
        """
        head = self._linear_head()
        (weight, part), (bias, _) = own_rows(head.weight), own_rows(head.bias)
        assert weight is not None
        return weight, bias, part

    @torch.no_grad()
    def sum_pi_squared(
        self,
        input_ids: Tensor,
        logit_index: Tensor,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
        positions: Tensor | None = None,
        packing: Layout | None = None,
        images: ImageInputs | None = None,
        support: Support | None = None,
        routes: Tensor | None = None,
    ) -> Tensor:
        """[N] float32, sum of the squared probabilities over the support of each position `logit_index`.

        Arguments are as in `forward`. The policy must not be sharded.
        """
        self.routers.replay(routes)
        hidden = read(self, input_ids, logit_index, positions, packing, images)
        sums = hidden.new_empty(len(logit_index), dtype=torch.float32)
        for start in range(0, len(logit_index), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = self.logits(hidden[part]) / temperature
            if support is not None:
                chosen = torch.arange(start, start + len(logits), device=logits.device)
                logits = support.select(chosen).cut(logits)
            sums[part] = torch.softmax(logits, dim=-1).square_().sum(-1)
        return sums

    def try_pass(self, device: torch.device) -> None:
        """Run a forward pass over a few tokens, for `check_repeatable`."""
        ids, hidden = few_tokens(self.lm, device), None
        if not self.stage.first:
            generator = torch.Generator().manual_seed(0)
            width = self.decoder.config.get_text_config().hidden_size
            hidden = torch.randn(*ids.shape, width, generator=generator).to(device, self.lm.dtype)
        self(ids, torch.arange(ids.numel() - 1, device=device), ids.flatten()[1:], hidden=hidden)

    @property
    def packed_only(self) -> bool:
        """True if rows cannot be padded: an error in one stage would leave the others waiting."""
        return self.stage.count > 1

    @property
    def decoder(self) -> Any:
        """The model without its head."""
        return self.lm.get_decoder()

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] float32, logits at temperature 1 for `hidden` [..., H], as `lm` itself computes them."""
        head = self._linear_head()
        return LogitRule(self.scale, self.softcap).apply(linear(hidden, head.weight, head.bias))[0]

    def _linear_head(self) -> nn.Linear:
        """Return the head. Raises ValueError if it is not a plain linear layer, since only its weights are used."""
        head = self.lm.get_output_embeddings()
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise ValueError(f"the head of {type(self.lm).__name__}, a {type(head).__name__}, is not a linear layer.")
        return head

    @torch.no_grad()
    def _check_head(self) -> None:
        """Check on random hidden states that `logits` gives the logits that `lm` itself computes.

        Model families scale or cap logits in many ways. Raises ValueError if the logits differ.
        """
        head, decoder = self.lm.get_output_embeddings(), self.decoder
        name = type(self.lm).__name__
        if not isinstance(head, nn.Linear) or decoder is self.lm:
            raise ValueError(f"{name} has no decoder with a linear head, so it cannot be trained as a policy.")
        if head.weight.is_meta:
            return
        with small_head(head):
            hidden, theirs = random_states(self.lm, decoder, head, token=0)
            ours = self.logits(hidden)
        if differs(ours, theirs):
            raise ValueError(
                f"{name} computes its logits in a way that is not supported: a linear head with "
                "final_logit_softcapping, logit_scale or logits_scaling gives other numbers. Use another model."
            )


def _embedded(hidden: Tensor | None) -> dict[str, Tensor]:
    """Return the arguments of a decoder for the hidden states of the stage before, none in the first stage."""
    return {} if hidden is None else {"inputs_embeds": hidden}


def load_policy(
    config: ModelConfig, key: str = "model.path", mesh: Mesh | None = None, longest: int | None = None
) -> Policy:
    """Load the policy of `config.path`. Arguments and errors are as in `load_lm`.

    Raises ValueError also for a model that `Policy` does not support, and as `load_vision` does.
    """
    lm = load_lm(config, key, mesh, longest=longest)
    if config.vision == "none":
        return Policy(lm, stage=mesh.stage if mesh else None)
    return Policy(lm, ImageReader(lm, load_vision(config), config.vision == "trained"))


def load_frozen(
    config: ModelConfig,
    trained: ModelConfig,
    mesh: Mesh | None = None,
    longest: int | None = None,
    key: str = "scoring.reference.path",
) -> Policy:
    """Load the policy of `config.path`, such as the reference or a teacher, in evaluation mode and without gradients.

    Args:
        config: settings of the frozen policy.
        trained: settings of the policy that is trained; both must have vocabularies of the same size.
        mesh, longest: as in `load_lm`.
        key: configuration key of the path, for errors.

    Raises ValueError as `load_policy` does, and if the sizes of the vocabularies differ.
    """
    other = config.path != trained.path
    policy = load_policy(config, key if other else "model.path", mesh, longest)
    if other:
        from transformers import AutoConfig

        begun = AutoConfig.from_pretrained(trained.path or "", trust_remote_code=trained.trust_remote_code)
        sizes = [part.get_text_config().vocab_size for part in (policy.lm.config, begun)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{key}={config.path} has a vocabulary of {sizes[0]} tokens and "
                f"model.path={trained.path} one of {sizes[1]}: their log-probs of a token id cannot be compared; "
                "name a model with the policy's vocabulary"
            )
    policy.routers.replays = False
    return policy.eval().requires_grad_(False)


def load_lm(
    config: ModelConfig,
    key: str = "model.path",
    mesh: Mesh | None = None,
    with_head: bool = True,
    longest: int | None = None,
) -> Any:
    """Load the `transformers` language model of `config.path`, in training mode; with `config.vision`, one that reads
    images.

    Args:
        config: settings of the model: path, dtype, attention, gradient checkpointing, adapters.
        key: configuration key of the path, for errors.
        mesh: ranks that each load a slice of the weights (`load_pretrained`); None loads whole weights.
        with_head: whether the checkpoint must have the head's weights.
        longest: length of the longest row in tokens; None for the model's own limit.

    Raises ValueError for no path, an incomplete model folder, weights missing in the checkpoint, or adapters that do
    not fit.
    """
    # Imported here because it takes seconds, and every process of the stream imports this module.
    import transformers

    lm, report = load_pretrained(getattr(transformers, policy_class(config)), config, key, mesh, longest)
    missing = set(report["missing_keys"])
    if not with_head:
        # A vision tower is needed, and stands outside of the decoder.
        needed = [lm.get_decoder(), *(lm.base_model.children() if config.vision != "none" else ())]
        kept = {id(parameter) for part in needed for parameter in part.parameters()}
        missing -= {name for name, parameter in lm.named_parameters() if id(parameter) not in kept}
    check_complete(missing, config, key, report["unexpected_keys"])
    inject(lm, config.lora, key)
    return lm
