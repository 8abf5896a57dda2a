"""A check of model families: a tiny random model of each form goes through all steps of a run and an export.

    python -m benchmarks.families                                    # all forms, half a minute each
    python -m benchmarks.families --only gemma-2 phi-4-mini          # some of them
    python -m benchmarks.families --page docs/families.md            # writes the results so far into the page

A trial of a form, on CPUs in float32:

1. A model and its tokenizer are made (`family_forms.py`). The trainer loads them, and an engine starts, each in a
   process of its own (`family_sides.py`).
2. The engine generates rows that are longer than windows and original lengths of ropes, and the handshake compares.
3. One update and two changes of all weights by random amounts follow. Each version is published and loaded, the engine
   generates, and the trainer's log-probs are compared with the engine's: of single rows, of rows together, and of rows
   with shared prompts.
4. The model is saved, an engine starts on the saved model, and the log-probs are compared once more.

An error, a crash, or a step that takes longer than three minutes ends one trial and not the others. `--out` keeps the
results, and a form with a result there is not tried again (except with `--again`).
"""

import argparse
import json
import math
import re
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.family_forms import FORMS
from benchmarks.family_sides import CALL_S, Engine, Failed, Side, Trainer

VERSIONS = 4
LIMIT = 1e-4
"""Nats between two computations in float32."""
FOUND = "found.json"
BEGIN, END = "<!-- table: python -m benchmarks.families -->", "<!-- end of the table -->"
SHOWN = 200
"""Most characters of a reason in the table."""
STEPS = {
    "model": "no tiny model can be made",
    "trainer": "the trainer refuses it",
    "engine": "vLLM refuses it",
    "publish": "its weights do not reach vLLM",
    "greeting": "vLLM does not compute it",
    "handshake": "the handshake refuses it",
    "versions": "a later version cannot be used",
    "export": "it cannot be saved",
    "exported": "the saved model cannot be used",
}


class Trial:
    """One form of a family, from its first weights to an engine on the saved model."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.model, self.export, self.log = name, folder / "model", folder / "export", folder / "log"
        self.found: dict[str, Any] = {"name": name, "family": FORMS[name][0], "gaps": []}
        self.sides: list[Side] = []

    def run(self) -> dict[str, Any]:
        """Run all steps; returns the findings, with the last `step` and its error in `failed` if the trial failed."""
        steps: dict[str, Callable[[], None]] = {
            "model": self.make,
            "trainer": self.load,
            "engine": self.start,
            "publish": lambda: self.publish(0),
            "greeting": self.greet,
            "handshake": self.shake_hands,
            "versions": self.versions,
            "export": lambda: self.trainer("save", self.export),
            "exported": self.again,
        }
        assert steps.keys() == STEPS.keys()
        try:
            for step, act in steps.items():
                self.found["step"] = step
                act()
            del self.found["step"]
        except Exception as error:  # noqa: BLE001 (any error of a family is a finding)
            with self.log.open("a") as file:
                traceback.print_exc(file=file)
            kind, text = (error.kind, error.text) if isinstance(error, Failed) else (type(error).__name__, str(error))
            self.found["failed"] = {"kind": kind, "error": text}
        finally:
            for side in self.sides:
                side.close()
        return self.found

    def make(self) -> None:
        self.trainer = self.side(Trainer)
        self.found["class"], self.prompts = self.trainer("make", self.name, self.model)

    def load(self) -> None:
        self.engine = self.side(Engine)
        # As in a run, both start at the same time.
        self.started = self.engine.begin("start", self.model, False)
        self.plan = self.trainer("load", self.model)

    def start(self) -> None:
        self.found["engine"] = self.started.result(CALL_S)

    def publish(self, version: int) -> None:
        self.engine("load", self.trainer("publish", version), version)

    def greet(self) -> None:
        self.greeting = self.engine("greet", self.plan)

    def shake_hands(self) -> None:
        self.found |= self.trainer("shake_hands", self.greeting)

    def versions(self) -> None:
        for version in range(1, VERSIONS):
            if version == 1:
                self.found["still"] = self.trainer("update", self.engine("generate", self.prompts))
            else:
                self.trainer("move", version)
            self.publish(version)
            self.compare(self.engine)

    def again(self) -> None:
        self.engine.close()
        engine = self.side(Engine)
        engine("start", self.export, True)
        self.compare(engine)

    def compare(self, engine: Side) -> None:
        self.found["gaps"].append(self.trainer("gaps", engine("generate", self.prompts)))

    def side(self, kind: Callable[[], Any]) -> Side:
        self.sides.append(Side(kind, self.log))
        return self.sides[-1]


def largest(found: dict[str, Any]) -> dict[str, float]:
    """Find the largest difference of each form of rows, over all versions."""
    forms = dict.fromkeys(form for gaps in found["gaps"] for form in gaps)
    # `max` may pass over NaN, which JSON keeps.
    return {form: max(math.inf if math.isnan(g[form]) else g[form] for g in found["gaps"]) for form in forms}


def verdict(found: dict[str, Any]) -> tuple[str, str]:
    """Judge a form: `works`, `refused` before the first iteration, `fails` or `differs`; and the way or the reason."""
    if failed := found.get("failed"):
        # vLLM refuses at its start; the product's own sentences are errors of these kinds.
        refused = found["step"] == "engine" or failed["kind"] in ("ValueError", "FinalError")
        reason = " ".join(re.sub(r"[^\s(=]*/(?=model\b)", "", failed["error"]).split())
        if len(reason) > SHOWN:
            reason = reason[:SHOWN].rsplit(" ", 1)[0] + " ..."
        return "refused" if refused else "fails", f"{STEPS[found['step']]}: {reason}"
    if apart := [f"{form} {gap:.1e}" for form, gap in largest(found).items() if not gap <= LIMIT]:
        return "differs", f"later rows of engine and trainer: {', '.join(apart)} nats"
    if found["still"]:
        return "fails", f"the update leaves {len(found['still'])} parameters as they were: {found['still'][0]}"
    return "works", str(found["way"])


def cells(found: dict[str, Any]) -> list[str]:
    """Make the form's row in the table."""
    result, why = verdict(found)
    worst = max(largest(found).values(), default=math.nan)
    shown = f"{worst:.1e}" if result == "works" else ""
    return [found["name"], found.get("class", ""), found.get("engine", ""), result, why, shown]


HEADER = ["form", "class", "vLLM's class", "result", "way, or why", "largest difference"]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Write the table of the page."""
    lines = [HEADER, ["---"] * len(HEADER)]
    for found in rows:
        name, *more = (cell.replace("|", "\\|") for cell in cells(found))
        lines.append([f"`{name}`", *more])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(page: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Put the table into a page, between its marks. Raises ValueError if it has none."""
    before, begun, rest = page.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise ValueError(f"{page} has no lines '{BEGIN}' and '{END}', between which the table of families goes")
    page.write_text(f"{before}{BEGIN}\n\n{markdown(rows)}\n\n{END}{after}")


def tried(name: str, out: Path, again: bool) -> dict[str, Any]:
    """Return the findings of a trial of the form, which may be an earlier one."""
    folder = (out / name).resolve()
    if again or not (folder / FOUND).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begun = time.monotonic()
        found = Trial(name, folder).run()
        found["seconds"] = round(time.monotonic() - begun, 1)
        (folder / FOUND).write_text(json.dumps(found, indent=2) + "\n")
    found = json.loads((folder / FOUND).read_text())
    assert isinstance(found, dict)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Try the forms, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/families"), help="what was found, a folder a form")
    parser.add_argument("--again", action="store_true", help="try forms again that have been tried")
    parser.add_argument("--page", type=Path, help="a page with marks, which gets all that was found")
    args = parser.parse_args(argv)
    rows = []
    for name in args.only:
        rows.append(tried(name, args.out, args.again))
        print(*cells(rows[-1]), sep="  ", flush=True)
    table = Table(*HEADER)
    for found in rows:
        table.add_row(*cells(found))
    Console().print(table)
    if args.page:
        write(args.page, [tried(name, args.out, False) for name in FORMS if (args.out / name / FOUND).exists()])


if __name__ == "__main__":
    main()
