"""Published weights under the names and in the layout of checkpoints, the only ones that vLLM's loaders know.

`transformers` holds the experts of a layer as one tensor, `experts.gate_up_proj` [E, 2I, H]; checkpoints hold
`experts.0.gate_proj.weight` [I, H] and so on. Some families have other names in `transformers` than in their
checkpoints. Replicas are models of `transformers` and take weights as they are published; engines take them through
this module.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def skeleton(path: str, trust_remote_code: bool) -> Any:
    """Build the model of `transformers` at `path` without weights; it knows its names in checkpoints.

    Its buffers have memory, and hold what the model's class computes from the configuration.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with init_empty_weights(include_buffers=False):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    lm.tie_weights()  # each weight without memory is a new one
    # Found once: `transformers` would look for them with each weight. It drops a prefix, too, that no file has shown.
    found = get_model_conversion_mapping(lm, add_legacy=False)
    lm._weight_conversions = [conversion for conversion in found if not isinstance(conversion, PrefixChange)]
    return lm


def skeleton_beside(vllm_config: Any) -> Any:
    """Build the skeleton of an engine's model in the engine's process.

    vLLM computes some families by the classes of `transformers`, and changes these classes: they then need an engine's
    configuration, and prepare themselves for its compiler.
    """
    from vllm.config import CompilationMode, set_current_vllm_config

    plain = copy.copy(vllm_config)
    plain.compilation_config = copy.copy(plain.compilation_config)
    plain.compilation_config.mode = CompilationMode.NONE
    with set_current_vllm_config(plain):
        return skeleton(vllm_config.model_config.model, vllm_config.model_config.trust_remote_code)


def as_in_checkpoint(lm: Any, weights: "Iterable[tuple[str, torch.Tensor]]") -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield whole weights of a model like `lm`, named as in `lm`, as `transformers` would save them.

    One weight after the other is converted, so that no more than one is held.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        yield from revert_weight_conversion(lm, {name: tensor}).items()
