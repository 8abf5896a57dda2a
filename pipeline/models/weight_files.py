"""The files in a model's folder that hold its weights, and the files that do not.

    transformers_weights of config.json > model.safetensors > its index > pytorch_model.bin > its index

1. The first of these that exists is the model, as in `transformers`; an index stands for the files that it lists. All
   other files of weights are not read: a second set of weights, old shards, an adapter.
2. From a folder without an index vLLM would read every safetensors file, and `transformers` would load an adapter that
   lies next to the model. So readers of a folder with such files get a temporary folder of links to the right files
   (`alone`), and trainer and engines have the same weights.
3. `.bin` files are pickles. This module, `transformers` and vLLM read them with `weights_only`, so no code runs.
"""

import functools
import json
import os
import re
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config.paths import HUB_NAME
from pipeline.errors import short_reason

CONFIG, EXPLICIT = "config.json", "transformers_weights"
SAFETENSORS, PYTORCH = ".safetensors", ".bin"
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of files that may hold a model's weights, in the order in which `transformers` looks for them."""
SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
FOREIGN = {
    ".gguf": "GGUF",
    ".pth": "PyTorch's, in the names of the model's author",
    ".pt": "PyTorch's, in the names of the model's author",
    ".ckpt": "PyTorch Lightning's",
    ".h5": "TensorFlow's",
    ".msgpack": "Flax's",
    ".onnx": "ONNX",
    ".npz": "NumPy's",
}
"""Ending of files of weights that are not read, to the name of their format."""
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""Beginnings of names of files that a trainer wrote, which end like files of weights but are not."""
LFS = b"version https://git-lfs"
CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{}', weights_only=False).save_pretrained('NEW')\""
)
"""Command for the user that converts a pickle to safetensors; it runs code in the pickle."""


@dataclass(frozen=True)
class WeightFiles:
    """The files of weights in a folder."""

    files: tuple[Path, ...]
    """Files that hold the model, sorted by name; empty if the folder has no readable weights."""
    others: tuple[str, ...]
    """Names of all other files of weights, which a library could read by mistake, and of an adapter's files."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Tensor name to file name, from the index; empty without an index."""

    @property
    def adapter(self) -> bool:
        """True if an adapter lies next to the model."""
        return not set(ADAPTER).isdisjoint(self.others)

    @property
    def mislead_engines(self) -> bool:
        """True if vLLM would read wrong files: it reads all files with the same ending, or all of an index."""
        if self.places and all(place.endswith(SAFETENSORS) for place in self.places.values()):
            return any(name.startswith("consolidated") and name.endswith(SAFETENSORS) for name in self.others)
        endings = (
            (SAFETENSORS, NAMES[1]) if self.files and self.files[0].suffix == SAFETENSORS else (SAFETENSORS, PYTORCH)
        )
        return bool(self.files) and any(name.endswith(endings) for name in self.others)


def find_weights(folder: Path) -> WeightFiles:
    """Find the files of weights in `folder`. Only `config.json` and indexes are read, no weights.

    Raises:
        ValueError: an index is damaged, or a file that it or `config.json` names is missing.
    """
    explicit = read_json(folder / CONFIG).get(EXPLICIT) if (folder / CONFIG).is_file() else None
    names = (str(explicit),) if explicit else NAMES
    chosen = next((name for name in names if (folder / name).is_file()), None)
    dangling = [name for name in names if (folder / name).is_symlink() and not (folder / name).exists()]
    # Another set would be read in silence if a link of the first one leads nowhere.
    if dangling and (chosen is None or names.index(dangling[0]) < names.index(chosen)):
        raise ValueError(f"{folder / dangling[0]} is a link to a file that is not there; download the model again")
    if chosen is None and explicit:
        raise ValueError(f"{folder / CONFIG} names {explicit} ({EXPLICIT}), which is not there; download it")
    places = _indexed(folder / chosen) if chosen and chosen.endswith(".json") else {}
    files = sorted(set(places.values())) or ([chosen] if chosen else [])
    kept = {*files, chosen}
    others = [
        file.name
        for file in sorted(folder.iterdir())
        if file.name not in kept and not file.name.startswith((*NO_WEIGHTS, "."))
        if file.name.endswith((SAFETENSORS, PYTORCH, *FOREIGN, f"{SAFETENSORS}.index.json", f"{PYTORCH}.index.json"))
        or file.name in ADAPTER
    ]
    return WeightFiles(tuple(folder / name for name in files), tuple(others), places)


def model_files(path: str | Path | None) -> Path | None:
    """Return the local folder of the model at `path`, a folder or a Hub name; None if it has no `config.json` here.

    For a Hub name this is the folder in the Hub's cache, which may hold only some of the model's files.
    """
    folder = Path(path or "")
    if path and (folder / CONFIG).is_file():
        return folder
    if not path or folder.exists() or not HUB_NAME.fullmatch(str(path)):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(str(path), CONFIG)
    return Path(found).parent if isinstance(found, str) else None


def read_config(path: str | None) -> dict[str, Any]:
    """Read `config.json` of the model at `path`, a folder or a Hub name; {} if the file is not on this machine.

    Raises:
        ValueError: see `read_json`.
    """
    folder = model_files(path)
    return read_json(folder / CONFIG) if folder else {}


def _indexed(index: Path) -> dict[str, str]:
    content = read_json(index)
    places = content.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{index} has no weight_map of names and files; download it again")
    files = sorted(set(places.values()))
    if "metadata" not in content:
        raise ValueError(f'{index} has no metadata, which transformers needs; add "metadata": {{}}')
    if missing := [name for name in files if not (index.parent / name).is_file()]:
        raise ValueError(
            f"{index} names {len(files)} files, and {len(missing)} of them are not there, the first {missing[0]}; "
            "download the model again"
        )
    return places


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: the file is not valid JSON, or holds something other than an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        if file.read_bytes().startswith(LFS):
            raise ValueError(f"{file} {_POINTER}") from error
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} is not an object of settings; give the folder of a complete model")
    return value


_POINTER = "is a pointer of Git LFS and not the file itself; run git lfs pull in its folder"


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return tensor name to shape, for a safetensors or PyTorch file, without reading the tensors' data.

    Raises:
        ValueError: the file is damaged, is not a file of weights, or could run code.
    """
    status = file.stat()
    return _shapes(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _shapes(file: Path, _changed: int, size: int) -> dict[str, tuple[int, ...]]:
    # Mixtures of experts have thousands of tensors, and several parts of a plan ask for them.
    with file.open("rb") as opened:
        if opened.read(len(LFS)) == LFS:
            raise ValueError(f"{file} {_POINTER}")
    if not size:
        raise ValueError(f"{file} is empty; download it again")
    return _pickled(file) if file.suffix == PYTORCH else _safe(file)


def _safe(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a complete safetensors file: {error}; save or download it again") from error


def _pickled(file: Path) -> dict[str, tuple[int, ...]]:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Files of old versions cannot be mapped.
            state = torch.load(file, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(file))
        # Tied weights have two names and one place.
        places = {name: (tensor.untyped_storage()._cdata, tensor.storage_offset()) for name, tensor in state.items()}
        once = {place: name for name, place in reversed(places.items())}
        return {name: tuple(tensor.shape) for name, tensor in state.items() if once[places[name]] == name}
    # A reader raises its own errors for damaged files.
    except Exception as error:
        raise ValueError(
            f"{file} cannot be read as pure tensors (weights_only): {short_reason(error)}; download it again or, if "
            f"you trust its author, convert it: {CONVERT.format(file.parent)}"
        ) from error


def model_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return tensor name to shape, for all tensors of the model in `folder`; {} without weights.

    Raises:
        ValueError: see `find_weights` and `tensor_shapes`.
    """
    return {name: shape for file in find_weights(folder).files for name, shape in tensor_shapes(file).items()}


def check_weights(folder: Path, key: str) -> None:
    """Check that `folder` holds the weights of a model in a readable format.

    Args:
        folder: the model's folder.
        key: name of the setting, for the error.

    Raises ValueError if it does not.
    """
    found = find_weights(folder)
    model_shapes(folder)
    if found.files:
        return
    there = ""
    if found.others:
        kinds = {FOREIGN[ending] for name in found.others if (ending := Path(name).suffix) in FOREIGN}
        formats = f", in a format that is not read ({', '.join(sorted(kinds))})" if kinds else ""
        there = f"; it holds {', '.join(found.others[:4])}{formats}"
    if any(SHARD.fullmatch(name) for name in found.others):
        there += f", shards without their index ({NAMES[1]})"
    if found.adapter:
        there += "; this is only an adapter: name its base, and the adapter with model.lora.path"
    elif (folder / "original").is_dir():
        there += "; the weights in its folder original/ are in the names of the model's author"
    raise ValueError(
        f"{key}={folder} has no weights (*.safetensors or pytorch_model.bin){there}; give a complete model folder"
    )


def note(folder: Path, model: str) -> str:
    """Return a sentence on files of weights in `folder` that are not read; "" if there are none.

    Args:
        folder: the model's folder.
        model: name of the folder in the sentence.

    Raises ValueError as `find_weights` does.
    """
    found = find_weights(folder)
    if not found.files or not found.others:
        return ""
    read = found.files[0].name if len(found.files) == 1 else f"the {len(found.files)} files of its index"
    sets = [name for name in found.others if name not in ADAPTER]
    adapters = [name for name in found.others if name in ADAPTER]
    parts = []
    if sets:
        more = f" and {len(sets) - 3} more" if len(sets) > 3 else ""
        parts.append(f"{model} also holds {', '.join(sets[:3])}{more}, not read: the model is {read}")
    if adapters:
        parts.append(
            f"{model} also holds an adapter ({' and '.join(adapters)}), not loaded: model.lora.path starts from one"
        )
    return "; ".join(parts)


@contextmanager
def alone(folder: str | Path) -> Iterator[str]:
    """Yield a folder from which every library reads the model's weights and nothing else.

    If `folder` also holds other files of weights, this is a temporary folder of links without them, which exists while
    the block runs. Otherwise it is `folder` itself, also for a Hub name.

    Raises ValueError as `find_weights` does.
    """
    found = find_weights(Path(folder)) if Path(folder).is_dir() else None
    if found is None or not found.others or not found.files:
        yield str(folder)
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-model-") as links:
        for file in sorted(Path(folder).absolute().iterdir()):
            if file.name not in found.others:
                os.symlink(file, Path(links) / file.name)
        yield links
