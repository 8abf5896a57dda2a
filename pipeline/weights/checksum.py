"""The checksum of a bucket of weights: the same on every device, and not much slower than reading the bytes.

A bucket is cut into blocks of `ROWS` rows of `COLUMNS` numbers of 64 bits; zeros fill the last one. The checksum is the
CRC-32 of the sums of all columns and of all rows of every block, modulo 2^64, and starts from the bucket's length. One,
two or three wrong numbers in a block always change a sum: four would have to stand in the corners of a rectangle, and
their errors cancel out. So do numbers and rows that have changed places. A CRC-32 of the bytes themselves takes a CPU
several times as long, and a GPU cannot compute it.
"""

import zlib
from typing import Any

import numpy as np

COLUMNS, ROWS = 1024, 64
"""A block is of 512 KiB: it still is in a CPU's cache when it is read for the second time."""
BLOCK = COLUMNS * ROWS * 8
"""Bytes of a block."""


def crc(buffer: Any) -> int:
    """Compute a 32-bit checksum of a bucket [B] uint8: host memory, or a tensor, which stays on its device."""
    import torch

    if isinstance(buffer, torch.Tensor) and buffer.device.type != "cpu":
        sums = _device_sums(buffer)
    else:
        sums = _host_sums(np.frombuffer(buffer.numpy() if isinstance(buffer, torch.Tensor) else buffer, dtype=np.uint8))
    return zlib.crc32(b"".join(part.tobytes() for part in sums), len(buffer) & 0xFFFFFFFF)


def _host_sums(data: np.ndarray) -> list[np.ndarray]:
    whole = len(data) // BLOCK * BLOCK
    blocks = list(data[:whole].view(np.int64).reshape(-1, ROWS, COLUMNS))
    if whole < len(data):
        last = np.zeros(BLOCK, dtype=np.uint8)
        last[: len(data) - whole] = data[whole:]
        blocks.append(last.view(np.int64).reshape(ROWS, COLUMNS))
    # One block after the other: both sums of a block while it is in the cache.
    sums = [(block.sum(0), block.sum(1)) for block in blocks]
    return [columns for columns, _ in sums] + [rows for _, rows in sums]


def _device_sums(data: Any) -> list[np.ndarray]:
    import torch
    from torch.nn.functional import pad

    whole = len(data) // BLOCK * BLOCK
    parts = [data[:whole], pad(data[whole:], (0, -(len(data) - whole) % BLOCK))]
    # A view as longer numbers has to begin at a multiple of their size.
    blocks = [
        (p if p.storage_offset() % 8 == 0 else p.clone()).view(torch.int64).view(-1, ROWS, COLUMNS) for p in parts
    ]
    return [block.sum(dim).cpu().numpy() for dim in (1, 2) for block in blocks]
