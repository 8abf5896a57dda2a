"""Loader of weights that runs in SGLang's process, in its environment (`--custom-weight-loader`).

SGLang imports this file by its folder, without the other packages of this project's environment. From the project it
imports only `pipeline.weights`, which needs nothing but torch.
"""

import sys
import types
from pathlib import Path
from typing import Any

if "pipeline" not in sys.modules:
    package = types.ModuleType("pipeline")
    package.__path__ = [str(Path(__file__).resolve().parents[4])]
    sys.modules["pipeline"] = package

from pipeline.weights import shared


def load(model: Any, named: Any) -> None:
    """Load a buffer into the model; the only tensor in `named` holds the bytes of the manifest."""
    ((_, manifest),) = named
    shared.load(model, bytes(manifest.cpu().tolist()))
