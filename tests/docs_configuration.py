"""Write `docs/configuration.md` from the dataclasses: `python -m tests.docs_configuration [--check]`.

The docstring under each field is the only description of a key, so the page and the code cannot disagree.
"""

import argparse
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs.entry import command
from pipeline.catalogue import ESTIMATORS, POLICY_LOSSES
from pipeline.config import Config
from pipeline.config.bounds import bounds_of
from pipeline.config.described import default, descriptions
from pipeline.config.preference import DPOConfig
from pipeline.config.schema import Key, keys
from pipeline.config.supervised import PreferenceConfig, SFTConfig
from pipeline.prompts.sampler import SAMPLERS
from pipeline.registry import Entry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

<!-- Written by `make docs` from the dataclasses; edit the docstrings there. -->

Later settings win: the defaults below, `configs/train.yaml`, the experiment (`experiment=countdown_cpu` takes
`configs/experiment/countdown_cpu.yaml`), the algorithm (`algorithm=dapo` takes `configs/algorithm/dapo.yaml`), then
arguments such as `actor.optim.lr=1e-5`. A list is written `trainer.logger=[console,mlflow]`, a value with special
characters in quotes: `'model.path="/models/a=b"'`. Keys with the default `{}` take any name inside:
`rollout.engine_kwargs.max_model_len=2048`, `reward.source_scale.openai/gsm8k=2`. A name with `=`, or with a dot where
values may be mappings, stands in quotes: `'reward.source_scale."x=y"=2'`. JSON holds any name:
`'reward.source_scale={"x=y": 2}'`. `~reward.source_scale.gsm8k` takes a name out. In YAML files, names that read as
numbers, truth values or null stand in quotes: `"2024": 2`.

`--config-dir DIR` also finds your own files in `DIR/experiment/` and `DIR/algorithm/`. Algorithms can be combined:
`algorithm=[dapo,tis]` ([all of them](algorithms.md)). An experiment names the algorithm that it begins from with
`defaults: [/algorithm/dapo, _self_]`.
"""

SUPERVISED = """
## Supervised training and preferences

The settings of `slipstream sft`, `slipstream reward_model` and `slipstream dpo`. Their `model` and `model.lora` are
described above, `optim` and `fsdp` are `actor.optim` and `actor.fsdp`; `slipstream sft --help` has all defaults."""
JOBS = {"sft": SFTConfig, "reward_model": PreferenceConfig, "dpo": DPOConfig}

BUILT_IN: dict[str, Mapping[str, Any]] = {
    "algorithm.adv_estimator": ESTIMATORS,
    "actor.policy_loss.loss_mode": POLICY_LOSSES,
    "data.sampler": SAMPLERS,
}
"""Keys that take a name or an import path, with the choices by their names."""


def page() -> str:
    """Write the whole page as Markdown, one table per section; sections of one dataclass share a table."""
    alike: dict[type, dict[str, list[Key]]] = {}
    for key in keys(Config).values():
        section = key.name.rpartition(".")[0]
        alike.setdefault(key.owner, {}).setdefault(section, []).append(key)
    lines = [HEAD]
    for owner, sections in alike.items():
        title = ", ".join(f"`{name}`" for name in sections)
        lines += [
            f"\n## {title}\n",
            f"{inspect.getdoc(owner)}\n",
            "| key | default | meaning |",
            "|---|---|---|",
        ]
        for rows in zip(*sections.values(), strict=True):
            lines.append(_row(rows))
    return "\n".join([*lines, SUPERVISED, *_supervised(set(alike))]) + "\n"


def _supervised(described: set[type]) -> Iterator[str]:
    """Yield the tables of the jobs in `JOBS`, one per dataclass that is not among those `described` above."""
    owners: dict[type, dict[str, list[Key]]] = {}
    for job, schema in JOBS.items():
        for key in keys(schema).values():
            if key.owner not in described:
                owners.setdefault(key.owner, {}).setdefault(job, []).append(key)
    for owner, by_job in owners.items():
        first = [*by_job.values()][0]
        section = first[0].name.rpartition(".")[0]
        of = " and ".join(f"`{job}`" for job in by_job) if len(by_job) < len(JOBS) else "all three"
        yield f"\n### {f'`{section}`' if section else 'Folder'} of {of}\n"
        yield f"{inspect.getdoc(owner)}\n\n| key | default | meaning |\n|---|---|---|"
        yield from (_row((key,)) for key in first)


def _row(same: tuple[Key, ...]) -> str:
    """Format one key. If several sections have it, show only its last part, and all its different defaults."""
    key = same[0]
    text = descriptions(key.owner)[key.name.rpartition(".")[2]]
    names = [
        name for name, choice in BUILT_IN.get(key.name, {}).items() if not isinstance(choice, Entry) or choice.built_in
    ]
    if names and not all(f"`{name}`" in text for name in names):
        text += f" Built in are {', '.join(f'`{name}`' for name in names)}."
    choices = bounds_of(key.owner, key.name.rpartition(".")[2]).choices
    if not all(f"`{choice}`" in text for choice in choices if choice):
        listed = ", ".join("null" if choice is None else f"`{choice}`" for choice in choices)
        text += f" One of {listed}."
    name = key.name if len(same) == 1 else key.name.rpartition(".")[2]
    defaults = list(dict.fromkeys(default(each) for each in same))
    cells = (f"`{name}`", " / ".join(defaults), text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@command
def main(argv: list[str] | None = None) -> int:
    """Write the page, or with `--check` test whether it is up to date; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.docs_configuration", description="Write the list of settings."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    if parser.parse_args(argv).check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
            return 0
        print(f"{PAGE.name} is out of date; run make docs", file=sys.stderr)
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
