"""Prepares prompts as parquet in verl's format: `python -m jobs.prepare DATASET --out DIR ...`.

Each data set is a module with `HELP`, `add_arguments(parser)` and `prepare(args)`; a new one is a line in `DATASETS`.
"""

import argparse
import sys
from typing import NoReturn

from jobs.prepare import convert, countdown, gsm8k, hellaswag, hh_rlhf, math

DATASETS = {
    "countdown": countdown,
    "gsm8k": gsm8k,
    "hellaswag": hellaswag,
    "hh_rlhf": hh_rlhf,
    "json": convert,
    "math": math,
}


class Parser(argparse.ArgumentParser):
    """Answers a bad option with a sentence instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit code (0 done, 2 bad option or input, 1 not writable, 130 interrupted)."""
    parser = Parser(prog="python -m jobs.prepare", description="Prepare a data set of prompts as parquet.")
    datasets = parser.add_subparsers(dest="dataset", required=True, metavar="DATASET")
    for name, module in DATASETS.items():
        module.add_arguments(datasets.add_parser(name, help=module.HELP, description=f"{name}: {module.HELP}"))
    args = parser.parse_args(argv)
    try:
        DATASETS[args.dataset].prepare(args)
    except ValueError as error:
        print(f"{parser.prog} {args.dataset}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{parser.prog} {args.dataset}: cannot write to {args.out}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parser.prog} {args.dataset}: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
