"""Write `docs/configuration.md` from the dataclasses: `python -m jobs.docs_configuration [--check]`.

The docstring under each field is the only description of a key, so the page cannot say anything else than the code.
"""

import argparse
import ast
import inspect
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

from pipeline.checks import CHOICES
from pipeline.config import Config, Key, keys

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

<!-- Written by `make docs` from the dataclasses; edit the docstrings there. -->

Settings are read in this order, later ones winning: the defaults below, `configs/train.yaml`, the chosen experiment
(`experiment=countdown_cpu` takes `configs/experiment/countdown_cpu.yaml`), then arguments such as
`actor.optim.lr=1e-5`. A list is written `trainer.logger=[console,mlflow]`, a value with special characters in quotes:
`'model.path="/models/a=b"'`. Keys whose type is a mapping take any name inside:
`rollout.engine_kwargs.max_model_len=2048`.

An unknown key is refused with the nearest valid one, an impossible combination with the arithmetic.
`python -m jobs.train --dry-run ...` prints what the settings amount to and exits. Experiments of your own live in any
folder: `--config-dir DIR` searches `DIR/experiment/` besides the packaged ones.
"""


def descriptions(schema: type) -> dict[str, str]:
    """The docstring under each field of the dataclass `schema`, by field name.

    Raises:
        ValueError: a field has none.
    """
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    found: dict[str, str] = {}
    name = None
    for node in typing.cast(ast.ClassDef, body).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            found[name] = ""
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[name] = " ".join(str(node.value.value).split())
            name = None
    missing = [name for name, text in found.items() if not text]
    if missing:
        raise ValueError(f"{schema.__name__}: no docstring under {', '.join(missing)}")
    return found


def type_name(kind: Any) -> str:
    """The type as it is written in Python: `int | None`."""
    if isinstance(kind, types.GenericAlias | types.UnionType):
        return str(kind).replace("typing.", "")
    return "any" if kind is Any else kind.__name__


def default(key: Key) -> str:
    """The default as it is written in YAML."""
    value = key.default
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(str(entry) for entry in value)}]"
    return f"{value:g}" if isinstance(value, float) and value < 1e-3 else str(value)


def page() -> str:
    """The whole page as Markdown, one table per section."""
    lines, section, owner = [HEAD], None, None
    for key in keys(Config).values():
        if key.owner is not owner:
            section, owner = key.name.rpartition(".")[0], key.owner
            lines += [f"\n## `{section}`\n", f"{inspect.getdoc(owner)}\n", "| key | type | default | meaning |"]
            lines += ["|---|---|---|---|"]
        text = descriptions(key.owner)[key.name.rpartition(".")[2]]
        if key.name in CHOICES and not all(f"`{choice}`" in text for choice in CHOICES[key.name] if choice):
            listed = ", ".join("null" if choice is None else f"`{choice}`" for choice in CHOICES[key.name])
            text += f" One of {listed}."
        cells = (f"`{key.name}`", f"`{type_name(key.type)}`", f"`{default(key)}`", text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the page, or with `--check` say whether it is up to date; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.docs_configuration", description="Write the list of settings."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    if parser.parse_args(argv).check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
            return 0
        print(f"{PAGE.name} is out of date; run make docs", file=sys.stderr)
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
