"""Prepare prompts as parquet in verl's format: `python -m jobs.prepare DATASET --out DIR ...`.

A data set is a module or a `HubData` with `help`, `add_arguments(parser)` and `prepare(args)`. `DATASETS` lists all
data sets.
"""

import argparse
import sys
from typing import Any, NoReturn

from jobs.command import called
from jobs.entry import command
from jobs.prepare import (
    blocks,
    calculator,
    convert,
    countdown,
    geo3k,
    gsm8k,
    guess_number,
    hellaswag,
    hh_rlhf,
    higher_lower,
    lookup,
    math,
    pairs,
    reverse_text,
    sums,
)

DATASETS: dict[str, Any] = {
    "blocks": blocks,
    "calculator": calculator,
    "countdown": countdown,
    "geo3k": geo3k.DATA,
    "gsm8k": gsm8k.DATA,
    "guess_number": guess_number,
    "hellaswag": hellaswag.DATA,
    "hh_rlhf": hh_rlhf.DATA,
    "higher_lower": higher_lower,
    "json": convert,
    "lookup": lookup,
    "math": math.DATA,
    "pairs": pairs,
    "reverse_text": reverse_text,
    "sums": sums,
}


class Parser(argparse.ArgumentParser):
    """Argument parser that prints only a sentence for a bad option, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


@command
def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 done, 2 bad option or input, 1 not writable, 130 interrupted."""
    parser = Parser(prog=" ".join(called("prepare")), description="Prepare a data set of prompts as parquet.")
    datasets = parser.add_subparsers(dest="dataset", required=True, metavar="DATASET")
    for name, data in DATASETS.items():
        data.add_arguments(datasets.add_parser(name, help=data.help, description=f"{name}: {data.help}"))
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
