"""Weight sync without the object store: engines read weights directly from train workers (`weight_transport=nixl`).

A train worker keeps a copy of its shard for every version that may still be fetched (`PublishedMemory`), and publishes
the memory addresses of the buckets. Engines `read` the buckets with NIXL's one-sided reads, over any link that UCX
finds: NVLink, InfiniBand, shared memory, TCP. The train worker takes no part in a read and continues to compute. On
GPUs, neither the transfer nor the checksum (`checksum.py`) needs to copy the bytes to host memory.
"""

import functools
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import PeerDied

if TYPE_CHECKING:
    import torch

MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
"""torch's device type to NIXL's name for the memory of such devices."""
POLL_S = 0.001
ALIGNED = 8
"""Alignment of buckets in bytes: the size of the largest dtype."""


@dataclass(frozen=True)
class RemoteBuffer:
    """Address of a bucket in a train worker's memory that NIXL has registered. With `nbytes=0` only `rank` is set."""

    rank: int
    nbytes: int
    address: int = 0
    kind: str = ""
    device: int = 0
    agent: str = ""
    metadata: bytes = b""
    """NIXL's description of the agent, which another agent needs to connect to it."""


@functools.cache
def nixl_agent() -> Any:
    """Return this process's NIXL agent.

    Raises:
        ImportError: NIXL is not installed.
    """
    # Without a bound UCX may keep unregistered memory; vLLM sets the same one for its own transfers.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ImportError(
            f"trainer.weight_transport=nixl needs the Python package nixl on every node, and it cannot be imported "
            f"here ({error}): pip install nixl"
        ) from error
    return nixl_agent(f"weights-{uuid.uuid4()}", nixl_agent_config(backends=["UCX"]))


class PublishedMemory:
    """Memory with copies of one rank's weights of the last `versions` versions, which engines may read.

    The memory is allocated and registered once, in as many slots as versions, which are written in turn. Engines cannot
    read the parameters themselves, because the next optimiser step changes them.

    With `max_staleness + 2` slots no version is overwritten while it is needed. Version `v + max_staleness + 2` is
    trained on rows whose generation begins with version `v + 1` or newer. So when it overwrites `v`, a newer version is
    current, the validation of `v` is over, and the rows for which `v` was admitted have been generated. Only an engine
    that is still loading `v`, for rows that the run no longer waits for, could read a mixture of both, and the checksum
    detects this.

    Args:
        rank: rank of this process.
        versions: number of slots.
        device: device of the memory.

    Raises:
        ImportError: NIXL is not installed.
    """

    def __init__(self, rank: int, versions: int, device: "torch.device") -> None:
        self._rank, self._versions, self._device = rank, versions, device
        self._bytes: torch.Tensor | None = None
        self._metadata = b""
        self._next = 0
        nixl_agent()

    def begin(self, version: int, nbytes: int) -> None:
        """Begin to write a version, over the oldest one.

        Args:
            version: number of the version.
            nbytes: number of bytes of all its buckets, each rounded up to a multiple of `ALIGNED`; the same for all
                versions.
        """
        import torch

        if self._bytes is None:
            self._bytes = torch.empty(self._versions * nbytes, dtype=torch.uint8, device=self._device)
            if nbytes:
                self._metadata = self._register(self._bytes)
        self._next = version % self._versions * nbytes

    def empty(self, nbytes: int) -> "torch.Tensor":
        """[nbytes] uint8, memory for the next bucket."""
        assert self._bytes is not None
        start = self._next
        self._next += -(-nbytes // ALIGNED) * ALIGNED
        return self._bytes[start : start + nbytes]

    def put(self, bucket: "torch.Tensor") -> RemoteBuffer:
        """Return the address of a bucket, for engines. The bucket is from `empty`, and must be filled already."""
        if not len(bucket):
            return RemoteBuffer(self._rank, 0)
        kind, device = MEMORY[bucket.device.type], max(bucket.get_device(), 0)
        return RemoteBuffer(self._rank, len(bucket), bucket.data_ptr(), kind, device, nixl_agent().name, self._metadata)

    def _register(self, data: "torch.Tensor") -> bytes:
        try:
            nixl_agent().register_memory(data)
            return bytes(nixl_agent().get_agent_metadata())
        except Exception as error:
            raise RuntimeError(
                f"train rank {self._rank}: NIXL cannot register {data.nbytes} bytes of {data.device} for "
                f"trainer.weight_transport=nixl ({error!r}); set UCX_LOG_LEVEL=debug in trainer.env_vars to see more"
            ) from error


def read(remotes: Sequence[RemoteBuffer], device: Any, timeout: float) -> list["torch.Tensor"]:
    """Read buckets from the memory of train workers. Returns each as a tensor [nbytes] uint8 on `device`.

    Args:
        remotes: addresses of the buckets.
        device: device to read to.
        timeout: seconds that all reads together may take.

    Raises:
        TimeoutError: the reads took longer.
        PeerDied: a train worker cannot be read, most likely because it has died.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        # The queue may still hold work on the bytes of the last read, whose memory is used again.
        torch.cuda.synchronize(device)
    buffers = [torch.empty(remote.nbytes, dtype=torch.uint8, device=device) for remote in remotes]
    deadline = time.monotonic() + timeout
    running = []
    for remote, buffer in zip(remotes, buffers, strict=True):
        if remote.nbytes:
            with _reading(remote):
                running.append((remote, *_begin(remote, buffer)))
    # A read that fails ends the engine, and its process releases what is registered by then.
    for remote, transfer, registered in running:
        while not _is_done(remote, transfer):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"weights: train rank {remote.rank} was not read within {timeout:.0f} s (trainer.deadlines.publish)"
                )
            time.sleep(POLL_S)
        nixl_agent().release_xfer_handle(transfer)
        nixl_agent().deregister_memory(registered)
    return buffers


def _begin(remote: RemoteBuffer, buffer: "torch.Tensor") -> tuple[Any, Any]:
    """Start to read `remote` into `buffer`. Returns NIXL's handle of the transfer, and the registration of `buffer`."""
    agent = nixl_agent()
    _introduce(remote.agent, remote.metadata)
    registered = agent.register_memory(buffer)
    here = (buffer.data_ptr(), remote.nbytes, max(buffer.get_device(), 0))
    there = (remote.address, remote.nbytes, remote.device)
    transfer = agent.initialize_xfer(
        "READ",
        agent.get_xfer_descs([here], mem_type=MEMORY[buffer.device.type]),
        agent.get_xfer_descs([there], mem_type=remote.kind),
        remote.agent,
        b"",
    )
    agent.transfer(transfer)
    return transfer, registered


@functools.cache
def _introduce(agent: str, metadata: bytes) -> None:
    nixl_agent().add_remote_agent(metadata)


def _is_done(remote: RemoteBuffer, transfer: Any) -> bool:
    with _reading(remote):
        state = nixl_agent().check_xfer_state(transfer)
        if state == "ERR":
            raise RuntimeError("the transfer failed")
    return bool(state == "DONE")


@contextmanager
def _reading(remote: RemoteBuffer) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PeerDied(f"weights: the memory of train rank {remote.rank} cannot be read ({error!r})") from error
