"""A train worker's weights of the last versions, where engines read them by themselves (`pipeline/weights/direct.py`).

The memory is allocated and made known once, in as many parts as versions may still be read, which are written in turn.
The parameters themselves cannot be read: the next step changes them.

With `max_staleness + 2` parts a version stands until nobody needs it. Version `v + max_staleness + 2` is made of rows
that only version `v + 1` or a newer one may begin, so by the time it is written over `v`, `v` is no longer current, its
validation is over, and the rows that it was admitted for have been generated. Only an engine that has been loading `v`
all the time for rows that nobody waits for could read a mixture, which its checksum shows.
"""

import torch

from pipeline.weights.direct import MEMORY, NixlMemory, Remote, nixl_agent


class Outbox:
    """One model's weights on one rank.

    Args:
        rank: of this process.
        parts: versions that stand at a time.
        device: where they stand.

    Raises:
        ImportError: NIXL is not installed.
    """

    def __init__(self, rank: int, parts: int, device: torch.device) -> None:
        self._rank, self._parts, self._device = rank, parts, device
        self._whole: torch.Tensor | None = None
        self._part = self._filled = 0
        self._memory: NixlMemory | None = None
        nixl_agent()

    def begin(self, version: int, nbytes: int) -> None:
        """`version` takes the place of the oldest one.

        Args:
            version: its number.
            nbytes: of all buckets; the same for all versions.
        """
        if self._whole is None:
            self._whole = torch.empty(self._parts * nbytes, dtype=torch.uint8, device=self._device)
            if nbytes:
                self._memory = self._nixl(self._whole)
        self._part, self._filled = version % self._parts * nbytes, 0

    def empty(self, nbytes: int) -> torch.Tensor:
        """The place [nbytes] uint8 of the next bucket."""
        assert self._whole is not None
        start = self._part + self._filled
        self._filled += nbytes
        return self._whole[start : start + nbytes]

    def put(self, bucket: torch.Tensor) -> Remote:
        """Where a bucket stands whose bytes are written."""
        memory = self._memory if len(bucket) else None
        return Remote(self._rank, memory, int(bucket.storage_offset()), len(bucket))

    def _nixl(self, whole: torch.Tensor) -> NixlMemory:
        try:
            nixl_agent().register_memory(whole)
        except Exception as error:
            raise RuntimeError(
                f"train rank {self._rank}: NIXL cannot register {whole.nbytes} bytes of {whole.device} for "
                f"trainer.weight_transport=nixl ({error!r}); UCX_LOG_LEVEL=debug in trainer.env_vars says more"
            ) from error
        kind, device = MEMORY[whole.device.type], max(whole.get_device(), 0)
        return NixlMemory(nixl_agent().name, nixl_agent().get_agent_metadata(), whole.data_ptr(), kind, device)
