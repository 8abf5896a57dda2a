"""Tensor and expert parallelism by the plans that `transformers` has for its model classes.

A plan defines for each module how its weights are divided over the tensor group, and what ranks exchange in its forward
pass. Applied to a model on the meta device, the plan leaves `DTensor` placeholders of this rank's part. FSDP then
divides their rows (`slices.py`). FSDP is applied even if only one rank divides them: the plan of a module such as
`q_norm` sums `param.grad` over the tensor group in each backward pass, and without FSDP `param.grad` would still hold
the gradients of earlier micro-batches, which were summed already.
"""

from typing import Any

from pipeline.models.mesh import Mesh

DISPATCH = "ep_dispatch_experts"
"""Name in an expert-parallel plan for experts that get their tokens from other ranks."""


def divide(lm: Any, mesh: Mesh) -> None:
    """Divide `lm` over `mesh.tensor`, and its experts if `mesh.expert` is above 1, by the plans of its class.

    A tied embedding is divided by rows, as the head is, so that both stay one weight.

    Raises:
        ValueError: the class has no plan, or a size is not a multiple of the tensor group.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import (
        apply_expert_parallelism,
        apply_tensor_parallelism,
        resolve_parallel_plans,
    )

    assert mesh.tensor is not None
    size, name = mesh.tensor.size(), type(lm).__name__
    if not lm.config.base_model_tp_plan:
        raise ValueError(f"transformers has no plan for tensor parallelism of {name}; set actor.parallel.tensor=1")
    if mesh.expert > 1 and not lm.ep_plan:
        raise ValueError(f"transformers has no plan for expert parallelism of {name}; set actor.parallel.expert=1")
    tensor, expert = resolve_parallel_plans(lm, DistributedConfig(tp_size=size, ep_size=mesh.expert))
    embedding: Any = lm.get_input_embeddings()
    head: Any = lm.get_output_embeddings() if lm.can_generate() else None
    tied = head is not None and head.weight is embedding.weight
    if tied:
        names = {module: name for name, module in lm.named_modules()}
        tensor[names[embedding]] = "embedding_rowwise"
        tensor.pop(names[head], None)
    apply_tensor_parallelism(lm, mesh.tensor, tensor)
    if DISPATCH in expert.values():
        apply_expert_parallelism(lm, mesh.tensor, mesh.tensor, expert)
    elif expert:
        apply_tensor_parallelism(lm, mesh.tensor, expert)
    if tied:
        head.weight = embedding.weight
