"""Check names in `rollout.engine_kwargs` against vLLM's `EngineArgs`.

The names are read from vLLM's source file, since importing vLLM takes many seconds.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.errors import nearest

FILE = "engine/arg_utils.py"


def problems(names: Iterable[str]) -> Iterator[str]:
    """Yield one sentence per name in `names` that is not a field of vLLM's `EngineArgs`."""
    known = engine_arguments()
    for name in names:
        if known and name not in known:
            yield (
                f"rollout.engine_kwargs.{name} is not an argument of vLLM's EngineArgs{nearest(name, known)}; leave it "
                "out, or write the name of one"
            )


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
