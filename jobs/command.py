"""Common parts of the jobs' command lines: options for settings, errors as one sentence, exit codes."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from pipeline.config.paths import local_path
from pipeline.errors import NotStarted
from pipeline.run.signals import INTERRUPTED
from pipeline.run.versions import VersionError

CONTINUES = "interrupted; the same command continues"
"""Message of an interrupted command that continues if it is started again."""


def called(job: str) -> list[str]:
    """Return the words of the command that starts a job: `slipstream JOB` if this process was started as `slipstream`,
    else `python -m jobs.JOB`."""
    return as_called(f"python -m jobs.{job}").split()


def as_called(text: str) -> str:
    """Replace each `python -m jobs.JOB` in `text` by `slipstream JOB` if this process was started as `slipstream`."""
    return text.replace("python -m jobs.", "slipstream ") if Path(sys.argv[0]).stem == "slipstream" else text


def new_parser(job: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return an argument parser for a job. Commands in `epilog` are written as `python -m jobs.JOB`."""
    return argparse.ArgumentParser(
        prog=" ".join(called(job)),
        description=description,
        epilog=epilog and as_called(epilog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_settings(parser: argparse.ArgumentParser, plan: str = "print the resolved plan and exit") -> None:
    """Add `--dry-run`, `--config-dir` and `key=value` settings. Use `parse_intermixed_args` to parse them in any order.

    `plan` is the help text of `--dry-run`.
    """
    parser.add_argument("--dry-run", action="store_true", help=f"{plan}, without starting Ray")
    parser.add_argument("--config-dir", type=local_path, metavar="DIR", help="folder with config files of your own")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, see below")


def complain(error: str) -> None:
    """Print an error text on stderr. Brackets in it are printed as they are."""
    Console(stderr=True).print(f"[bold red]error:[/] {escape(error)}", highlight=False, soft_wrap=True)


def message(error: Exception) -> str:
    """Return the message of an error. If it is an unknown key that verl has, the message names Slipstream's key."""
    from jobs.verl.keys import answer
    from pipeline.config import UnknownKey

    if isinstance(error, UnknownKey) and (hint := answer(error.key)):
        return f"{error.where}: {hint}"
    return str(error)


def exit_code(
    run: Callable[[], int | None], failed: tuple[type[Exception], ...] = (), interrupted: str = "interrupted"
) -> int:
    """Run a job, and print its exception as a sentence.

    Returns:
        the result of `run` (0 for None); 1 after an exception in `failed`, or if Ray did not start; 2 after any other
        error in settings or input; 130 after Ctrl-C, and then the text `interrupted` is printed.
    """
    broken: tuple[type[Exception], ...] = (*failed, NotStarted)
    try:
        return run() or 0
    except broken as error:
        complain(str(error))
        return 1
    except (ValueError, OSError, ImportError, VersionError) as error:
        complain(message(error))
        return 2
    except KeyboardInterrupt:
        complain(interrupted)
        return INTERRUPTED
