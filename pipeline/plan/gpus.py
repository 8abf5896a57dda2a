"""Kinds of GPUs with their memory and speed, from datasheets."""

import re
import shutil
import subprocess
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, with numbers from its datasheet."""

    name: str
    memory: int
    """Memory that torch reports, in bytes."""
    flops: float | None
    """Dense bfloat16 operations per second, a reference for `benchmarks/gpu`; None if not known."""

    @property
    def words(self) -> str:
        """Memory and name as text, such as `79 GiB (H100)`."""
        return f"{self.memory / GIB:.0f} GiB ({self.name})"


GPUS = {
    name: Gpu(name, round(gib * GIB), tflops * 1e12)
    for name, gib, tflops in (
        ("A100", 79, 312),
        ("A100-40GB", 39.5, 312),
        ("H100", 79, 989),
        ("H200", 139, 989),
        ("B200", 178, 2250),
        ("L40S", 44.5, 362),
        ("L4", 22, 121),
    )
}
DEFAULT = "H100"
"""Name of the kind of GPU that the plan assumes on a machine without GPUs."""
PER_NODE = 8
"""Assumed number of GPUs per node; communication within a node is fast."""


def known(card: str) -> Gpu | None:
    """Return the kind of GPU for a name that the driver reports, such as `NVIDIA A100-SXM4-40GB`; None if it is not in
    `GPUS`."""
    fitting = [name for name in GPUS if all(re.search(rf"\b{part}\b", card) for part in name.split("-"))]
    return GPUS[max(fitting, key=len)] if fitting else None


def parse(text: str) -> tuple[int, Gpu]:
    """Read the number and the kind of GPUs from `8xH200`, or from `8`, which takes the kind of this machine's GPUs.

    Raises:
        ValueError: `text` has another form, or names an unknown kind.
    """
    number, times, name = text.partition("x")
    if not number.isascii() or not number.isdigit() or int(number) < 1:
        raise ValueError(f"--gpus {text} is not a number of GPUs; write 8, or with their kind 8xH200")
    if times and name not in GPUS:
        raise ValueError(f"--gpus {text} names an unknown kind of GPU; known are {', '.join(GPUS)}")
    return int(number), GPUS[name] if name else local_gpu() or GPUS[DEFAULT]


def local_gpu() -> Gpu | None:
    """Return the kind of this machine's first GPU, with the memory that its driver reports if that is less; None
    without a working driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return None
    name, _, mebibytes = answer.stdout.partition("\n")[0].rpartition(",")
    if answer.returncode or not mebibytes.strip().isdigit():
        return None
    memory = int(mebibytes) << 20
    kind = known(name)
    return replace(kind, memory=min(kind.memory, memory)) if kind else Gpu(name, memory, None)
