"""Private interfaces of torch (2.13)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.tensor._utils
import torch.utils._python_dispatch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import placement_types

from pipeline.upstream import private, version_of

if TYPE_CHECKING:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
else:
    # The placement of weights that tensor parallelism divided first, and FSDP second. We know of no upstream issue.
    StridedShard = private(placement_types, "_StridedShard", "torch")
    compute_local_shape_and_global_offset = private(
        torch.distributed.tensor._utils, "compute_local_shape_and_global_offset", "torch"
    )


def share_deadline(mesh: DeviceMesh, device: torch.device) -> None:
    """Give collectives in all groups of `mesh` the timeout of the default process group.

    `init_device_mesh` has no argument for a timeout: https://github.com/pytorch/pytorch/issues/119613

    Raises:
        ImportError: this torch has no such private functions.
    """
    deadline = group_deadline(device)
    set_deadline = private(distributed_c10d, "_set_pg_timeout", "torch")
    for group in mesh.get_all_groups():
        set_deadline(deadline, group)


def group_deadline(device: torch.device) -> timedelta:
    """Return the timeout of collectives on `device` in the default process group. We know of no public way.

    Raises:
        ImportError: this torch has no such private functions.
    """
    whole = private(distributed_c10d, "_get_default_group", "torch")()
    deadline: timedelta = private(private(whole, "_get_backend", "torch")(device), "options._timeout", "torch")
    return deadline


@contextmanager
def uncast_inputs(module: nn.Module) -> Iterator[None]:
    """Keep FSDP, within the block, from casting the inputs of submodules of `module` to its computation dtype.

    In torch this can be chosen only once, in `fully_shard`: https://github.com/pytorch/pytorch/issues/146130

    Raises:
        ImportError: the state of this torch's FSDP has another form.
    """
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    states: list[Any] = [private(part, "_get_fsdp_state", "torch")() for part in parts]
    policies = [private(state, "_mp_policy", "torch") for state in states]
    if any(not hasattr(policy, "cast_forward_inputs") for policy in policies):
        raise ImportError(f"{version_of('torch')} casts inputs in an unknown way; install the version of requirements/")
    for state, policy in zip(states, policies, strict=True):
        state._mp_policy = replace(policy, cast_forward_inputs=False)
    try:
        yield
    finally:
        for state, policy in zip(states, policies, strict=True):
            state._mp_policy = policy
