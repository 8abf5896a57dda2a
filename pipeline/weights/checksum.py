"""The checksum of a bucket of weights: equal on every device, and not much slower than reading the bytes.

A bucket is divided into blocks of `ROWS` rows of `COLUMNS` integers of 64 bits; the last block is filled with zeros.
The checksum is the CRC-32 of the sums of all columns and of all rows of every block, modulo 2^64, with the bucket's
length as the start value. One, two or three wrong integers in a block always change a sum: to go unnoticed, four of
them must lie in the corners of a rectangle, with errors that cancel out. Integers or rows that were exchanged also
change a sum. A CRC-32 of the bytes themselves takes several times as long on a CPU, and cannot be computed on a GPU.
"""

import zlib
from typing import Any

import numpy as np

COLUMNS, ROWS = 1024, 64
"""Integers per row and rows per block. A block of 512 KiB is still in the CPU's cache when it is read a second time."""
BLOCK = COLUMNS * ROWS * 8
"""Number of bytes of a block."""


def crc(buffer: Any) -> int:
    """Compute the 32-bit checksum of a bucket.

    Args:
        buffer: [B] uint8, host memory or a tensor; a tensor stays on its device.
    """
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
