"""Saving of a sharded model as safetensors files, without the whole model in the memory of one process.

    gather one block's tensors ─► give them the names of the checkpoint ─► collect ─► write a file when it is full

At any time rank 0 holds only the tensors of one transformer block and of one file.
"""

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.models.lora import published
from pipeline.models.mesh import PipelineStage
from pipeline.models.state import is_weight

FILE_BYTES = 2 * 2**30
"""Most bytes of a file of weights, unless a single tensor has more."""


WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""Pattern of the names of files of weights, and of their index, in a saved model's folder."""


def partial_of(folder: Path) -> Path:
    """Return a new, hidden path in the parent of `folder`, for a file or folder that will replace `folder` when it is
    complete."""
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")


@contextmanager
def written_whole(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a new temporary folder next to `folder`. After the block it is renamed to `folder` (`take_place`).

    If the block or the renaming fails, the temporary folder is deleted. So `folder` never has half of its files.

    Args:
        folder: final path.
        replace: whether `folder` may hold an older save, which is deleted.

    Raises OSError if the folder cannot be written.
    """
    from safetensors import SafetensorError

    folder = Path(os.path.realpath(folder))
    partial = partial_of(folder)
    try:
        partial.mkdir(parents=True)
        yield partial
        readable(partial)
        take_place(partial, folder, replace)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, SafetensorError):
            raise OSError(f"{folder} could not be written: {error}") from error
        raise


def readable(folder: Path) -> None:
    """Give files of weights, which safetensors lets only their owner read, the mode of any new file (the umask)."""
    made = folder / f"{uuid.uuid4().hex}.mode"
    made.touch()
    mode = made.stat().st_mode & 0o777
    made.unlink()
    for file in folder.rglob("*.safetensors"):
        file.chmod(mode)


def join(partial: Path, folder: Path) -> None:
    """Move the files of a complete model into `folder`, in which other files stay; `config.json`, by which a folder is
    a model, comes last. Remains of an interrupted `join` are replaced.

    Raises OSError if `folder` holds a model, or cannot be written.
    """
    if (folder / "config.json").exists():
        raise FileExistsError(errno.EEXIST, "it holds a model")
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        shutil.move(path, target)
    partial.rmdir()


def take_place(partial: Path, folder: Path, replace: bool) -> None:
    """Rename the complete folder `partial` to `folder`.

    Args:
        partial: folder with all files.
        folder: final path.
        replace: whether `folder` may hold an older save. Its files of weights, and files that `partial` has too, are
            deleted; all other files stay. Without `replace`, `folder` must be missing or empty.

    Raises OSError if `partial` cannot be renamed.
    """
    old = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.old")
    if replace and folder.exists():
        folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        # An empty folder at which another disk is mounted cannot be replaced by a rename.
        if replace or not folder.is_dir() or any(folder.iterdir()):
            raise
        join(partial, folder)
    if old.exists():
        for path in old.iterdir():
            if not (folder / path.name).exists() and not WEIGHTS.fullmatch(path.name):
                path.rename(folder / path.name)
        shutil.rmtree(old, ignore_errors=True)


def gathered_blocks(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of `lora.published`, unsharded, in CPU memory, one transformer block at a time; a collective.

    Each block is a dict of name to tensor. A tied parameter comes once, under its first name. Only rank 0 gets the
    tensors: the blocks of other ranks are empty, or missing.

    Args:
        model: sharded or not, or a stage of a pipeline; rank 0 gets the tensors of all stages.
        dtype: type to which parameters are converted; None keeps their type. Buffers always keep their type.
    """
    if own := getattr(model, "blocks", None):
        yield from own(dtype)
        return
    stage: PipelineStage = getattr(model, "stage", PipelineStage())
    rank = dist.get_rank() if dist.is_initialized() else 0
    if stage.count == 1:
        yield from _gathered(model, rank == 0, dtype)
        return
    size = dist.get_world_size() // stage.count
    for number in range(stage.count):
        if number == stage.number:
            for block in _gathered(model, rank == number * size, dtype):
                if number == 0:
                    yield block
                elif rank == number * size:
                    send([*block.items()])
            if number > 0 and rank == number * size:
                send(None)
        elif rank == 0:
            while (named := receive(number * size)) is not None:
                yield dict(named)


def send(named: Sequence[tuple[Any, Tensor]] | None) -> None:
    """Send tensors on the CPU, each with a name or another description, to rank 0, which must call `receive`; None
    after the last call."""
    described = None if named is None else [(name, tensor.to("meta")) for name, tensor in named]
    dist.send_object_list([described], dst=0)
    for _, tensor in named or ():
        dist.send(tensor.contiguous(), dst=0)


def receive(source: int) -> list[tuple[Any, Tensor]] | None:
    """Return what the rank `source` sends by `send`."""
    described: list[Any] = [None]
    dist.recv_object_list(described, src=source)
    if described[0] is None:
        return None
    named = [(name, torch.empty_like(tensor, device="cpu")) for name, tensor in described[0]]
    for _, tensor in named:
        dist.recv(tensor, src=source)
    return named


def _gathered(model: nn.Module, keep: bool, dtype: torch.dtype | None) -> Iterator[dict[str, Tensor]]:
    """Yield the blocks of this rank's stage, or of the whole model; with tensors if `keep`."""
    block: dict[str, Tensor] = {}
    place: str | None = ""
    for name, tensor in published(model):
        found = re.match(r".*?\.\d+\.", name)
        if block and (found is None or found[0] != place):
            yield block
            block = {}
        place = found[0] if found else None
        tensor = tensor.detach().to(dtype if dtype and is_weight(tensor) else tensor.dtype)
        # One tensor at a time is gathered, to save memory.
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            block[name] = whole.to("cpu", copy=True)
        del whole
    yield block


class WeightWriter:
    """Writer of the safetensors files in a model's folder, one file after the other.

    Args:
        lm: model of `transformers`, which knows the names of its weights in checkpoints.
        folder: a folder without weights.
    """

    def __init__(self, lm: Any, folder: Path):
        self._lm, self._folder = lm, folder
        self._open: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self._bytes = 0

    def add(self, block: dict[str, Tensor]) -> None:
        """Add tensors; each time `FILE_BYTES` are reached, a file is written.

        Args:
            block: name in `lm` to unsharded tensor.

        Raises OSError if a file cannot be written.
        """
        from transformers.core_model_loading import revert_weight_conversion

        for name, tensor in revert_weight_conversion(self._lm, block).items():
            size = tensor.numel() * tensor.element_size()
            if self._open and sum(t.numel() * t.element_size() for t in self._open.values()) + size > FILE_BYTES:
                self._write()
            self._open[name] = tensor.contiguous()
            self._bytes += size

    def finish(self) -> None:
        """Write the last file, and the index if there are several files. Raises OSError if that fails."""
        if self._open:
            self._write()
        count = len(self._written)
        if count == 1:
            self._file(1).rename(self._folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for number, names in enumerate(self._written, 1):
            final = f"model-{number:05}-of-{count:05}.safetensors"
            self._file(number).rename(self._folder / final)
            places |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": places}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self._written.append(list(self._open))
        try:
            save_file(self._open, self._file(len(self._written)), metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        self._open = {}

    def _file(self, number: int) -> Path:
        return self._folder / f"part-{number:05}.safetensors"
