"""Two hosts and a cable: `python -m tests.hosts --out DIR` trains over them, pulls the cable and tells what came of it.

Needs root, `ip` (iproute2) and `unshare` (util-linux); the hosts are network namespaces of this machine.
"""

import argparse
import logging
import signal
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace

from rich.console import Console
from rich.markup import escape

from tests.hosts.cluster import ClusterError
from tests.hosts.network import NetworkError, missing
from tests.hosts.scenario import Outcome, Scenario, Work, play
from tests.runs import BATCH, SAMPLES, tiny_settings

PROMPTS = 5 * BATCH


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code (0 all well, 1 a scenario went wrong, 2 it cannot be played, 130 Ctrl-C)."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.hosts",
        description="Train over two hosts, network namespaces of this machine, and pull the cable. Needs root.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="new folder for hosts.md, the runs and all logs")
    add("--seed", type=int, default=1, help="of the moments at which the cable is pulled (default: %(default)s)")
    add("--iterations", type=int, default=20, help="iterations of each run, 4 or more (default: %(default)s)")
    add("--scenarios", nargs="+", choices=("short", "long"), default=["short", "long"], help="which (default: both)")
    add("--short-s", type=float, default=5.0, metavar="S", help="seconds of the short cut (default: %(default)s)")
    add("--long-s", type=float, default=45.0, metavar="S", help="of the long one (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.iterations < 4:
        parser.error(f"--iterations {options.iterations} leaves no middle in which the cable could be pulled")
    if reason := missing():
        parser.error(reason)
    if options.out.exists():
        parser.error(f"{options.out} is there already; name a new folder")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _play(options)
    except (ClusterError, NetworkError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _play(options: argparse.Namespace) -> int:
    folder = options.out.resolve()
    scenarios = {
        "short": Scenario("short", options.short_s, unanswered=None, node_dies=False),
        "long": Scenario("long", options.long_s, unanswered=5, node_dies=True),
    }
    work = Work(_settings(folder / "input"), PROMPTS, BATCH, SAMPLES, options.iterations)
    outcomes = []
    for name in options.scenarios:
        outcomes.append(play(scenarios[name], work, folder / name, options.seed))
        (folder / "hosts.md").write_text(table(outcomes))
    print(table(outcomes))
    return int(any(outcome.problems for outcome in outcomes))


def _settings(folder: Path) -> list[str]:
    """Settings of a run of a two-layer model on a few Countdown puzzles; model and puzzles are made in `folder`."""
    from transformers.utils.logging import disable_progress_bar

    from jobs.prepare.__main__ import main as prepare
    from jobs.tiny import build_model, build_tokenizer, countdown_texts

    folder.mkdir(parents=True)
    data, model = folder / "data", folder / "model"
    arguments = ["countdown", "--template", "short", "--train", str(PROMPTS), "--test", str(BATCH), "--out", str(data)]
    assert prepare(arguments) == 0
    tokenizer = build_tokenizer(countdown_texts(512, seed=0), vocab_size=320)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    build_model(tokenizer, hidden=64, layers=2, heads=2, kv_heads=2, tie=True, seed=0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    return tiny_settings(folder, model, SimpleNamespace(train=data / "train.parquet", val=data / "test.parquet"))


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as Markdown."""
    lines = ["| scenario | what happened | seconds without progress (usual) | result |", "|---|---|---|---|"]
    for outcome in outcomes:
        seconds = f"{outcome.quiet_s:.0f} ({outcome.usual_s:.1f})"
        lines.append(f"| {outcome.scenario.name} | {outcome.told()} | {seconds} | {outcome.result()} |")
    return "\n".join(line.replace("\n", " ") for line in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
