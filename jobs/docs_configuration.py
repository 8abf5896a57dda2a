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

from pipeline.check_algorithm import COMPARE_IN_GROUP, NEED_NO_GROUP, POLICY_LOSSES
from pipeline.checks import CHOICES
from pipeline.config import CONFIG_DIR, Config
from pipeline.prompts.sampler import SAMPLERS
from pipeline.schema import Key, keys

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

<!-- Written by `make docs` from the dataclasses; edit the docstrings there. -->

Settings are read in this order, later ones winning: the defaults below, `configs/train.yaml`, the chosen experiment
(`experiment=countdown_cpu` takes `configs/experiment/countdown_cpu.yaml`), the chosen algorithm (`algorithm=dapo` takes
`configs/algorithm/dapo.yaml`), then arguments such as `actor.optim.lr=1e-5`. A list is written
`trainer.logger=[console,mlflow]`, a value with special characters in quotes: `'model.path="/models/a=b"'`. Keys whose
type is a mapping take any name inside: `rollout.engine_kwargs.max_model_len=2048`.

An unknown key is refused with the nearest valid one, an impossible combination with the arithmetic.
`python -m jobs.train --dry-run ...` prints what the settings amount to and exits. Experiments and algorithms of your
own live in any folder: `--config-dir DIR` searches `DIR/experiment/` and `DIR/algorithm/` besides the packaged ones.

## Algorithms

`algorithm=NAME` sets the estimator, the loss and what belongs to them, and leaves the other keys alone; one can be laid
on top of another, `algorithm=[dapo,tis]`. An experiment names the one it begins from with
`defaults: [/algorithm/dapo, _self_]`.
"""

BUILT_IN = {
    "algorithm.adv_estimator": (*NEED_NO_GROUP, *COMPARE_IN_GROUP),
    "actor.policy_loss.loss_mode": POLICY_LOSSES,
    "data.sampler": tuple(SAMPLERS),
}
"""Keys that take a name or an import path: the names there are."""


def descriptions(schema: type) -> dict[str, str]:
    """The docstring under each field of the dataclass `schema`, inherited ones included, by field name.

    Raises:
        ValueError: a field has none.
    """
    found: dict[str, str] = {}
    for part in reversed(schema.__mro__[:-1]):
        found |= _own_descriptions(part)
    missing = [name for name, text in found.items() if not text]
    if missing:
        raise ValueError(f"{schema.__name__}: no docstring under {', '.join(missing)}")
    return found


def _own_descriptions(schema: type) -> dict[str, str]:
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
    return found


def algorithms() -> list[str]:
    """One row for each file of `configs/algorithm`: its name and the comment it begins with."""
    rows = ["| name | what it is |", "|---|---|"]
    for path in sorted(CONFIG_DIR.glob("algorithm/*.yaml")):
        comment = []
        for line in path.read_text(encoding="utf-8").splitlines()[1:]:
            if not line.startswith("#"):
                break
            comment.append(line.removeprefix("#").strip())
        rows.append(f"| `{path.stem}` | {' '.join(comment)} |")
    return rows


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
    sections: dict[str, list[Key]] = {}
    for key in keys(Config).values():
        sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    lines = [HEAD, *algorithms()]
    for section, members in sections.items():
        lines += [f"\n## `{section}`\n", f"{inspect.getdoc(members[0].owner)}\n", "| key | type | default | meaning |"]
        lines += ["|---|---|---|---|", *map(_row, members)]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    text = descriptions(key.owner)[key.name.rpartition(".")[2]]
    names = BUILT_IN.get(key.name, ())
    if names:
        text += f" Built in are {', '.join(f'`{name}`' for name in names)}."
    if key.name in CHOICES and not all(f"`{choice}`" in text for choice in CHOICES[key.name] if choice):
        listed = ", ".join("null" if choice is None else f"`{choice}`" for choice in CHOICES[key.name])
        text += f" One of {listed}."
    cells = (f"`{key.name}`", f"`{type_name(key.type)}`", f"`{default(key)}`", text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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
