"""What can be known of an evaluation before engines start: settings, prompts, reward, resources, and what is done."""

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from pipeline.config import Config
from pipeline.evaluate.folder import Folder, described, digest
from pipeline.evaluate.prompts import Pages
from pipeline.evaluate.settings import checked, chosen_ks, in_flight
from pipeline.evaluate.summary import Summary
from pipeline.plan import Plan, check_resources
from pipeline.prompts.files import data_sources
from pipeline.prompts.stage import sources
from pipeline.reward.dry import check_sources, dry_call
from pipeline.track.loggers import shown

CHECKED_PROMPTS = 256
"""Prompts that are made before anything starts; the others are checked as they are read."""

EVALUATIONS = "evaluations"
"""Folder of evaluations: below a run, or else below the current one."""


@dataclass
class Evaluation:
    """An evaluation that has been checked and can begin."""

    config: Config
    """What `settings.used` returned."""
    plan: Plan
    folder: Folder
    pages: Pages
    name: str
    home: Path
    """Folder of MLflow's embedded store: the run's, or else the evaluation's own."""
    iteration: int
    """What the model has reached in its run; 0 without one."""
    prompts: int
    """Prompts in all; those included that will be left out as too long or unusable."""
    description: dict[str, Any]
    summary: Summary = field(repr=False)
    """Of the responses that are there already."""

    @property
    def complete(self) -> bool:
        """Whether all responses are there."""
        return bool(self.folder.result().get("complete"))


def prepare(
    config: Config, iteration: int = 0, run_dir: Path | None = None, out: Path | None = None, k: str | None = None
) -> Evaluation:
    """Check an evaluation, down to a call of its reward; nothing is started and nothing written.

    Args:
        config: what `settings.used` returned, all paths absolute.
        iteration: what the model has reached in its run.
        run_dir: the run that is evaluated.
        out: folder of the result; None chooses one from what is evaluated.
        k: the option `--k`.

    Raises:
        ValueError, OSError, ImportError: settings, files, reward or resources cannot be used.
    """
    plan = checked(config)
    ks = chosen_ks(k, config.rollout.val_kwargs.n)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _, source = sources(config)
    assert source is not None
    check_sources(data_sources(source.files, config.data.max_bad_rows > 0), config.reward)
    dry_call(itertools.islice(source.chunks(1, epochs=1), CHECKED_PROMPTS), config.reward)
    if not os.environ.get("RAY_ADDRESS"):
        check_resources(plan)

    description = described(config, [file.name for file in source.files])
    subject = run_dir.resolve().name if run_dir else Path(config.model.path or "").name
    what = Path(source.files[0].name).stem + (f"+{len(source.files) - 1}" if len(source.files) > 1 else "")
    if out is None:
        parent = run_dir / EVALUATIONS if run_dir else Path(EVALUATIONS) / subject
        out = parent / f"{what}-{digest(description)}"
    folder, summary = Folder(out.absolute()), Summary(ks)
    folder.check(description)
    done = folder.read(summary)
    chunks = -(-source.len_estimate // config.rollout.chunk_prompts)
    return Evaluation(
        config=config,
        plan=plan,
        folder=folder,
        pages=Pages(chunks, done),
        name=f"{subject} on {what}",
        home=(run_dir or folder.path).absolute(),
        iteration=iteration,
        prompts=source.len_estimate,
        description=description,
        summary=summary,
    )


def render(evaluation: Evaluation) -> Table:
    """What would be done, for the terminal."""
    config, pages = evaluation.config, evaluation.pages
    rollout, sampling = config.rollout, config.rollout.val_kwargs
    table = Table(title=f"Evaluation of {evaluation.name}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    reached = f" (iteration {evaluation.iteration})" if evaluation.iteration else ""
    table.add_row("model", f"{config.model.path}{reached}")
    table.add_row("prompts", f"{evaluation.prompts:,} of {', '.join(evaluation.description['prompt_files'])}")
    top = f", top_p {sampling.top_p:g}, top_k {sampling.top_k}" if sampling.temperature else ""
    how = f"temperature {sampling.temperature:g}{top}" if sampling.temperature else "greedy"
    table.add_row("responses", f"{sampling.n} to each prompt, {how}, at most {config.data.max_response_length} tokens")
    table.add_row("k", ", ".join(map(str, evaluation.summary.ks)))
    table.add_row(
        "chunks",
        f"{pages.chunks:,} of {rollout.chunk_prompts} prompts, {len(pages.done):,} of them done; "
        f"{in_flight(config)} in flight per engine",
        end_section=True,
    )
    for stage in evaluation.plan.stages:
        many = f"{'at least ' if stage.at_least else ''}{stage.count} x {stage.cpus:g} CPU"
        table.add_row(
            "reward" if stage.at_least else stage.name, many + (f" + {stage.gpus:g} GPU" if stage.gpus else "")
        )
    table.add_row("in all", f"{evaluation.plan.cpus:g} CPUs, {evaluation.plan.gpus:g} GPUs", end_section=True)
    table.add_row("result", shown(evaluation.folder.path))
    return table
