"""Texts for the page of settings: the docstring under each field, and the default of each field as text."""

import ast
import inspect
import textwrap
import types
import typing
from typing import Any

from pipeline.config.schema import Key


def descriptions(schema: type) -> dict[str, str]:
    """Return the docstring under each field of the dataclass `schema`, by field name, with inherited fields.

    Raises:
        ValueError: a field has no docstring. Only fields that hold a section (`...Config`) need none.
    """
    texts: dict[str, str] = {}
    for part in reversed(schema.__mro__[:-1]):
        texts |= _own_descriptions(part)
    missing = [name for name, text in texts.items() if not text]
    if missing:
        raise ValueError(f"{schema.__name__}: no docstring under {', '.join(missing)}")
    return texts


def _own_descriptions(schema: type) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    texts: dict[str, str] = {}
    name = None
    for node in typing.cast(ast.ClassDef, body).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            if not ast.unparse(node.annotation).endswith("Config"):
                texts[name] = ""
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts[name] = " ".join(str(node.value.value).split())
            name = None
    return texts


def default(key: Key) -> str:
    """Format the default of a setting as in YAML, in backticks. A null default is followed by the types of other
    values."""
    value = key.default
    if value is None:
        others = [kind for kind in typing.get_args(key.type) if kind is not types.NoneType]
        return f"`null` ({', '.join(type_name(kind) for kind in others)})" if others else "`null`"
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, tuple | list):
        text = f"[{', '.join(str(entry) for entry in value)}]"
    elif isinstance(value, float) and 0 < value < 1e-3:
        text = f"{value:g}"
    else:
        text = str(float(value) if key.type is float else value)
    return f"`{text}`"


def type_name(kind: Any) -> str:
    """Format a type as in Python: `list[str]`."""
    return str(kind).replace("typing.", "") if isinstance(kind, types.GenericAlias) else kind.__name__
