"""Names of the fields of vLLM's `EngineArgs`, read from its source file, since importing vLLM takes many seconds."""

import ast
import functools
import importlib.util
from pathlib import Path

FILE = "engine/arg_utils.py"


@functools.cache
def engine_arguments() -> tuple[str, ...]:
    """Return the names of the fields of vLLM's `EngineArgs`; empty if vLLM is not installed on this machine."""
    found = importlib.util.find_spec("vllm")
    places = found.submodule_search_locations if found else None
    file = Path(next(iter(places))) / FILE if places else None
    if file is None or not file.is_file():
        return ()
    classes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    fields = (node for found in classes if found.name == "EngineArgs" for node in found.body)
    return tuple(
        node.target.id for node in fields if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )
