"""The checks of an evaluation before engines start: settings, prompts, reward, resources and finished chunks."""

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from pipeline.config import Config
from pipeline.derived import chunk_prompts, uses_agent
from pipeline.evaluate.folder import Folder, described, digest
from pipeline.evaluate.settings import checked, chosen_ks, in_flight
from pipeline.evaluate.stream import Pages
from pipeline.evaluate.summary import Summary
from pipeline.models.ends import find_ends
from pipeline.plan.placement import check_resources
from pipeline.plan.plan import Plan
from pipeline.plan.table import stage_resources
from pipeline.plan.trial import try_models
from pipeline.prompts.assertions import check_assertions
from pipeline.prompts.parquet import data_sources
from pipeline.prompts.stage import loaders
from pipeline.reward.dry import check_names, check_sources, dry_call
from pipeline.rollout.dry import dry_episodes
from pipeline.run.submitted import joined
from pipeline.sampling import row_limits
from pipeline.track.loggers import shown

CHECKED_PROMPTS = 256
"""Number of prompts that are encoded and checked before anything starts; the others are checked as they are read."""

EVALUATIONS = "evaluations"
"""Name of the folder of evaluations, in the run's folder or, without a run, in the current folder."""


@dataclass
class Evaluation:
    """A checked evaluation, ready to begin."""

    config: Config
    """Settings from `settings.used`, which are all that an evaluation reads."""
    plan: Plan
    folder: Folder
    pages: Pages
    name: str
    run_dir: Path
    """Folder of the evaluated run, whose MLflow store tracks the evaluation; without a run, the folder of the
    result."""
    iteration: int
    """Iteration of the run that produced the model; 0 without a run."""
    prompts: int
    """Number of rows of the prompt files, including rows that will be left out as too long or unusable."""
    set_aside: str
    """Findings of `check_assertions` as a sentence; "" if there are none."""
    description: dict[str, Any]
    ends: str
    """A line on the tokens that end responses, for the terminal."""
    notes: list[str]
    """Notes on columns, fields and files of weights that are not read."""
    summary: Summary = field(repr=False)
    """Metrics of the responses so far; at first of the stored ones."""
    tokens_per_s: float | None = None
    """Response tokens per second since the first engine began to generate; of the last generation if all responses
    existed. None if it is not known."""

    @property
    def complete(self) -> bool:
        """True if all responses are stored."""
        return bool(self.folder.result().get("complete"))


def prepare(
    config: Config, iteration: int = 0, run_dir: Path | None = None, out: Path | None = None, k: str | None = None
) -> Evaluation:
    """Check an evaluation, including a call of its reward function, without starting or writing anything.

    Args:
        config: the result of `settings.used`, all paths absolute.
        iteration: the run's iteration from which the model is.
        run_dir: folder of the evaluated run.
        out: folder of the result; None derives one from the evaluation's description.
        k: the option `--k`.

    Raises:
        ValueError, OSError, ImportError: settings, files, reward or resources cannot be used.
    """
    plan = checked(config)
    ks = chosen_ks(k, config.rollout.val_kwargs.n)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _, loader = loaders(config.data, config.model, row_limits(config), config.trainer.seed)
    assert loader is not None
    limits = row_limits(config)["val"]
    sources = data_sources(loader.files, config.data.max_bad_rows > 0, limits.check_agent)
    check_sources(sources, config.reward, config.agent)
    set_aside = check_assertions([loader], limits.truths, config.data.max_bad_rows)
    if run_dir is None:
        # A run's settings may name training sources that these files lack.
        check_names(config.reward, {source for found in sources.values() for source in found})
    prompts = list(itertools.islice(loader.epoch(1), CHECKED_PROMPTS))
    dry_call(prompts, config.reward, agent=config.agent)
    if uses_agent(config):
        dry_episodes(config, loader.encoder.chat.tokenizer, prompts, calls=False)
    notes = list(try_models(config, loader.encoder.chat.tokenizer, trained=False))
    if not joined():
        check_resources(plan.stages, config.trainer.ray_num_cpus)

    description = described(config, [file.name for file in loader.files])
    model = run_dir.resolve().name if run_dir else Path(config.model.path or "").name
    files = Path(loader.files[0].name).stem + (f"+{len(loader.files) - 1}" if len(loader.files) > 1 else "")
    if out is None:
        parent = run_dir / EVALUATIONS if run_dir else Path(EVALUATIONS) / model
        out = parent / f"{files}-{digest(description)}"
    folder, summary = Folder(out.absolute()), Summary(ks)
    folder.check(description)
    done = folder.read(summary)
    chunks = -(-loader.epoch_rows // chunk_prompts(config))
    return Evaluation(
        config=config,
        plan=plan,
        folder=folder,
        pages=Pages(chunks, done),
        name=f"{model} on {files}",
        run_dir=(run_dir or folder.path).absolute(),
        iteration=iteration,
        prompts=loader.epoch_rows,
        set_aside=set_aside,
        description=description,
        ends=find_ends(config.model, loader.encoder.chat.tokenizer, config.data.apply_chat_template_kwargs).line,
        notes=[*loader.notes(), *notes],
        summary=summary,
        tokens_per_s=folder.result().get("tokens_per_s"),
    )


def render(evaluation: Evaluation) -> Table:
    """Format the evaluation as a table for the terminal."""
    config, pages = evaluation.config, evaluation.pages
    sampling = config.rollout.val_kwargs
    table = Table(title=f"Evaluation of {evaluation.name}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    reached = f" (iteration {evaluation.iteration})" if evaluation.iteration else ""
    table.add_row("model", f"{config.model.path}{reached}")
    table.add_row("prompts", f"{evaluation.prompts:,} of {', '.join(evaluation.description['prompt_files'])}")
    sampled = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}"
    if evaluation.set_aside:
        table.add_row("rows", evaluation.set_aside)
    how = sampled if sampling.temperature else "greedy"
    table.add_row("responses", f"{sampling.n} to each prompt, {how}, at most {config.data.max_response_length} tokens")
    table.add_row("ends", evaluation.ends)
    table.add_row("k", ", ".join(map(str, evaluation.summary.ks)))
    table.add_row(
        "chunks",
        f"{pages.chunks:,} of {chunk_prompts(config)} prompts, {len(pages.done):,} of them done; "
        f"{in_flight(config)} in flight per engine",
        end_section=True,
    )
    for stage in evaluation.plan.stages:
        table.add_row(stage.name, stage_resources(stage))
    table.add_row("in all", f"{evaluation.plan.cpus:g} CPUs, {evaluation.plan.gpus:g} GPUs", end_section=True)
    for note in evaluation.notes:
        table.add_row("note", escape(note))
    table.add_row("result", shown(evaluation.folder.path))
    return table
