"""The mesh: which ranks divide a model's weights among them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Mesh:
    """The ranks of a model."""

    data: DeviceMesh
    """Of `fully_shard`: the ranks that see other rows and divide the weights."""


def make_mesh(device: torch.device | str) -> Mesh:
    """The mesh of all ranks; a collective. A GPU becomes this process's own, before anything is communicated.

    Raises RuntimeError if no process group is initialised.
    """
    if not dist.is_initialized():
        raise RuntimeError("sharding needs a process group; call torch.distributed.init_process_group first")
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Mesh(init_device_mesh(device.type, (dist.get_world_size(),)))
