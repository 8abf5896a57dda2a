"""Weights that an engine reads out of a train worker's memory by itself, past the object store.

A train worker keeps a copy of its shard for every version that may still be fetched (`pipeline/weights/outbox.py`), and
publishes where the buckets stand in it. It takes no part in a read, so that engines fetch when they are admitted and
the trainer goes on meanwhile. Reads are one-sided reads by NIXL (`trainer.weight_transport=nixl`), over what UCX finds
between the two: NVLink, InfiniBand, shared memory, TCP.

Nothing need pass through host memory, and neither does the checksum (`digest`).
"""

import functools
import os
import time
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import PeerDied

if TYPE_CHECKING:
    import torch

MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
"""What NIXL calls the memory of a device."""
POLL_S = 0.001
BLOCK = 2**16
"""Numbers of 16 bits that are summed up together."""
SLICE = 2**20
"""Bytes that are summed up at a time: few enough for a CPU's cache."""


@dataclass(frozen=True)
class NixlMemory:
    """Memory that NIXL has registered."""

    agent: str
    metadata: bytes
    """What another agent needs to know of this one."""
    address: int
    kind: str
    device: int


@dataclass(frozen=True)
class Remote:
    """Bytes `offset:offset + nbytes` of a train worker's memory."""

    rank: int
    memory: NixlMemory | None
    """None where there are no bytes."""
    offset: int
    nbytes: int


def digest(data: "torch.Tensor") -> int:
    """A 32-bit checksum of bytes [B] uint8, computed on their device and the same on each.

    Every two bytes are a number, every number has a weight by its place in a block, and the CRC-32 is of the blocks'
    sums. Weights are odd and sums exact, so a block with one wrong number always has another sum.
    """
    import torch
    from torch.nn.functional import pad

    sums = [torch.empty(0, dtype=torch.int64, device=data.device)]
    for part in data.split(SLICE):
        numbers = pad(part, (0, -len(part) % (2 * BLOCK))).view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
        sums.append(numbers.view(-1, BLOCK).mul_(_weights(str(data.device))).sum(1))
    return zlib.crc32(torch.cat(sums).cpu().numpy().tobytes(), len(data) & 0xFFFFFFFF)


@functools.cache
def _weights(device: str) -> "torch.Tensor":
    import torch

    # Below 2^31: 2^16 products of such a weight and 16 bits add up to less than 2^63.
    odd = (np.random.PCG64(0).random_raw(BLOCK) >> np.uint64(33)) | np.uint64(1)
    return torch.from_numpy(odd.astype(np.int64)).to(device)


@functools.cache
def nixl_agent() -> Any:
    """This process's NIXL agent.

    Raises:
        ImportError: NIXL is not installed.
    """
    # Without a bound UCX may keep memory that is no longer registered; vLLM sets the same one for its own transfers.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ImportError(
            f"trainer.weight_transport=nixl needs the Python package nixl on every node, and it cannot be imported "
            f"here ({error}): pip install nixl"
        ) from error
    return nixl_agent(f"weights-{uuid.uuid4()}", nixl_agent_config(backends=["UCX"]))


@functools.cache
def _introduce(agent: str, metadata: bytes) -> None:
    nixl_agent().add_remote_agent(metadata)


def read(remotes: Sequence[Remote], device: Any, timeout: float) -> list["torch.Tensor"]:
    """What stands in the memory of train workers, as bytes [B] uint8 on `device`.

    Args:
        remotes: where it stands.
        device: of the engine.
        timeout: seconds that all of them may take together.

    Raises:
        TimeoutError: they took longer.
        PeerDied: a train worker cannot be read, most likely because it has died.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        # What was done with the bytes of the read before may stand in the queue, and their memory is used again.
        torch.cuda.synchronize(device)
    buffers = [torch.empty(remote.nbytes, dtype=torch.uint8, device=device) for remote in remotes]
    running, deadline = [], time.monotonic() + timeout
    for remote, buffer in zip(remotes, buffers, strict=True):
        if remote.memory is not None:
            running.append((remote, *_begin(remote, remote.memory, buffer)))
    # A read that fails ends the engine: what is registered by then goes with it.
    for remote, transfer, registered in running:
        while (state := _state(remote, transfer)) != "DONE":
            if state == "ERR":
                raise PeerDied(_broken(remote, "the transfer failed"))
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"weights: train rank {remote.rank} was not read within {timeout:.0f} s (trainer.deadlines.publish)"
                )
            time.sleep(POLL_S)
        nixl_agent().release_xfer_handle(transfer)
        nixl_agent().deregister_memory(registered)
    return buffers


def _begin(remote: Remote, memory: NixlMemory, buffer: "torch.Tensor") -> tuple[Any, Any]:
    """A transfer that is on its way, and the registration of the buffer it fills."""
    agent = nixl_agent()
    try:
        _introduce(memory.agent, memory.metadata)
        registered = agent.register_memory(buffer)
        here = (buffer.data_ptr(), remote.nbytes, max(buffer.get_device(), 0))
        there = (memory.address + remote.offset, remote.nbytes, memory.device)
        transfer = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs([here], mem_type=MEMORY[buffer.device.type]),
            agent.get_xfer_descs([there], mem_type=memory.kind),
            memory.agent,
            b"",
        )
        agent.transfer(transfer)
    except Exception as error:
        raise PeerDied(_broken(remote, repr(error))) from error
    return transfer, registered


def _state(remote: Remote, transfer: Any) -> str:
    try:
        return nixl_agent().check_xfer_state(transfer)
    except Exception as error:
        raise PeerDied(_broken(remote, repr(error))) from error


def _broken(remote: Remote, error: str) -> str:
    return f"weights: the memory of train rank {remote.rank} cannot be read ({error})"
