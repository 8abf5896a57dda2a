"""Train a policy: `python -m jobs.train experiment=countdown_cpu actor.optim.lr=1e-5`."""

import argparse
import itertools
import logging
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from pipeline.config import Config, load_config, to_flat
from pipeline.submitted import check_cluster
from pipeline.versions import VersionError, check_versions

EPILOG = """\
settings:
  key=value pairs in Hydra's grammar, laid over configs/train.yaml, the chosen experiment and the chosen algorithm;
  all keys with their meaning stand in docs/configuration.md, all algorithms in docs/algorithms.md.

examples:
  python -m jobs.train --dry-run experiment=countdown_cpu
  python -m jobs.train experiment=countdown_cpu trainer.experiment_name=mine actor.optim.lr=1e-5
  python -m jobs.train experiment=countdown_cpu algorithm=ppo critic.optim.lr=1e-4
  python -m jobs.train data.train_files=my.parquet model.path=Qwen/Qwen2.5-0.5B-Instruct ...

the same command continues a run that was interrupted.
"""

CHECKED_PROMPTS = 256
"""Prompts of each split that are made before anything starts; the others are checked as they are read."""


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code (0 finished, 2 bad settings or input, 130 interrupted, 1 failed)."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train",
        description="Train a language model by reinforcement learning.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and exit, without starting Ray")
    parser.add_argument("--config-dir", metavar="DIR", help="folder with config files of your own")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, see below")
    # Settings and options may be mixed in any order.
    options = parser.parse_intermixed_args(arguments)
    try:
        check_versions()
        config = load_config(options.settings, config_dir=options.config_dir)
        given = arguments if arguments is not None else sys.argv[1:]
        return train(config, options.dry_run, ["python", "-m", "jobs.train", *given])
    except (ValueError, OSError, ImportError, VersionError) as error:
        complain(str(error))
        return 2


def complain(error: str) -> None:
    """Print an error on stderr; brackets in it are text, not markup."""
    Console(stderr=True).print(f"[bold red]error:[/] {escape(error)}", highlight=False, soft_wrap=True)


def name_from_root(config: Config) -> None:
    """Make local paths absolute: workers have another working directory than this command."""
    from pipeline.cluster import absolute, absolute_files

    config.model.path = absolute(config.model.path)
    config.model.tokenizer_path = absolute(config.model.tokenizer_path)
    for section in (config.critic, config.scoring.reference, config.reward.model):
        section.path = absolute(section.path)
    own = config.reward.custom_reward_function
    own.path = _absolute_file(own.path)
    for settings in config.reward.functions.values():
        settings["path"] = _absolute_file(settings.get("path"))
    data = config.data
    data.train_files, data.val_files = absolute_files(data.train_files), absolute_files(data.val_files)
    data.recorded_run = absolute(data.recorded_run)
    if config.trainer.storage_path is not None:
        config.trainer.storage_path = absolute_files(config.trainer.storage_path)


def _absolute_file(path: str | None) -> str | None:
    """A Python file named from the root; the name of a module stays, also where a folder here has it."""
    from pipeline.cluster import absolute

    return absolute(path) if path and path.endswith(".py") else path


def _command(command: list[str], iterations: int | None) -> str:
    """The command that continues the run, up to `iterations` where given."""
    if iterations is not None:
        key = "trainer.total_training_steps="
        command = [*(argument for argument in command if not argument.startswith(key)), f"{key}{iterations}"]
    return shlex.join(command)


def _check_prompts(config: Config) -> int | None:
    """Reads the first prompts and tries the reward on them; the number of training prompts, where it is known.

    Raises:
        ValueError, FileNotFoundError, OSError: a file or the tokenizer cannot be used, or the reward cannot.
    """
    from pipeline.prompts.encode import to_table
    from pipeline.prompts.files import data_sources
    from pipeline.prompts.stage import first_generated, sources
    from pipeline.reward.dry import check_sources, dry_call
    from pipeline.stages import reward_parts

    training, validation = sources(config)
    parts = reward_parts(config)
    for source, read in ((training, parts), (validation, [])):
        if source is not None:
            check_sources(data_sources(source.files, config.data.max_bad_rows > 0), config.reward)
            dry_call(itertools.islice(source.chunks(1, epochs=1), CHECKED_PROMPTS), config.reward, read)
    if generated := first_generated(config, training):
        check_sources(sorted({row["data_source"] for row in generated}), config.reward)
        dry_call([to_table(generated)], config.reward, parts)
    return training.len_estimate or None


def train(config: Config, dry_run: bool, command: list[str]) -> int:
    """Check, plan and run; the exit code.

    Args:
        config: the settings; paths in them are made absolute.
        dry_run: print the plan and start nothing.
        command: the words that were typed, with which the run is continued.

    Raises:
        ValueError, OSError, ImportError: the settings or the input cannot be used; nothing has been started.
    """
    from pipeline import replay
    from pipeline.plan import check_resources, plan, seats
    from pipeline.plan_table import render
    from pipeline.run_folder import check_run_folder, reached, recover, starting_point
    from pipeline.stages import uses_engines

    plan(config)
    name_from_root(config)
    run_dir = Path(config.trainer.default_local_dir).absolute() / config.trainer.experiment_name
    replay.check_folder(config, run_dir)
    check_cluster(run_dir)
    resume = check_run_folder(run_dir, config, config.trainer.resume)
    begin = starting_point(run_dir, config)
    # Everything below reads files; nothing has been started yet.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if uses_engines(config):
        prompts = _check_prompts(config)
    else:
        from pipeline.check_recording import check_recording

        prompts = check_recording(config)
    resolved = plan(config, prompts)
    if not os.environ.get("RAY_ADDRESS"):
        check_resources(resolved)
    if dry_run:
        # The nodes of a cluster are known once the run has joined it.
        Console().print(render(resolved, () if os.environ.get("RAY_ADDRESS") else seats(resolved)))
        return 0
    assert resolved.iterations is not None
    if resume and reached(run_dir, config) >= resolved.iterations:
        print(f"{run_dir} has reached iteration {resolved.iterations}; nothing is left to do.")
        print(f"to continue: {_command(command, resolved.iterations * 2)}")
        return 0

    for note in replay.notes(config):
        print(f"note: {note}")

    import ray

    from pipeline.signals import sigterm_as_ctrl_c
    from pipeline.track.loggers import shown
    from pipeline.track.tracker import Tracker
    from pipeline.train.run import run, start_ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    run_dir.mkdir(parents=True, exist_ok=True)
    resume = resume or recover(run_dir, begin, config)
    trainer = config.trainer
    tracker = Tracker(
        run_dir,
        to_flat(config),
        resolved.iterations,
        trainer.logger,
        trainer.project_name,
        trainer.experiment_name,
        resume,
    )
    started = start_ray(config)
    if os.environ.get("RAY_ADDRESS"):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        check_resources(resolved, [node["Resources"] for node in nodes], [node["Labels"] for node in nodes])
    tracker.start()
    status, places, error = "failed", {}, None
    try:
        with sigterm_as_ctrl_c():
            outcome = run(config, resolved, tracker, run_dir, begin.place if begin else None)
        status, error = outcome.status, outcome.error
        if (run_dir / "model").is_dir() and status != "failed":
            places["model"] = shown(run_dir / "model")
    except KeyboardInterrupt:
        status = "interrupted"
    finally:
        places["to continue"] = _command(command, resolved.iterations * 2 if status == "finished" else None)
        tracker.finish(status, places)
        if started:
            ray.shutdown()
    if error:
        complain(error)
    return {"finished": 0, "interrupted": 130}.get(status, 1)


if __name__ == "__main__":
    sys.exit(main())
