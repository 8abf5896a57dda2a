"""Settings that leave parts of the training state in host memory, which only a GPU has beside it."""

from collections.abc import Mapping

from pipeline.config.learner import FSDPConfig
from pipeline.config.model import ModelConfig


def problems(model: ModelConfig, sharding: Mapping[str, FSDPConfig], use_gpu: bool) -> dict[str, object]:
    """Sentences, and whether each applies (see `sentences`).

    Args:
        model: of the run.
        sharding: the sections `fsdp` by their keys, such as `actor.fsdp`.
        use_gpu: `trainer.use_gpu`.
    """
    offload = "{model.activation_offload}"
    table: dict[str, object] = {
        f"{offload} moves what gradient checkpointing keeps, and {{model.enable_gradient_checkpointing}}; set it too": (
            model.activation_offload and not model.enable_gradient_checkpointing
        ),
        f"{offload} moves it from a GPU to host memory, and {{trainer.use_gpu}}; leave it out": (
            model.activation_offload and not use_gpu
        ),
    }
    for name, fsdp in sharding.items():
        sentence = f"{{{name}.offload}} leaves a GPU's training state in host memory, and {{trainer.use_gpu}}"
        table[f"{sentence}; set the first to none"] = fsdp.offload != "none" and not use_gpu
    return table
