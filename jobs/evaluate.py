"""Evaluate a model on prompt files: `python -m jobs.evaluate --run runs/NAME rollout.val_kwargs.n=8`."""

import argparse
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.command import CONTINUES, add_settings, complain, exit_code, new_parser
from jobs.entry import command
from pipeline.config import load_config, to_flat
from pipeline.config.paths import local_path
from pipeline.config.places import name_from_root
from pipeline.run.submitted import joined
from pipeline.run.versions import check_versions
from pipeline.storage.owner import of_folder, owned

if TYPE_CHECKING:
    from pipeline.evaluate.prepare import Evaluation

FLUSH_S = 30.0
"""Maximum wait for slow trackers at the end, in seconds."""
EPILOG = """\
settings:
  key=value pairs as for jobs.train (`slipstream docs configuration`). An evaluation reads data.val_files and other
  data.* keys, model.path, rollout.val_kwargs.{n,temperature,top_p,top_k}, the rollout.* keys of the engines, and
  reward.*. With --run they are laid over the settings of the run. Training prompts are not needed. See
  `slipstream docs after_training`.

examples:
  python -m jobs.evaluate --run runs/countdown-cpu
  python -m jobs.evaluate --run runs/countdown-cpu rollout.val_kwargs.n=16 rollout.val_kwargs.temperature=1 --k 1,4,16
  python -m jobs.evaluate --run runs/countdown-cpu data.val_files=other.parquet --out results/other
  python -m jobs.evaluate experiment=countdown_cpu model.path=models/tiny-sft-1 data.val_files=test.parquet

the same command continues an evaluation that was interrupted.
"""


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 finished, 2 bad settings or input, 130 interrupted, 1 failed."""
    about = "Score a model on prompt files through the stages of training: pass@k and maj@k per data source."
    parser = new_parser("evaluate", about, EPILOG)
    add = parser.add_argument
    add("--run", type=local_path, metavar="DIR", help="take settings and last model of this run (runs/NAME)")
    add("--out", type=local_path, metavar="DIR", help="folder of the result (default: DIR/evaluations/...)")
    add("--k", metavar="1,4,8", help="k of pass@k and maj@k (default: powers of two up to n, and n)")
    add_settings(parser, "print the plan of the evaluation")
    # Settings and options may be mixed in any order.
    options = parser.parse_intermixed_args(arguments)
    words = arguments if arguments is not None else sys.argv[1:]
    # Without this, a thread that still reads rows after Ray was shut down would start another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

    def run() -> int:
        check_versions()
        evaluation = _prepared(options)
        if not options.dry_run:
            with owned([of_folder(evaluation.folder.path)], partial(print, flush=True)):
                for note in evaluation.notes:
                    print(f"note: {note}")
                return evaluate(evaluation, ["python", "-m", "jobs.evaluate", *words])
        from pipeline.evaluate.prepare import render

        Console(markup=False).print(render(evaluation))
        return 0

    return exit_code(run, interrupted=CONTINUES)


def _prepared(options: argparse.Namespace) -> "Evaluation":
    """Read the settings of the command line, and return the checked evaluation."""
    from pipeline.evaluate.prepare import prepare
    from pipeline.evaluate.settings import of_run, used

    iteration = 0
    if options.run is not None:
        config, iteration = of_run(options.run.absolute(), options.settings, options.config_dir)
    else:
        config = load_config(options.settings, config_dir=options.config_dir)
    config = used(config)
    name_from_root(config)
    return prepare(config, iteration, options.run, options.out, options.k)


def evaluate(evaluation: "Evaluation", command: Sequence[str]) -> int:
    """Generate the responses that are still missing, and write and print the results. Returns the exit code.

    Args:
        evaluation: the prepared evaluation.
        command: words of the command as typed, which continues the evaluation if it is interrupted.
    """
    from pipeline.evaluate.report import print_table, result, rows, tracked
    from pipeline.evaluate.summary import Summary
    from pipeline.track.async_loggers import AsyncLoggers
    from pipeline.track.console import RunConsole
    from pipeline.track.loggers import TrackedRun, shown

    folder, summary = evaluation.folder, evaluation.summary
    trainer, settings = evaluation.config.trainer, to_flat(evaluation.config)
    # The evaluation has its own run in the trackers, in the experiment (or without a server the store) of the training.
    tracked_run = TrackedRun(folder.path, settings, trainer.project_name, evaluation.name, True, evaluation.run_dir)
    loggers = AsyncLoggers(trainer.logger, tracked_run)
    status, error = "finished", None
    folder.begin(evaluation.description)
    if evaluation.complete:
        loggers.start()
    else:
        status, error = _generate(evaluation, loggers.start)
    if status != "finished":
        # A chunk may have been written but not counted when the work was interrupted.
        evaluation.summary = summary = Summary(summary.ks)
        folder.read(summary)
    files: list[Path] = []
    places: dict[str, str] = {}
    if summary.prompts:
        files = folder.report(result(evaluation, status == "finished"), rows(summary))
        places = {"responses": shown(folder.responses), "metrics": shown(files[0])}
        print_table(summary, Console())
    if metrics := tracked(summary):
        loggers.log(evaluation.iteration, time.time(), metrics)
    for file in files:
        loggers.file(file)
    problems = loggers.finish(status, FLUSH_S)
    if status != "finished":
        places["to continue"] = shlex.join(command)
    RunConsole(evaluation.name, None).summary(status, [], places | loggers.where(), problems)
    if status == "finished":
        error = _too_many_errors(evaluation)
    if error is not None:
        complain(error)
    return {"finished": 1 if error else 0, "interrupted": 130}.get(status, 1)


def _generate(evaluation: "Evaluation", begin: Callable[[], None]) -> tuple[str, str | None]:
    """Start Ray, call `begin`, and generate the responses that are still missing.

    Returns:
        (`finished`, `interrupted` or `failed`; reason of the failure or None).
    """
    import ray

    from pipeline.evaluate.run import generate
    from pipeline.plan.placement import Node, check_resources
    from pipeline.run.driver import sentence, start_ray
    from pipeline.track.console import RunConsole

    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet = "console" not in evaluation.config.trainer.logger
    printed = Console(highlight=False, soft_wrap=True, quiet=quiet)
    console = RunConsole(evaluation.name, evaluation.pages.chunks, printed, unit="chunk")
    printed.print(evaluation.ends, markup=False)
    started = start_ray(evaluation.config)
    try:
        if joined():
            nodes = [Node(node["Resources"]) for node in ray.nodes() if node["Alive"]]
            check_resources(evaluation.plan.stages, None, nodes)
        begin()
        console.start()
        console.status("starting the engines")
        try:
            generate(evaluation, console)
        except KeyboardInterrupt:
            return "interrupted", None
        except Exception as error:  # noqa: BLE001 (the reason is printed as a sentence, for any exception of a stage)
            return "failed", sentence(error)
        return "finished", None
    finally:
        console.stop()
        if started:
            ray.shutdown()


def _too_many_errors(evaluation: "Evaluation") -> str | None:
    rate, limit = evaluation.summary.overall().get("error_rate", 0.0), evaluation.config.reward.max_error_rate
    if rate <= limit:
        return None
    return (
        f"the reward failed for {rate:.1%} of the responses, more than reward.max_error_rate={limit:g}, and the "
        f"numbers leave them out. The first reason: {evaluation.summary.first_error}"
    )


if __name__ == "__main__":
    sys.exit(main())
