"""Train a policy: `python -m jobs.train experiment=countdown_cpu actor.optim.lr=1e-5`."""

import itertools
import logging
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from jobs.command import CONTINUES, add_settings, called, complain, exit_code, new_parser
from jobs.entry import command
from pipeline.config import Config, ConfigError, load_config, to_flat
from pipeline.config.places import name_from_root
from pipeline.run.submitted import check_cluster, joined
from pipeline.run.versions import check_versions

if TYPE_CHECKING:
    import pyarrow as pa

    from pipeline.plan.gpus import Gpu
    from pipeline.plan.plan import Plan

EPILOG = """\
settings:
  key=value pairs in Hydra's grammar, laid over configs/train.yaml, the chosen experiment and the chosen algorithm;
  `slipstream docs configuration` describes all keys, `slipstream docs algorithms` all algorithms.

examples:
  python -m jobs.train --dry-run experiment=countdown_cpu
  python -m jobs.train --dry-run --gpus 8xH100 model.path=/models/Qwen3-8B data.train_files=my.parquet
  python -m jobs.train experiment=countdown_cpu trainer.experiment_name=mine actor.optim.lr=1e-5
  python -m jobs.train experiment=countdown_cpu algorithm=ppo critic.optim.lr=1e-4
  python -m jobs.train data.train_files=my.parquet model.path=Qwen/Qwen2.5-0.5B-Instruct ...

the same command continues a run that was interrupted.
"""

CHECKED_PROMPTS = 256
"""Number of prompts per split that are checked before anything starts; the others are checked when they are read."""


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 finished, 2 bad settings or input, 130 interrupted, 1 failed; for a dry
    run 2 if this machine cannot run it."""
    parser = new_parser("train", "Train a language model by reinforcement learning.", EPILOG)
    add_settings(parser)
    parser.add_argument(
        "--gpus", metavar="N[xKIND]", help="with --dry-run: also suggest settings for so many GPUs, such as 8 or 8xH200"
    )
    # Settings and options may be mixed in any order.
    options = parser.parse_intermixed_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        check_versions()
        config = load_config(options.settings, config_dir=options.config_dir)
        if options.gpus is not None and not options.dry_run:
            raise ValueError("--gpus suggests settings and starts nothing; add --dry-run")
        return train(config, options.dry_run, [*called("train"), *given], options.gpus)

    return exit_code(run, interrupted=CONTINUES)


def _command(command: list[str], iterations: int | None) -> str:
    """Return the command that continues the run, as text; with `iterations`, up to this number of iterations."""
    if iterations is not None:
        key = "trainer.total_training_steps="
        command = [*(argument for argument in command if not argument.startswith(key)), f"{key}{iterations}"]
    return shlex.join(command)


def _sequel(config: Config, run_dir: Path, command: list[str], finished: int | None) -> str:
    """Return how to continue a run that has ended; `finished` is its last iteration if it has reached it."""
    from pipeline.storage.resume import no_checkpoint

    if finished and not config.trainer.max_ckpt_to_keep:
        return f"not possible, {no_checkpoint(run_dir)}"
    return _command(command, finished and finished * 2)


def _check_prompts(config: Config, calls: bool) -> tuple[int | None, list[tuple[str, str]]]:
    """Read the first prompts, score a made-up response to them, and start episodes with them.

    Args:
        config: settings of the run.
        calls: True to call tools too.

    Returns:
        (number of training prompts, or None if it is not known; lines for `--dry-run` as (name, text)). The lines show
        the first prompt as the model reads it, the reward of a made-up response to it, and notes on columns and fields
        that are not read.

    Raises:
        ValueError, FileNotFoundError, OSError: a file, the tokenizer, the reward, the environment or the tools cannot
            be used.
    """
    from pipeline.derived import reward_parts, uses_agent
    from pipeline.prompts.assertions import check_assertions
    from pipeline.prompts.encode import first_prompt, to_table
    from pipeline.prompts.parquet import data_sources
    from pipeline.prompts.stage import loaders
    from pipeline.reward.dry import RESPONSE, Tried, check_names, check_sources, dry_call
    from pipeline.sampling import check_agents, row_limits
    from pipeline.track.validation import check_metric

    limits = row_limits(config)
    training, validation = loaders(config.data, config.model, limits, config.trainer.seed)
    parts, rewarded = reward_parts(config), (config.reward, config.agent)
    both = [loader for loader in (training, validation) if loader is not None]
    set_aside = check_assertions(both, limits["train"].truths, config.data.max_bad_rows)
    first: list[pa.Table] = []
    tried: dict[str, Tried] = {}
    found: list[dict[str | None, list[str]]] = []
    for loader, read in ((training, parts), (validation, {})):
        if loader is not None:
            found.append(data_sources(loader.files, config.data.max_bad_rows > 0, limits["train"].check_agent))
            check_sources(found[-1], *rewarded)
            tables = list(itertools.islice(loader.epoch(1), CHECKED_PROMPTS))
            got = dry_call(tables, config.reward, read, config.agent)
            if loader is validation and (metric := config.trainer.best_metric) is not None:
                names = {name: got.get(name) for names in found[-1].values() for name in names}
                if config.data.val_max_samples > 0:
                    # The validated rows may come from only some sources.
                    names = {name: got.get(name) for t in loader.epoch(256) for name in t["data_source"].to_pylist()}
                has_acc = {name: own.acc if own else None for name, own in names.items()}
                check_metric(metric, has_acc, config.rollout.val_kwargs.n, config.agent)
            tried, first = got | tried, first or tables
    if config.data.generator is None:
        # A generator may give prompts of other sources, and for other agents, at any time.
        own, *others = ({name for names in by_agent.values() for name in names} for by_agent in found)
        check_names(config.reward, own, {name for names in others for name in names})
        check_agents(config.agent.named, {name for by_agent in found for name in by_agent})
    if generated := training.generate(1, config.data.train_batch_size):
        for row in generated:
            check_sources({row["agent_name"]: [row["data_source"]]}, *rewarded)
        first = [to_table(generated, training.encoder.columns)]
        tried = dry_call(first, config.reward, parts, config.agent) | tried
    notes = [set_aside, *(note for loader in both for note in loader.notes())]
    lines = [("note", note) for note in dict.fromkeys(notes) if note]
    if uses_agent(config):
        from pipeline.rollout.dry import dry_episodes

        lines += dry_episodes(config, training.encoder.chat.tokenizer, first, calls)
    if first:
        source_name = first[0]["data_source"][0].as_py()
        if not uses_agent(config):
            # An environment and tools add to the prompt of a file.
            lines += first_prompt(first[0], training.encoder)
        if source_name in tried:
            score = tried[source_name].score
            shown = "the reward failed" if score is None else f"{score:g}"
            lines.append(("reward of a made-up response", f"{shown} for {RESPONSE!r} (data_source {source_name})"))
    return training.epoch_rows or None, lines


def _adapters(config: Config) -> list[tuple[str, str]]:
    """Return lines for `--dry-run`, as (name, text), on the layers of policy and critic that get adapters.

    Raises:
        ValueError: `model.lora.target_modules` matches no layer.
    """
    if not config.model.lora.rank:
        return []
    from pipeline.derived import uses_critic
    from pipeline.models.lora import coverage

    models = {"model.path": config.model}
    if uses_critic(config) and config.critic.path:
        models["critic.path"] = replace(config.model, path=config.critic.path)
    found = [coverage(model, key) for key, model in models.items()]
    return [("adapters" if one.complete else "note", f"adapters are {one.text}") for one in found if one]


def _lacks(resolved: "Plan", gpus: int | None) -> list[str]:
    """Return sentences on what the run needs and does not have.

    Args:
        resolved: the plan.
        gpus: number of GPUs of the machines that the run is meant for; None compares CPUs, GPUs and memory with this
            machine.
    """
    from pipeline.plan.placement import check_resources

    if gpus is not None:
        more = "lower rollout.num_engines, trainer.num_workers, or the GPUs of the scoring replicas"
        return [f"the run needs {resolved.gpus:g} GPUs; {more}"] if resolved.gpus > gpus else []
    found = [resolved.lacks_memory] if resolved.lacks_memory else []
    try:
        check_resources(resolved.stages, resolved.config.trainer.ray_num_cpus)
    except ConfigError as error:
        found.append(str(error))
    return found


def _say_what_lacks_room(resolved: "Plan", run_dir: Path) -> None:
    """Print a warning for each disk of this machine that does not have room for a checkpoint of the run."""
    from pipeline.storage.checkpoints import root
    from pipeline.storage.room import STAGING_REMEDY, STORAGE_REMEDY, lacking

    if (memory := resolved.memory) is None:
        return
    trainer = resolved.config.trainer
    needed = memory.checkpoint * trainer.num_workers
    staging = str(trainer.env_vars.get("TMPDIR") or tempfile.gettempdir())
    for place, remedy in ((staging, STAGING_REMEDY), (root(trainer, run_dir), STORAGE_REMEDY)):
        if problem := lacking(place, needed, remedy):
            Console().print(f"[yellow]no room:[/] {escape(problem)}", highlight=False, soft_wrap=True)


def _kind_of_gpu(config: Config, gpus: str | None) -> "tuple[int, Gpu] | tuple[None, Gpu | None]":
    """Return (number of GPUs, kind of GPU) of the option `--gpus`.

    Without the option, the number is None, and the kind is this machine's or the default; None for a run on CPUs.
    """
    from pipeline.plan.gpus import DEFAULT, GPUS, local_gpu, parse

    if gpus is not None:
        return parse(gpus)
    uses_gpus = config.trainer.use_gpu or config.rollout.num_gpus
    return None, (local_gpu() or GPUS[DEFAULT]) if uses_gpus else None


def train(config: Config, dry_run: bool, command: list[str], gpus: str | None = None) -> int:
    """Check and plan a run, and then start it or print the plan. Returns the exit code.

    Args:
        config: settings of the run.
        dry_run: True to print the plan instead of training.
        command: words of the command as typed, which continues the run if it is interrupted.
        gpus: value of `--gpus`.

    Raises:
        ValueError, OSError, ImportError: the settings or the input cannot be used, or the run's folder is in use;
            nothing has been started.
    """
    from pipeline.plan.checks import check
    from pipeline.replay import checks as replay
    from pipeline.storage.owner import of_run, owned
    from pipeline.storage.resume import check_writable

    # Checked before paths become absolute, so errors show paths as the user wrote them.
    check(config)
    name_from_root(config)
    run_dir = Path(config.trainer.default_local_dir) / config.trainer.experiment_name
    replay.check_folder(config, run_dir)
    check_cluster(run_dir)
    check_writable(run_dir)
    with owned([] if dry_run else of_run(run_dir, config.trainer), partial(print, flush=True)) as lost:
        return _train(config, run_dir, dry_run, command, gpus, lost)


def _train(
    config: Config, run_dir: Path, dry_run: bool, command: list[str], gpus: str | None, lost: Callable[[], str | None]
) -> int:
    """Train in the folder `run_dir`, or print the plan. Returns the exit code.

    Arguments are the same as for `train`, and `lost`, a function that returns the reason if another process has taken
    over the folder, else None.
    """
    from pipeline.derived import chunk_prompts, uses_engines
    from pipeline.models.attention_names import check_attention
    from pipeline.models.ends import find_ends
    from pipeline.models.save_settings import check_settings
    from pipeline.models.tokenizer import load_tokenizer
    from pipeline.plan.checks import check
    from pipeline.plan.host import machine_memory
    from pipeline.plan.placement import Node, check_resources, local_node, place
    from pipeline.plan.plan import plan
    from pipeline.plan.suggest import suggested
    from pipeline.plan.table import render
    from pipeline.plan.trial import try_models
    from pipeline.replay import checks as replay
    from pipeline.run.origin import origin
    from pipeline.storage.resume import no_checkpoint, reached, recover
    from pipeline.storage.room import used
    from pipeline.storage.targets import try_targets
    from pipeline.track.mlflow_logger import local_store
    from pipeline.train.schedule import jumps

    count, gpu = _kind_of_gpu(config, gpus) if dry_run else (None, None)
    begin = origin(run_dir, config)
    if begin.exists or begin.own:
        # The run keeps its `rollout.chunk_prompts`, which may not suit the train workers of this start.
        check(config)
    # Everything below reads files; nothing has been started yet.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    check_attention(config.model)
    if uses_engines(config):
        prompts, preview = _check_prompts(config, calls=dry_run)
    else:
        prompts, preview = replay.check_recording(config), []
    preview += _adapters(config)
    resolved = plan(config, prompts, gpu, machine_memory() if joined() is None else None)
    tokenizer = load_tokenizer(config.model, needs_chat_template=False)
    check_settings(config.model, tokenizer)
    preview += [("note", note) for note in try_models(config, tokenizer)]
    ends = find_ends(config.model, tokenizer, config.data.apply_chat_template_kwargs)
    if begin.own and resolved.iterations:
        begin.notes += jumps(begin.own.progress, resolved.schedules)
    preview += [("note", note) for note in begin.notes]
    last = reached(run_dir, config) if begin.exists else 0
    finished = resolved.iterations is not None and last >= resolved.iterations
    unless = "unless trainer.total_training_steps (or trainer.total_epochs) is raised"
    longer = unless if begin.own else no_checkpoint(run_dir)
    nothing = f"{run_dir} has reached iteration {last} of {resolved.iterations}; nothing is left to do, {longer}"
    if last and begin.own is None and not finished:
        raise ConfigError(f"the run in {run_dir} finished at iteration {last}; {no_checkpoint(run_dir)}")
    # The nodes of a cluster are known once the run has joined it.
    on_this_machine = joined() is None
    if dry_run:
        local = [local_node(config.trainer.ray_num_cpus)]
        table = render(resolved, place(resolved.stages, local) if on_this_machine else ())
        left = [("note", nothing)] if finished else []
        for name, text in [("run folder", str(run_dir)), ("ends", ends.line), *left, *preview]:
            table.add_row(name, text)
        if gpu and (count or resolved.too_large):
            table.add_row(*suggested(resolved.config, count or math.ceil(resolved.gpus), gpu))
        Console(markup=False).print(table)
        if count is None and on_this_machine:
            _say_what_lacks_room(resolved, run_dir)
        lacking = _lacks(resolved, count) if on_this_machine or count else []
        who = "this machine" if count is None else f"{count} GPUs"
        for text in map(escape, lacking):
            Console().print(f"[yellow]{who} cannot run it:[/] {text}", highlight=False, soft_wrap=True)
        return 2 if lacking else 0
    if on_this_machine:
        check_resources(resolved.stages, config.trainer.ray_num_cpus)
    assert resolved.iterations is not None
    if finished:
        print(f"{nothing}.")
        if begin.own:
            print(f"to continue: {_command(command, last * 2)}")
        return 0

    with_store = "mlflow" in config.trainer.logger and not os.environ.get("MLFLOW_TRACKING_URI")
    try_targets(run_dir, local_store(run_dir) if with_store else None)
    print(ends.line)
    lacking = [resolved.lacks_memory] if resolved.lacks_memory else []
    for note in (*resolved.notes, *lacking, *(text for name, text in preview if name.startswith("note"))):
        print(f"note: {note}")

    import ray

    from pipeline.run.begin import leave
    from pipeline.run.driver import run, start_ray
    from pipeline.track.loggers import TrackedRun, shown
    from pipeline.track.provenance import masked_command
    from pipeline.track.tracker import Tracker

    logging.getLogger("ray").setLevel(logging.ERROR)
    config.rollout.chunk_prompts = chunk_prompts(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    resume = begin.exists or recover(run_dir, begin.own)
    kept, trainer = begin.fingerprints(config), config.trainer
    names = trainer.project_name, trainer.experiment_name
    tracked = TrackedRun(run_dir, to_flat(config), *names, resume, command=masked_command(command))
    tracker = Tracker(tracked, resolved.iterations, trainer.logger)
    started = start_ray(config)
    if joined():
        nodes = [Node(node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"]]
        check_resources(resolved.stages, None, nodes)
    tracker.start()
    status, places, error, ray_gone = "failed", dict[str, str](), None, False
    try:
        outcome = run(config, resolved, tracker, run_dir, kept, begin.policy.place if begin.policy else None, lost)
        status, error, ray_gone = outcome.status, outcome.error, outcome.ray_gone
        places |= outcome.restarted
        if (run_dir / "model").is_dir() and status != "failed":
            places["model"] = shown(run_dir / "model")
    except KeyboardInterrupt:
        status = "interrupted"
    finally:
        places["disk"] = used(run_dir)
        if uses_engines(config):
            places["engine"] = config.rollout.name
        if kept.accepted:
            places["other files"] = kept.history
        places["to continue"] = _sequel(config, run_dir, command, resolved.iterations if status == "finished" else None)
        tracker.finish(status, places)
        if started and not ray_gone:
            ray.shutdown()
    if error:
        complain(error)
    if ray_gone:
        leave(1)
    return {"finished": 0, "interrupted": 130}.get(status, 1)


if __name__ == "__main__":
    sys.exit(main())
