"""The steps of the workflows in `.github`, run on this machine: `python -m tests.workflows [ci/lint ...] [--list]`.

Only the commands (`run`) are run, in the order of the file, in the current folder. Actions (`uses`) are left out: a
checkout and an interpreter are here already.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / ".github" / "workflows"


@dataclass(frozen=True)
class Step:
    """A step with a command."""

    job: str
    """`workflow/job`."""
    name: str
    command: str


def workflows() -> dict[str, dict[str, Any]]:
    """The workflows by the names of their files."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}


def steps(names: Sequence[str] = ()) -> Iterator[Step]:
    """The steps with commands, of all jobs or of those that are named as `workflow` or `workflow/job`."""
    for workflow, content in workflows().items():
        for job, described in content["jobs"].items():
            if not names or {workflow, f"{workflow}/{job}"} & set(names):
                for step in described["steps"]:
                    if "run" in step:
                        yield Step(f"{workflow}/{job}", step["name"], step["run"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps until one fails; returns its exit code, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.workflows", description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="WORKFLOW[/JOB]", help="(default: all)")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    options = parser.parse_args(arguments)
    for step in steps(options.jobs):
        print(f"== {step.job}: {step.name}: {step.command}", flush=True)
        if not options.list:
            begin = time.monotonic()
            # The shell of GitHub's runners.
            code = subprocess.run(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step.command]).returncode
            print(f"== exit code {code} after {time.monotonic() - begin:.0f} s", flush=True)
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
