"""Folders of models as people bring them, made of a complete one."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WHOLE = "model.safetensors"


def copied(model: Path, folder: Path, weights: bool = True) -> Path:
    """A copy of `model` in `folder`, with or without its weights."""
    shutil.copytree(model, folder)
    if not weights:
        (folder / WHOLE).unlink()
    return folder


def state_of(model: Path) -> dict[str, Tensor]:
    """All tensors of `model`."""
    return load_file(model / WHOLE)


def configured(folder: Path, **entries: Any) -> Path:
    """`folder`, with entries laid over its `config.json`."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


def in_shards(folder: Path, state: dict[str, Tensor], ending: str = "safetensors", **index: Any) -> Path:
    """`folder` with `state` in two files and their index, over whose map the entries `index` are laid."""
    stem = "model" if ending == "safetensors" else "pytorch_model"
    places = {}
    for number in (1, 2):
        part = {name: state[name] for name in sorted(state)[number - 1 :: 2]}
        file = f"{stem}-0000{number}-of-00002.{ending}"
        if ending == "safetensors":
            save_file(part, folder / file, {"format": "pt"})
        else:
            torch.save(part, folder / file)
        places |= dict.fromkeys(part, file)
    content = {"metadata": {}, "weight_map": places | index}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(content))
    return folder
