"""Driver that the supervised jobs share: `python -m jobs.sft`, `jobs.reward_model` and `jobs.dpo`."""

import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
import ray.data
import ray.train
from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from jobs.command import as_called, called, message
from jobs.entry import command
from pipeline.config import ConfigError, load
from pipeline.config.bounds import sentences, violations
from pipeline.config.described import default, descriptions
from pipeline.config.paths import check_out
from pipeline.config.places import name_from_root
from pipeline.config.schema import keys
from pipeline.config.supervised import SupervisedConfig
from pipeline.errors import NotStarted
from pipeline.models import adapter
from pipeline.models.architecture import most_positions
from pipeline.models.attention_names import check_attention
from pipeline.models.ends import find_ends
from pipeline.models.lora import coverage
from pipeline.models.policy import load_policy
from pipeline.models.reward_model import load_reward_model
from pipeline.models.save_settings import check_settings
from pipeline.models.template_arguments import check_template_arguments
from pipeline.models.tokenizer import load_tokenizer
from pipeline.plan import check_offload
from pipeline.plan.models import not_causal, read_model
from pipeline.plan.trial import Load, try_model, try_tokenizer
from pipeline.run import cluster
from pipeline.storage.owner import of_folder, owned
from pipeline.supervised.data import RowGroup, notes, train_dataset
from pipeline.supervised.loop import SupervisedLoop, WorkerSettings, train_loop
from pipeline.train import ranks

LINE_S = 10.0
ANSWER_S = 60.0
# CPUs in addition to the workers': one for the reader, one for Ray Data's work on blocks.
DATA_CPUS = 2

C = TypeVar("C", bound=SupervisedConfig)


class Progress:
    """Actor that receives metrics and notes from the workers, for the driver to print."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.notes: list[str] = []

    def note(self, notes: Sequence[str]) -> None:
        """Store notes on choices that the workers made for the model."""
        self.notes = [*notes]

    def read_notes(self) -> list[str]:
        """Return the notes on choices that the workers made for the model."""
        return self.notes

    def post(self, metrics: dict[str, float]) -> None:
        """Store new values of metrics."""
        self.metrics |= metrics

    def read(self) -> dict[str, float]:
        """Return the newest value of each metric."""
        return self.metrics


@dataclass(frozen=True)
class Job(Generic[C]):
    """A command that trains a model on the rows of files."""

    name: str
    """Name of the module in `jobs`, and of the file in `configs`."""

    about: str
    """Text of `--help` above the settings."""

    schema: type[C]
    """Dataclass of all settings."""

    loop: type[SupervisedLoop[C]]
    """Class of the training loop in a worker."""

    shown: tuple[str, ...]
    """Names of the metrics in the progress line."""

    rows_per_pass: int = 1
    """Number of conversations, each of `data.max_length` tokens, that one forward pass must be able to hold."""

    causal: bool = True
    """True if the model must be a causal language model."""

    @command
    def main(self, argv: list[str] | None = None) -> int:
        """Run the command. Returns the exit code: 0 done, 1 failed, 2 bad settings or input, 130 interrupted."""
        argv = sys.argv[1:] if argv is None else argv
        command = " ".join(called(self.name))
        if {"-h", "--help"} & set(argv):
            print(self.help())
            return 0
        try:
            config = load(self.schema, argv, self.name)
            metrics = self.run(config)
        except ValueError as error:
            print(f"{command}: {message(error)}", file=sys.stderr)
            return 2
        except NotStarted as error:
            print(f"{command}: {error}", file=sys.stderr)
            return 1
        except (TimeoutError, ray.exceptions.RayError, ray.train.TrainingFailedError, OSError) as error:
            from pipeline.run.driver import sentence

            print(f"{command}: the run failed: {sentence(error)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"{command}: interrupted, no model was saved", file=sys.stderr)
            return 130
        print(f"{config.out}: {metrics['step']:.0f} steps, {self.describe(metrics)}")
        return 0

    def help(self) -> str:
        """Return the text of `--help`: description of the command, and all settings."""
        lines = [as_called(self.about.strip()), "", "settings:"]
        for key in keys(self.schema).values():
            text = descriptions(key.owner)[key.name.rpartition(".")[2]].replace("`", "")
            plain = default(key).replace("`", "")
            lines.append(f"  {key.name}={plain}")
            lines += textwrap.wrap(text, 100, initial_indent="      ", subsequent_indent="      ")
        return "\n".join(lines)

    def describe(self, metrics: dict[str, float]) -> str:
        """Return the metrics in `shown`, numbers of dropped rows, and the speed as a short text."""
        parts = [f"{name} {metrics[name]:.3f}" for name in self.shown if name in metrics]
        parts += [f"{name} {metrics[name]:,.0f}" for name in ("dropped", "val_dropped") if metrics.get(name)]
        return " ".join([*parts, f"{metrics['tokens_per_s']:,.0f} tokens/s"])

    def check(self, config: C) -> None:
        """Check the settings before anything is started.

        Raises:
            ConfigError: there are problems; the text has one line for each.
        """
        data, trainer = config.data, config.trainer
        lora, path = config.model.lora, config.model.path
        problems = [*violations(config), *sentences(config, config.problems()), *sentences(config, lora.problems())]
        offload = check_offload.problems(config.model, {"": (config.optim, config.fsdp)}, trainer.use_gpu)
        problems += [f"{sentence}." for sentence in sentences(config, offload)]
        base = read_model(path)
        problems += adapter.problems(lora, base.matrices if base else {}, path)
        if self.causal and base and (other := not_causal(base)):
            problems.append(f"model.path={path} is {other} by its config.json; give a causal language model.")
        if base and (most := most_positions(base.config)) and data.max_length > most[0]:
            problems.append(
                f"data.max_length={data.max_length} is more than the {most[0]} tokens of model.path={path} "
                f"({most[1]}); lower it."
            )
        if not config.out:
            problems.append("out is not set; give the folder for the trained model.")
        else:
            try:
                check_out(Path(config.out), (path, config.model.tokenizer_path, lora.path))
            except ValueError as error:
                problems.append(f"out: {error}.")
        if trainer.num_workers > 0 and data.train_batch_size % trainer.num_workers:
            problems.append(
                f"data.train_batch_size={data.train_batch_size} does not divide among trainer.num_workers="
                f"{trainer.num_workers}: {data.train_batch_size} / {trainer.num_workers} leaves "
                f"{data.train_batch_size % trainer.num_workers} rows."
            )
        longest = self.rows_per_pass * data.max_length
        if longest > trainer.max_token_len_per_gpu:
            problems.append(
                f"one forward pass must hold {self.rows_per_pass} x data.max_length={data.max_length} tokens, more "
                f"than trainer.max_token_len_per_gpu={trainer.max_token_len_per_gpu}; raise the latter."
            )
        if problems:
            raise ConfigError("\n".join(problems))

    def run(self, config: C) -> dict[str, float]:
        """Train, and save the model. Returns the last value of each metric.

        Raises:
            ValueError: settings, files or the model cannot be used.
            TimeoutError, ray.exceptions.RayError, ray.train.TrainingFailedError: the run failed.
        """
        self.check(config)
        out = Path(os.path.realpath(config.out or ""))
        config.out = str(out)
        with owned([of_folder(out)], partial(print, flush=True)):
            # Another command may have filled the folder a moment ago.
            check_out(out)
            return self._run(config, out)

    def _run(self, config: C, out: Path) -> dict[str, float]:
        """Train, and save the model to the folder `out`, which this process has locked. Returns the last metrics."""
        data, trainer = config.data, config.trainer
        name_from_root(config)
        encoder = self.loop.encoder
        train_groups = encoder.find_row_groups(data.train_files, "data.train_files", data)
        val_groups = encoder.find_row_groups(data.val_files, "data.val_files", data) if data.val_files else []
        steps, epochs = plan(config, train_groups)
        tokenizer = load_tokenizer(config.model)
        check_attention(config.model)
        check_settings(config.model, tokenizer)
        auto = "AutoModelForCausalLM" if self.causal else "AutoModelForSequenceClassification"
        if found := coverage(config.model, auto=auto):
            print(f"{self.name}: {'' if found.complete else 'note: '}adapters are {found.text}", flush=True)
        check_template_arguments(tokenizer, data.apply_chat_template_kwargs)
        load: Load = load_policy if self.causal else partial(load_reward_model, new_head=True)
        tried = [*try_tokenizer(tokenizer, config.model), *try_model(config.model, "model.path", load)]
        for note in [*tried, *notes([*train_groups, *val_groups], encoder(tokenizer, data))]:
            print(f"{self.name}: note: {note}", flush=True)
        if self.causal:
            ends = find_ends(config.model, tokenizer, data.apply_chat_template_kwargs)
            taught = "" if ends.learnt else "; the chat template writes none after a last answer, so none is learnt"
            print(f"{self.name}: {ends.line}{taught}", flush=True)
        _start_ray(config)
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(trainer.start_timeout)

        progress: Any = ray.remote(num_cpus=0)(Progress)
        progress = progress.remote()
        block_rows = data.train_batch_size // trainer.num_workers
        arguments = (train_groups, encoder, config.model, data, trainer.seed, epochs, block_rows)
        streams = {"train": train_dataset(*arguments)}
        if self.loop.first_pass:
            # Only whole batches, because Ray Train gives each worker the same number of rows.
            batches = min(steps, -(-sum(group.rows for group in train_groups) // data.train_batch_size))
            streams["first_pass"] = train_dataset(*arguments).limit(batches * data.train_batch_size)
        for stream in streams.values():
            stream.context.enable_progress_bars = False
        storage = f".{out.name}.ray-train"
        resources = {"CPU": trainer.cpus_per_worker}
        if trainer.use_gpu:
            resources["GPU"] = 1
        fit = TorchTrainer(
            train_loop,
            train_loop_config={"settings": WorkerSettings(self.loop, config, steps, val_groups, progress)},
            torch_config=TorchConfig(ranks.backend(trainer.use_gpu), timeout_s=int(trainer.data_timeout)),
            scaling_config=ScalingConfig(
                num_workers=trainer.num_workers, use_gpu=trainer.use_gpu, resources_per_worker=resources
            ),
            datasets=dict(streams),
            # Without an order, blocks come in the order of their completion, and the run could not be repeated.
            dataset_config=DataConfig(execution_options=ray.data.ExecutionOptions(preserve_order=True)),
            run_config=RunConfig(
                name=storage, storage_path=str(out.parent), failure_config=FailureConfig(max_failures=0)
            ),
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        done = threading.Event()
        lines = threading.Thread(target=self._print, args=(progress, steps, done), name="progress", daemon=True)
        lines.start()
        try:
            fit.fit()
        except SystemExit as stopped:
            # On Ctrl-C Ray Train aborts the workers and exits with code 0, as if the model were written.
            raise KeyboardInterrupt from stopped
        finally:
            done.set()
            lines.join(timeout=ANSWER_S)
            shutil.rmtree(out.parent / storage, ignore_errors=True)
        return dict(ray.get(progress.read.remote(), timeout=ANSWER_S))

    def _print(self, progress: Any, steps: int, done: threading.Event) -> None:
        """Print the notes on the model, and the metrics every few seconds until `done` is set."""
        over, said = False, 0
        while not over:
            over = done.wait(LINE_S)
            try:
                found, metrics = ray.get([progress.read_notes.remote(), progress.read.remote()], timeout=LINE_S)
            except ray.exceptions.GetTimeoutError:
                continue  # A busy machine answers a moment later, and the run does not depend on it.
            for note in found[said:]:
                print(f"{self.name}: note: {note}", flush=True)
            said = len(found)
            if metrics and not over:
                print(f"{self.name} {metrics['step']}/{steps} {self.describe(metrics)}", flush=True)


def plan(config: SupervisedConfig, groups: list[RowGroup]) -> tuple[int, int]:
    """Return (number of optimiser steps, number of passes over the data that they take).

    `groups` are the row groups of the training files.
    """
    rows = sum(group.rows for group in groups)
    batch = config.data.train_batch_size
    steps = config.trainer.total_training_steps or rows * config.trainer.total_epochs // batch
    if steps == 0:
        raise ConfigError(
            f"data.train_files holds {rows} rows, less than one data.train_batch_size={batch}; lower it or give more."
        )
    return steps, -(-steps * batch // rows)


def _start_ray(config: SupervisedConfig) -> None:
    trainer = config.trainer
    cpus = trainer.num_workers * trainer.cpus_per_worker
    local_cpus = trainer.ray_num_cpus or max(os.cpu_count() or 1, round(cpus + 0.5) + DATA_CPUS)
    if not cluster.start(local_cpus, None, {}):
        return
    available = ray.cluster_resources()
    for name, needed in (("CPU", cpus + 1), ("GPU", trainer.num_workers if trainer.use_gpu else 0)):
        if available.get(name, 0) < needed:
            raise ConfigError(
                f"the run needs {needed:g} {name}s (trainer.num_workers={trainer.num_workers}, "
                f"trainer.cpus_per_worker={trainer.cpus_per_worker:g}, and 1 CPU for the reader), but Ray has "
                f"{available.get(name, 0):g}; lower trainer.num_workers or add nodes."
            )
