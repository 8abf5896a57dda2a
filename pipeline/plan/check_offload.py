"""Check settings that save GPU memory: offload to host memory and 8-bit optimiser state."""

import importlib.util
from collections.abc import Mapping

from pipeline.config.learner import FSDPConfig, OptimConfig
from pipeline.config.model import ModelConfig


def problems(
    model: ModelConfig, learners: Mapping[str, tuple[OptimConfig, FSDPConfig]], use_gpu: bool
) -> dict[str, object]:
    """Return sentences on problems, each with a true value if it applies (see `bounds.sentences`).

    Args:
        model: the section `model`.
        learners: sections `optim` and `fsdp` of each learner; the keys are the prefixes of these sections, such as
            `actor.`.
        use_gpu: `trainer.use_gpu`.
    """
    offload = "{model.activation_offload}"
    table: dict[str, object] = {
        f"{offload} moves the layer inputs that checkpointing keeps, but {{model.enable_gradient_checkpointing}}; set "
        "it too": (model.activation_offload and not model.enable_gradient_checkpointing),
        f"{offload} moves layer inputs from a GPU to host memory, but {{trainer.use_gpu}}; leave it out": (
            model.activation_offload and not use_gpu
        ),
    }
    for name, (optim, fsdp) in learners.items():
        state, place, small = f"{{{name}optim.name}}", f"{{{name}fsdp.offload}}", optim.name == "adamw_8bit"
        table |= {
            f"{place} keeps a GPU's training state in host memory, but {{trainer.use_gpu}}; set the first to none": (
                fsdp.offload != "none" and not use_gpu
            ),
            f"{state} needs the Python package torchao on every node: pip install torchao": (
                small and importlib.util.find_spec("torchao") is None
            ),
            f"{state} with {place}: the step of 8-bit state runs on the device that holds the state; use one of them": (
                small and fsdp.offload != "none"
            ),
        }
    return table
