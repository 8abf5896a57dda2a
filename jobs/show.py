"""Show one recorded row of a run: `python -m jobs.show runs/NAME --best`."""

import argparse
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import exit_code, new_parser
from jobs.entry import command
from pipeline.config.paths import local_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EPILOG = """\
examples:
  python -m jobs.show runs/NAME                          # the first row of the latest iteration
  python -m jobs.show runs/NAME --iteration 12 --worst   # the lowest score of iteration 12
  python -m jobs.show runs/NAME --split val --uid val-3  # a validation prompt at the latest version
  python -m jobs.show runs/NAME --random 7 --raw         # any row, as its tokens
"""


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 shown, 2 bad arguments, or no such run or row."""
    about = "Print one recorded conversation of a run: messages, rewards, policy versions, score, why it ended."
    parser = new_parser("show", about, EPILOG)
    add = parser.add_argument
    add("run", type=local_path, metavar="RUN_DIR", help="the run's folder, such as runs/NAME")
    add("--iteration", type=int, metavar="N", help="which (default: the latest); of validation, the policy version")
    add("--split", choices=("train", "val"), default="train", help="training or validation rows (default: train)")
    add("--uid", help="group of the row: its prompt's visit, such as 0-17")
    add("--sample", type=int, metavar="N", help="number of the sample in its group, from 0")
    which = parser.add_mutually_exclusive_group()
    for order, text in (("best", "highest score"), ("worst", "lowest score"), ("failed", "first row that failed")):
        which.add_argument(f"--{order}", action="store_const", const=order, dest="order", help=text)
    which.add_argument("--random", type=int, metavar="SEED", help="a row drawn with this seed")
    add("--raw", action="store_true", help="tokens instead of messages, control tokens marked")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _show(options))


def _show(options: argparse.Namespace) -> None:
    from pipeline.track.conversation import COLUMNS, conversation
    from pipeline.track.printable import printable
    from pipeline.track.samples import Choice, Rows
    from pipeline.track.show import Page

    if not options.run.is_dir():
        raise ValueError(f"{options.run} is not a folder; give the folder of a run, such as runs/NAME")
    rows = Rows(str(options.run), options.iteration, options.split)
    number = rows.choose(Choice(options.uid, options.sample, options.order, options.random))
    row = rows.read(number, COLUMNS)
    tokenizer = _tokenizer(options) if options.raw else None
    word = "iteration" if options.split == "train" else "validation of version"
    words = f"{options.run.absolute().name}, {word} {rows.iteration}: uid {row['uid']}, sample {row['sample']}"
    file, place = rows.places[number]
    title = printable(f"{words}, {row['data_source']}")
    Page(Console(highlight=False), tokenizer).show(row, conversation(row), title, f"{file}, row {place}")


def _tokenizer(options: argparse.Namespace) -> "PreTrainedTokenizerBase":
    from pipeline.config import Config, load_yaml
    from pipeline.models.tokenizer import load_tokenizer

    settings = options.run / "config.yaml"
    if not settings.is_file():
        raise ValueError(f"{settings} is missing, which names the tokenizer; --raw cannot show tokens without it")
    return load_tokenizer(load_yaml(settings, Config).model, needs_chat_template=False)


if __name__ == "__main__":
    sys.exit(main())
