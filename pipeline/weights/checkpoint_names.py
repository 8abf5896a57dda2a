"""Conversion of published weights to the names and shapes in checkpoints, the only ones that vLLM's loaders know.

`transformers` holds the experts of a layer as one tensor, `experts.gate_up_proj` [E, 2I, H]; checkpoints hold
`experts.0.gate_proj.weight` [I, H] and so on. Some families have other names in `transformers` than in their
checkpoints. Weights are published under the names in `transformers`. Scoring replicas, which are models of
`transformers`, load them without a conversion; engines convert them here.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def skeleton(path: str, trust_remote_code: bool, made_by: str = "AutoModelForCausalLM") -> Any:
    """Build the model of `transformers` at `path` without weights, for the mapping of names to names in checkpoints.

    Parameters are on the meta device. Buffers have memory, with the values that the class computes from the
    configuration.

    Args:
        path: folder of the model.
        trust_remote_code: whether code of that folder may run.
        made_by: name of the class of `transformers` that makes the policy (`lora.policy_class`).
    """
    import transformers
    from accelerate import init_empty_weights
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with init_empty_weights(include_buffers=False):
        lm = getattr(transformers, made_by).from_config(config, trust_remote_code=trust_remote_code)
    lm.tie_weights()  # each weight without memory is a new one
    # Found once here, because `transformers` would look for them with each weight. Changes of prefixes are left out:
    # they depend on the names in a file, and no file was read.
    found = get_model_conversion_mapping(lm, add_legacy=False)
    lm._weight_conversions = [conversion for conversion in found if not isinstance(conversion, PrefixChange)]
    return lm


def as_in_checkpoint(lm: Any, weights: "Iterable[tuple[str, torch.Tensor]]") -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield (name, tensor) under the names and with the shapes in checkpoints.

    Weights are converted one by one, so that no more than one is in memory.

    Args:
        lm: a model of `transformers` of the same class, such as a `skeleton`.
        weights: (name in `lm`, unsharded tensor).
    """
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        yield from revert_weight_conversion(lm, {name: tensor}).items()
