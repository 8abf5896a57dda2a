"""Driver that the supervised jobs share: `python -m jobs.sft`, `jobs.reward_model` and `jobs.dpo`."""

import logging
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import ray
from rich.console import Console

from jobs.command import CONTINUES, as_called, called, message
from jobs.entry import command
from pipeline.config import ConfigError, load, to_flat
from pipeline.config.bounds import sentences, violations
from pipeline.config.described import default, descriptions
from pipeline.config.model import LoraConfig
from pipeline.config.paths import check_apart
from pipeline.config.places import name_from_root
from pipeline.config.schema import keys
from pipeline.config.supervised import SFTConfig, SupervisedConfig
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
from pipeline.plan.check_images import model_problems
from pipeline.plan.host import SLOW_PRODUCTS, slow_products
from pipeline.plan.models import not_causal, read_model
from pipeline.plan.trial import Load, try_model, try_same_tokens, try_tokenizer
from pipeline.run.faults import RunEnded, sentence
from pipeline.run.signals import INTERRUPTED
from pipeline.storage import checkpoints
from pipeline.storage.owner import of_folder, owned
from pipeline.supervised.data import CheckedRows, RowGroup, check_rows
from pipeline.supervised.driver import Training, start_ray
from pipeline.supervised.folder import Beginning, beginning
from pipeline.supervised.loop import SupervisedLoop
from pipeline.supervised.plan import SupervisedPlan, plan
from pipeline.track.loggers import TrackedRun, shown
from pipeline.track.provenance import masked_command
from pipeline.track.tracker import Tracker
from pipeline.train.schedule import jumps

DRY_RUN = "--dry-run"
DRY_RUN_HELP = "--dry-run checks settings, files and model, prints the plan and exits, without starting Ray."

C = TypeVar("C", bound=SupervisedConfig)


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

    rows_per_pass: int = 1
    """Number of conversations, each of `data.max_length` tokens, that one forward pass must be able to hold."""

    causal: bool = True
    """True if the model must be a causal language model."""

    @command
    def main(self, argv: list[str] | None = None) -> int:
        """Run the command. Returns the exit code: 0 done, 1 failed, 2 bad settings or input, 130 interrupted."""
        argv = sys.argv[1:] if argv is None else argv
        command = [*called(self.name), *argv]
        name = " ".join(called(self.name))
        if {"-h", "--help"} & set(argv):
            print(self.help())
            return 0
        try:
            config = load(self.schema, [word for word in argv if word != DRY_RUN], self.name)
            if DRY_RUN in argv:
                return self.show_plan(config)
            self.run(config, command)
        except ValueError as error:
            print(f"{name}: {message(error)}", file=sys.stderr)
            return 2
        except NotStarted as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        except (RunEnded, TimeoutError, ray.exceptions.RayError, OSError) as error:
            print(f"{name}: the run failed: {sentence(error)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"{name}: {CONTINUES}", file=sys.stderr)
            return INTERRUPTED
        return 0

    def help(self) -> str:
        """Return the text of `--help`: description of the command, and all settings."""
        lines = [as_called(self.about.strip()), "", DRY_RUN_HELP, "", "settings:"]
        for key in keys(self.schema).values():
            text = descriptions(key.owner)[key.name.rpartition(".")[2]].replace("`", "")
            plain = default(key).replace("`", "")
            lines.append(f"  {key.name}={plain}")
            lines += textwrap.wrap(text, 100, initial_indent="      ", subsequent_indent="      ")
        return "\n".join(lines)

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
        if (vision := config.model.vision) != "none":
            reads = hasattr(data, "image_key")
            only = f"model.vision={vision}: {self.name} cannot read images, only sft and train can; leave it out"
            problems += [f"{sentence}." for sentence in (model_problems(vision, base, path) if reads else [only])]
        if (taught := frozen_path(config)) is not None and base and (teacher := read_model(taught)):
            sizes = [model.config.get("vocab_size") for model in (teacher, base)]
            if sizes[0] != sizes[1]:
                problems.append(
                    f"teacher.path={taught} has a vocabulary of {sizes[0]} tokens and model.path={path} one of "
                    f"{sizes[1]}, so their log-probs of a token cannot be compared."
                )
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
                check_apart(Path(config.out), (path, config.model.tokenizer_path, lora.path))
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

    def run(self, config: C, command: Sequence[str] = ()) -> dict[str, float]:
        """Train, and save the model. Returns the last value of each metric, and the number of the last `step`.

        Args:
            config: the settings.
            command: words of the command as typed, which continues the run.

        Raises:
            ValueError: settings, files or the model cannot be used, or `out` holds another run.
            RunEnded, TimeoutError, ray.exceptions.RayError: the run failed.
            KeyboardInterrupt: the run was interrupted.
        """
        self.check(config)
        out = self._place(config)
        with owned([of_folder(out)], partial(print, flush=True)) as lost:
            prepared = self._prepare(config, out)
            lacking = prepared.plan.lacking()
            for name, text in [*prepared.lines, *([("note", lacking)] if lacking else [])]:
                print(f"{self.name}: {'note: ' if name == 'note' else ''}{text}", flush=True)
            logging.getLogger("ray").setLevel(logging.ERROR)
            started = start_ray(config)
            out.mkdir(parents=True, exist_ok=True)
            trainer, begin = config.trainer, prepared.begin
            names = trainer.project_name, out.name
            tracked = TrackedRun(out, to_flat(config), *names, begin.exists, command=masked_command(command))
            tracker = Tracker(tracked, prepared.plan.steps, trainer.logger, unit="step")
            training = Training(
                self.loop, prepared.plan, prepared.train_groups, prepared.val_groups, begin, tracker, lost
            )
            tracker.start()
            status, places = "failed", {}
            try:
                status = training.run(out)
                if status == "finished":
                    places["model"] = shown(out)
                    # The model takes their place: nothing continues a finished run.
                    shutil.rmtree(out / checkpoints.FOLDER, ignore_errors=True)
            except KeyboardInterrupt:
                status = "interrupted"
            finally:
                if status != "finished" and command:
                    places["to continue"] = shlex.join(command)
                tracker.finish(status, places)
                if started:
                    ray.shutdown()
            if status == "interrupted":
                raise KeyboardInterrupt
            if status == "failed":
                raise RunEnded(training.problem)
            return training.metrics

    def show_plan(self, config: C) -> int:
        """Check everything that can be checked without Ray, and print the plan. Returns the exit code: 2 if this
        machine cannot run it.

        Raises:
            ValueError, OSError: as `run`.
        """
        self.check(config)
        out = self._place(config)
        prepared = self._prepare(config, out)
        table = prepared.plan.render(prepared.checked, shown(out))
        for name, text in [*prepared.lines, ("first row", prepared.checked.first)]:
            table.add_row(name, text)
        console = Console(markup=False)
        console.print(table)
        if lacking := prepared.plan.lacking():
            console.print(f"this machine cannot run it: {lacking}", soft_wrap=True)
        return 2 if lacking else 0

    def _place(self, config: C) -> Path:
        """Make the paths in the settings absolute, and return the folder `out`."""
        out = Path(os.path.realpath(config.out or ""))
        config.out = str(out)
        name_from_root(config)
        return out

    def _prepare(self, config: C, out: Path) -> "Prepared":
        """Check files, tokenizer and model, and plan the run. Nothing is written or started.

        Raises:
            ValueError, OSError: as `run`.
        """
        data, encoder = config.data, self.loop.encoder
        train_groups = encoder.find_row_groups(data.train_files, "data.train_files", data)
        val_groups = encoder.find_row_groups(data.val_files, "data.val_files", data) if data.val_files else []
        begin = beginning(out, config)
        resolved = plan(config, train_groups, val_groups, self.causal, self.rows_per_pass)
        tokenizer = load_tokenizer(config.model)
        check_attention(config.model)
        check_settings(config.model, tokenizer)
        lines: list[tuple[str, str]] = []
        auto = "AutoModelForCausalLM" if self.causal else "AutoModelForSequenceClassification"
        if found := coverage(config.model, auto=auto):
            lines.append(("adapters" if found.complete else "note", f"adapters are {found.text}"))
        check_template_arguments(tokenizer, data.apply_chat_template_kwargs)
        load: Load = load_policy if self.causal else partial(load_reward_model, new_head=True)
        tried = [*try_tokenizer(tokenizer, config.model), *try_model(config.model, "model.path", load)]
        if (path := frozen_path(config)) is not None:
            other = replace(config.model, path=path, lora=LoraConfig())
            tried += [
                *try_same_tokens(tokenizer, other, "teacher.path"),
                *try_model(other, "teacher.path", load_policy),
            ]
        checked = check_rows(train_groups, val_groups, encoder.of(config.model, data))
        if begin.saved:
            begin.notes += jumps(begin.saved.progress, {"model": (config.optim, resolved.steps)})
        slow = slow_products(config.model.dtype, config.fsdp, config.trainer.use_gpu)
        processor = [f"{SLOW_PRODUCTS}fsdp.param_dtype=float32"] * slow
        lines += [("note", note) for note in (*processor, *begin.notes, *tried, *checked.notes)]
        if self.causal:
            ends = find_ends(config.model, tokenizer, data.apply_chat_template_kwargs)
            taught = "" if ends.learnt else "; the chat template writes none after a last answer, so none is learnt"
            lines.append(("ends", f"{ends.line}{taught}"))
        return Prepared(train_groups, val_groups, begin, resolved, checked, lines)


def frozen_path(config: SupervisedConfig) -> str | None:
    """Return the path of the job's teacher; None without one."""
    return config.teacher.path if isinstance(config, SFTConfig) else None


@dataclass(frozen=True)
class Prepared:
    """A supervised run that has been checked and planned."""

    train_groups: list[RowGroup]
    val_groups: list[RowGroup]
    begin: Beginning
    plan: SupervisedPlan
    checked: CheckedRows
    lines: list[tuple[str, str]]
    """Lines for the user, as (name, text)."""
