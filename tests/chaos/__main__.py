"""Kill processes of a training run at random and see whether it ends as if nothing had happened.

    python -m tests.chaos --out /tmp/chaos --seed 1 --kills 20

A run of PPO on Countdown with all parties (engine, reward processes, reference, value replica, critic, two train
workers, policy store, prompt source, tracking server) on a Ray of its own. One process after the other is killed by
SIGKILL, of every kind at least one; the driver is started again by the same command when it ends, Ray's head and the
tracking server when they are gone. Then the run's files are checked, against those of a twin without kills.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos import checks, inputs
from tests.chaos.campaign import Campaign, Strike
from tests.chaos.processes import TITLES
from tests.chaos.report import Report
from tests.chaos.schedule import Kill, schedule
from tests.chaos.site import ChaosError, Site, last_words
from tests.chaos.tracking import tracked

RUN, TWIN = "chaos", "twin"
EPISODES = ("host", "zygote")
"""Kinds that a run with `--episodes` has."""
KINDS = (
    *(kind for kind in TITLES if kind not in ("service", *EPISODES)),
    "reward task",
    "reward worker",
    "driver",
    "head",
    "tracker",
    "node",
)
TWIN_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit code is 0 where the run ended and all checks are passed."""
    options = parse(arguments)
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name in (RUN, "tracking"):
        shutil.rmtree(out / name, ignore_errors=True)
    given = None
    if options.model:
        given = inputs.Inputs(options.model.absolute(), options.train.absolute(), options.val.absolute())
    try:
        kills = schedule(options.kinds, options.kills, options.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # So that everything that was started is ended, too, when this is.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = given or inputs.make_inputs(out / "inputs", options.seed, options.episodes)

    def command(name: str, mlflow: bool, nodes: int) -> list[str]:
        own = inputs.settings(
            found, out, name, iterations=options.iterations, seed=options.seed, patience_s=options.patience,
            mlflow=mlflow, nodes=nodes,
        )  # fmt: skip
        return [sys.executable, "-m", "jobs.train", *own, *options.settings]

    twin_s = None
    if options.twin:
        say(f"the run without kills: {options.iterations} iterations")
        try:
            twin_s = run_twin(command(TWIN, False, 1), out)
        except ChaosError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    report = chaos(command(RUN, "tracker" in options.kinds, options.nodes), kills, options, out)
    report.twin_s = twin_s
    if report.error is None:
        report.checks = judge(out, options, found)
    report.write(out)
    print(report.as_markdown())
    print(f"written: {out}/chaos.json and {out}/chaos.md")
    return 0 if report.ok else 1


def chaos(command: list[str], kills: list[Kill], options: argparse.Namespace, out: Path) -> Report:
    """The run with kills; what went wrong stands in the report."""
    begun = time.monotonic()
    site = Site(out, command, options.nodes, "tracker" in options.kinds)
    campaign = Campaign(site, out / RUN, kills, options.seed, options.patience, say)
    error = None
    try:
        site.start()
        campaign.run()
    except ChaosError as problem:
        error = str(problem)
        shutil.copytree(site.ray_folder, out / "ray-logs", dirs_exist_ok=True, ignore=_all_but_logs, symlinks=True)
    except KeyboardInterrupt:
        error = "interrupted"
    finally:
        site.stop()
    strikes: list[Strike] = campaign.strikes
    elapsed = time.monotonic() - begun
    return Report(command, options.seed, options.iterations, strikes, campaign.events, elapsed, None, error=error)


def judge(out: Path, options: argparse.Namespace, found: inputs.Inputs) -> list[checks.Check]:
    """What is checked when the run has ended."""
    from pipeline.config import Config, load_yaml

    config = load_yaml(out / RUN / "config.yaml", Config)
    n, rows = config.rollout.n, config.data.train_batch_size * config.rollout.n
    run = checks.Recorded.of(out / RUN, options.iterations)
    twin = checks.Recorded.of(out / TWIN, options.iterations) if options.twin else None
    judged = checks.check(run, twin, options.iterations, rows, n)
    model = (out / RUN / "model" / "config.json").is_file()
    judged.append(checks.Check("model", model, "the trained model is there" if model else "there is no trained model"))
    if "tracker" in options.kinds:
        judged.append(tracked(out / "tracking" / "mlflow.db", options.iterations))
    return judged


def run_twin(command: list[str], out: Path) -> float:
    """The run without kills, with a Ray of its own; its seconds. One that `out` has already is not repeated.

    Raises:
        ChaosError: it failed.
    """
    from tests.chaos.processes import kill_tree
    from tests.chaos.site import ROOT, driver_env

    told = out / "twin.json"
    if told.is_file() and (known := json.loads(told.read_text()))["command"] == command:
        return known["seconds"]
    told.unlink(missing_ok=True)
    shutil.rmtree(out / TWIN, ignore_errors=True)
    begun = time.monotonic()
    log = out / "twin.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=driver_env(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(TWIN_S)
        except subprocess.TimeoutExpired:
            raise ChaosError(f"the run without kills took longer than {TWIN_S:.0f} s; see {log}") from None
        finally:
            kill_tree(process.pid)
    if code:
        raise ChaosError(f"the run without kills ended with code {code}: {last_words(log.read_text(errors='replace'))}")
    seconds = time.monotonic() - begun
    told.write_text(json.dumps({"command": command, "seconds": seconds}))
    return seconds


def say(sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {sentence}", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, as they are used."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"kinds: {', '.join(KINDS)} (node: with --nodes 2), {', '.join(EPISODES)} (with --episodes), and on "
        "request service (actors of Ray Data's own)",
    )
    add: Any = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the runs, logs, chaos.json and chaos.md")
    add("--seed", type=int, default=1, help="of the schedule and of the run (default: %(default)s)")
    add("--kills", type=int, default=20, help="how many (default: %(default)s)")
    add("--kinds", metavar="A,B,...", help="kinds of processes, separated by commas (default: all)")
    add("--iterations", type=int, help="of the run (default: enough for the kills, 4 x kills + 10)")
    add("--patience", type=float, default=240, metavar="S", help="seconds without a new iteration after which the run "
        "counts as stuck (default: %(default)s)")  # fmt: skip
    add("--nodes", type=int, choices=(1, 2), default=1, help="2: engine and reward tasks on a second node of this "
        "machine, which is killed too (default: %(default)s)")  # fmt: skip
    add("--episodes", action="store_true", help="rows are episodes of three turns, whose environments are on a host "
        "(kinds host and zygote)")  # fmt: skip
    add("--twin", action=argparse.BooleanOptionalAction, default=True, help="run without kills first, to compare "
        "with; one that DIR holds of the very same command is taken as it is")  # fmt: skip
    add("--model", type=Path, help="a model that can do Countdown (default: a tiny one with random weights, and the "
        "share of digits as its reward)")  # fmt: skip
    add("--train", type=Path, metavar="FILE", help="prompts to train on, with --model")
    add("--val", type=Path, metavar="FILE", help="prompts to validate on, with --model")
    add("settings", nargs="*", metavar="key=value", help="further settings of the run")
    options = parser.parse_intermixed_args(arguments)
    if len({options.model is None, options.train is None, options.val is None}) > 1:
        parser.error("--model, --train and --val come together")
    if options.episodes and options.model:
        parser.error("--episodes makes a model of its own; leave --model out")
    possible = [kind for kind in KINDS if kind != "node" or options.nodes > 1]
    if options.episodes:
        # No reward function is called.
        possible = [kind for kind in possible if kind not in ("reward task", "reward worker")] + list(EPISODES)
    options.kinds = options.kinds.split(",") if options.kinds else possible
    if unknown := [kind for kind in options.kinds if kind not in (*possible, "service")]:
        parser.error(f"--kinds: {', '.join(unknown)} is none of {', '.join([*possible, 'service'])}")
    options.iterations = options.iterations or 4 * options.kills + 10
    return options


def _all_but_logs(folder: str, names: list[str]) -> list[str]:
    """Of Ray's folder, what `copytree` leaves out: sockets cannot be copied."""
    return [name for name in names if not (Path(folder) / name).is_dir() and "logs" not in Path(folder).parts]


if __name__ == "__main__":
    sys.exit(main())
