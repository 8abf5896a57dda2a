"""Loading of `transformers` models, and code that policy, reward model and value model share."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.config.paths import model_folder
from pipeline.errors import short_reason
from pipeline.models.attention_choice import choose_attention
from pipeline.models.mesh import Mesh, PipelineStage
from pipeline.models.notes import add_notes
from pipeline.models.offload import offload_activations
from pipeline.models.precision import torch_dtype
from pipeline.models.quantised import check_not_quantised
from pipeline.models.repeatable import without_dropout
from pipeline.models.rope import fix_ropes
from pipeline.models.slices import reading_slices
from pipeline.models.weight_files import alone, check_weights

PREFIX = "lm."
NO_SDPA = "does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention"
"""Part of the error that `transformers` raises for a model family that has no 'sdpa' attention."""


class NotLoadedError(ValueError):
    """Error if the files of a model are complete, but `transformers` cannot build the model from them."""


class Pretrained(nn.Module):
    """A module that wraps a whole `transformers` model, `lm`, so that `save_hf` can save it."""

    processor: Any = None
    """The model's processor of images, which is saved with it; None for a model of text."""
    stage = PipelineStage()
    """The stage of a pipeline that this model is."""
    borrowed: frozenset[str] = frozenset()
    """Names of weights that another stage publishes and saves."""

    def __init__(self, lm: Any) -> None:
        """Wrap `lm`, and switch its dropout off. Raises ValueError if it still draws random numbers in training."""
        super().__init__()
        self.lm = lm
        without_dropout(lm)

    @staticmethod
    def hf_name(name: str) -> str:
        """Return the name in a Hugging Face checkpoint of the parameter that this wrapper calls `name`."""
        return name.removeprefix(PREFIX)


def load_pretrained(
    auto: Any,
    config: ModelConfig,
    key: str,
    mesh: Mesh | None = None,
    longest: int | None = None,
    other_head: bool = False,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Load the model of `config.path`, in training mode.

    Args:
        auto: class of `transformers` with `from_pretrained`, such as `AutoModelForCausalLM`.
        config: settings of the model: path, dtype, attention, gradient checkpointing.
        key: configuration key of the path, for errors.
        mesh: ranks that each read a slice of the weights (`slices.py`); None, or one rank, reads whole weights on the
            CPU.
        longest: length of the longest row in tokens (`fix_ropes`); None for the model's own limit.
        other_head: whether weights of the head may have another shape than in `config.json`; the report lists these.
        options: arguments of `from_pretrained` that override the arguments made from `config`.

    Returns:
        the model, and the loading report of `transformers` with `missing_keys`, `unexpected_keys`, `mismatched_keys`.

    Raises ValueError for no path, an incomplete model folder, quantised weights, a model that `transformers` cannot
    load, or weights whose shapes do not match `config.json`.
    """
    if not config.path:
        raise ValueError(f"{key} is not set; give a Hugging Face model folder or hub name.")
    folder = model_folder(config.path, key)
    if folder:
        check_weights(folder, key)
    check_not_quantised(config.path, key)
    arguments = {
        "dtype": torch_dtype(config.dtype, "model.dtype"),
        "attn_implementation": config.attn_implementation,
        "trust_remote_code": config.trust_remote_code,
        **options,
    }
    # Else `transformers` would name no weight in its error.
    arguments["ignore_mismatched_sizes"] = True
    own_attention = None
    with ExitStack() as inside:
        place = inside.enter_context(alone(folder)) if folder else config.path
        if mesh and mesh.slices:
            inside.enter_context(reading_slices(mesh))
        try:
            try:
                model, report = auto.from_pretrained(place, output_loading_info=True, **arguments)
            except ValueError as error:
                if arguments["attn_implementation"] != "sdpa" or NO_SDPA not in str(error):
                    raise
                own_attention = "its family has no attention 'sdpa', so 'eager' computes it"
                arguments["attn_implementation"] = "eager"
                model, report = auto.from_pretrained(place, output_loading_info=True, **arguments)
        # Formats, families and their packages raise errors of their own.
        except Exception as error:
            raise NotLoadedError(f"{key}={config.path} cannot be loaded: {short_reason(error)}") from error
    if folder:
        model.name_or_path = model.config._name_or_path = str(folder)
    for name, shape, needed in sorted(report["mismatched_keys"]):
        if not other_head or name.startswith(f"{model.base_model_prefix}."):
            raise ValueError(
                f"{key}={config.path} holds {name} of shape {list(shape)}, but its config.json says {list(needed)}; "
                "give a complete checkpoint of one model."
            )
    chosen = own_attention, fix_ropes(model, longest), choose_attention(model)
    add_notes(model, *(note and f"{key}={config.path}: {note}" for note in chosen))
    if config.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.activation_offload:
        offload_activations(model.base_model)
    return model.train(), report


def check_complete(missing: set[str], config: ModelConfig, key: str, unread: Collection[str] = ()) -> None:
    """Check that the checkpoint lacks no weights.

    Args:
        missing: names of weights that the checkpoint lacks.
        config: settings of the model, for the error.
        key: configuration key of the path, for the error.
        unread: names of weights in the checkpoint that the model does not have, for the error.

    Raises ValueError if `missing` is not empty.
    """
    if missing:
        others = ""
        if unread:
            others = f", and holds {len(unread)} that its config.json has no place for, the first {min(unread)}"
        raise ValueError(
            f"{key}={config.path} lacks {len(missing)} weights, the first {min(missing)}, which would start at "
            f"random{others}; give a complete checkpoint."
        )


def float32_head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Apply a linear head with one output, such as a value or score head, in float32.

    A value or score in bfloat16 would have no more than three digits.

    Args:
        head: weights [1, H] of any dtype.
        hidden: [N, H] hidden states.

    Returns:
        [N] float32.
    """
    numbers = hidden.float() @ head.weight.float().squeeze(0)
    return numbers if head.bias is None else numbers + head.bias.float()


class _States(tuple[Tensor]):
    """A decoder's output with `last_hidden_state` as its only entry; every other attribute is None.

    It is a tuple and, for families that write `**output`, a mapping.
    """

    def keys(self) -> list[str]:
        """Return the names of the entries."""
        return ["last_hidden_state"]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(0 if key == "last_hidden_state" else key)

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def random_states(lm: Any, decoder: Any, head: nn.Linear, token: int) -> tuple[Tensor, Tensor]:
    """Draw random hidden states, and let `lm` compute logits from them, to learn how the model applies its head.

    Args:
        lm: the whole model.
        decoder: the decoder in `lm`; its output is replaced by the random hidden states.
        head: the linear head in `lm`, with H inputs.
        token: id at all 4 positions of the row.

    Returns:
        hidden states [1, 4, H], and the logits of `lm`, float32.
    """
    generator = torch.Generator().manual_seed(0)
    hidden: Any = torch.randn(1, 4, head.in_features, generator=generator).to(head.weight)
    # Vision-language models look up embeddings outside of their decoder, and this rank may have a slice of them.
    with (
        patch.object(decoder, "forward", return_value=_States((hidden,))),
        patch.object(lm.get_input_embeddings(), "forward", return_value=hidden),
    ):
        return hidden, lm(input_ids=torch.full((1, 4), token, device=hidden.device)).logits.float()


@contextmanager
def small_head(head: nn.Linear) -> Iterator[None]:
    """Give a linear head random weights with at most 256 outputs within the block.

    A check of how a model turns the head's outputs into logits (`random_states`) then works even if the head's own
    weights are divided over ranks. The outputs are large enough for a cap on logits to show.
    """
    generator = torch.Generator().manual_seed(0)
    rows, width = min(head.out_features, 256), head.in_features
    small = {"weight": torch.randn(rows, width, generator=generator) * 10 / width**0.5}
    if head.bias is not None:
        small["bias"] = torch.randn(rows, generator=generator)
    own = {name: nn.Parameter(values.to(head.weight.dtype)) for name, values in small.items()}
    # Tensor parallelism puts a forward pass for divided weights into the instance.
    with patch.dict(head._parameters, own), patch.object(head, "forward", MethodType(type(head).forward, head)):
        yield


def differs(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if two tensors of logits or scores differ in shape, or by more than rounding in bfloat16 explains."""
    return ours.shape != theirs.shape or bool((ours - theirs).abs().max() > 0.02 * theirs.abs().max() + 1e-6)
