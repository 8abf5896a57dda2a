"""A verl launch script as an experiment of ours: `python -m jobs.from_verl SCRIPT_OR_OVERRIDES... [--out FILE]`.

    python -m jobs.from_verl run_qwen2_7b.sh --out configs/experiment/qwen2_7b.yaml
    python -m jobs.train --dry-run experiment=qwen2_7b

The script runs in a sandbox, with recorders in place of programs. See `slipstream docs coming_from`.
"""

import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jobs.command import called, new_parser
from jobs.entry import command
from jobs.verl.convert import convert
from jobs.verl.launch import Settings, inner_scripts, launch, refusal
from jobs.verl.recorder import ScriptError, ScriptRecording, record
from jobs.verl.state import State
from pipeline.config import ConfigError, load_config
from pipeline.config.paths import local_path, without_scheme
from pipeline.plan.checks import check

EPILOG = """\
examples:
  python -m jobs.from_verl run_qwen2_7b.sh --out configs/experiment/qwen2_7b.yaml
  python -m jobs.from_verl NNODES=2 run.sh trainer.total_epochs=3       variables before, settings behind the script
  python -m jobs.from_verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8

The experiment goes to FILE or to standard output, and the report to standard error and into the experiment's comments.
exit codes:
  0  converted, and the run means the same
  2  refused: no PPO training, or not to be read for certain; nothing is written
  3  converted, but what stands under "cannot be done here" is missing
"""
REFUSED, PARTLY = 2, 3

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=.*", re.DOTALL)
_IN_FRONT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_WIDTH = 118
_LONGEST = 300  # characters of a setting in a report


@command
def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = new_parser("from_verl", "Convert a verl launch script into an experiment.", EPILOG)
    parser.add_argument(
        "sources",
        type=without_scheme,
        nargs="+",
        metavar="SCRIPT_OR_OVERRIDES",
        help="bash scripts and key=value of verl",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=local_path, help="write the experiment to this new file: DIR/experiment/NAME.yaml"
    )
    parser.add_argument("--name", help="name of the run (trainer.experiment_name); default: verl's")
    parser.add_argument(
        "--run",
        action="store_true",
        help="run scripts that you trust with limits alone if this machine allows no sandbox",
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.out and os.path.lexists(options.out):
            raise OSError(f"--out {options.out} is there already; choose another file or remove it")
        settings = read(options.sources, options.run)
        conversion = convert(settings.settings, options.name)
        conversion.cannot += settings.cannot
        conversion.notes[:0] = settings.notes
        names = ", ".join(Path(source).name for source in options.sources if Path(source).is_file()) or "the arguments"
        conversion.notes += problems(render(conversion, names))
        text = render(conversion, names, options.out)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(text, encoding="utf-8")
    except (OSError, ScriptError) as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return REFUSED
    if not options.out:
        print(text, end="")
    for line in report(conversion):
        print(line, file=sys.stderr)
    if options.out:
        print(f"written: {options.out}", file=sys.stderr)
        if options.out.parent.name != "experiment":
            print("move it into a folder DIR/experiment to use it as --config-dir DIR", file=sys.stderr)
    return PARTLY if any(left.cannot for left in conversion.left) or conversion.cannot else 0


def read(sources: list[str], run: bool = False) -> Settings:
    """Read all settings of scripts and `key=value` arguments, in their order; an upper-case key is a variable.

    Raises:
        OSError, ScriptError: a script cannot be read (for certain), or does not start PPO training.
    """
    variables = {"PWD": os.getcwd()} | {name: os.environ[name] for name in ("HOME", "PWD") if name in os.environ}
    texts = {source: _script(source) for source in sources if os.path.isfile(source) or "=" not in source}
    first = sources.index(next(iter(texts))) if texts else 0
    given = {source for source in sources if _VARIABLE.fullmatch(source)}
    given |= {source for source in sources[:first] if _IN_FRONT.fullmatch(source)}
    variables |= {name: value for name, _, value in (source.partition("=") for source in sources if source in given)}
    paths = {source: str(Path(source).resolve()) for source in texts}
    names = ", ".join(Path(source).name for source in texts)
    settings = Settings()
    recordings: dict[str, ScriptRecording] = {}
    if texts:
        try:
            made = record({paths[source]: text for source, text in texts.items()}, variables, run)
        except ScriptError as error:
            raise ScriptError(f"{names}, {error}") from error
        recordings = dict(zip(texts, made, strict=True))
    for source in sources:
        if source in recordings:
            launch(recordings[source], Path(source).name, settings)
        elif source not in given:
            settings.add([source])
    if not settings.settings and settings.cannot:
        raise ScriptError(f"no settings of verl found: {settings.cannot[0]}")
    if not settings.settings:
        for source, recording in recordings.items():
            inner = [f"it starts {name}: give that script" for name in inner_scripts(recording)]
            named = re.search(r"(?m)^[^#]*-m\s+(verl\.[\w.]+)", texts[source])
            if named and not any(named[1] in command.arguments for command in recording.commands):
                reasons = filter(None, [*inner, recording.error, *recording.notes])
                why = refusal(named[1]) or ": ".join(["", *reasons][:2])
                raise ScriptError(f"{source} ends before it starts {named[1]}{why}")
            if inner:
                raise ScriptError(f"no settings of verl found in {source}: {inner[0]}")
        raise ScriptError(
            f"no settings of verl found in {', '.join(sources)}; expected a command such as "
            "`python3 -m verl.trainer.main_ppo data.train_files=...`, or key=value arguments"
        )
    return settings


def _script(source: str) -> str:
    if not os.path.isfile(source):
        raise OSError(f"there is no script {source}; give a file, or settings of verl as key=value")
    try:
        return Path(source).read_text(encoding="utf-8").replace("\r\n", "\n").replace("\0", "")
    except UnicodeDecodeError as error:
        raise ScriptError(f"{source} is not a text file in UTF-8 ({error.reason} at byte {error.start})") from error


def render(conversion: State, source: str, out: Path | None = None) -> str:
    """Format the experiment as YAML, with the report as comments."""
    name = out.stem if out else "NAME"
    lines = [f"Converted by {' '.join(called('from_verl'))} from {source}. As DIR/experiment/{name}.yaml it is run by"]
    lines += [f"  {' '.join(called('train'))} --config-dir DIR experiment={name}", *report(conversion)]
    if conversion.defaults:
        lines.append(f"verl's defaults, which differ from ours: {', '.join(sorted(conversion.defaults))}")
    text = "# @package _global_\n" + "".join(f"{part}\n" for line in lines for part in _comment(line))
    tree: dict[str, Any] = {}
    for key, value in conversion.values.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return text + yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=float("inf"), allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writer of text that YAML readers read as text."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # OmegaConf reads more text as numbers than PyYAML does, and a line may end in letters that are not printed.
    quoted = not text.isprintable() or re.fullmatch(r"[-+.\d_einfaINFA]+", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _text)


def _comment(text: str) -> list[str]:
    indent = "# " + text[: len(text) - len(text.lstrip(" "))]
    return textwrap.wrap(
        plain(text),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def plain(text: str) -> str:
    """Return `text` in one line without control characters, so that it neither ends a comment nor moves a cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def problems(text: str) -> list[str]:
    """Return the reasons why this machine cannot run the experiment unchanged, one sentence per problem."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment" / "converted.yaml"
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        try:
            check(load_config(["experiment=converted"], config_dir=folder))
        except ConfigError as error:
            found = [line.removeprefix("- ") for line in str(error).splitlines()]
            # The first of several lines only counts the others.
            return [f"to be decided: {line.replace(str(path), 'this file')}" for line in found[len(found) > 1 :]]
    return []


def report(conversion: State) -> Iterator[str]:
    """Yield the report line by line: impossible settings, settings lost without harm, and differences."""
    yield f"converted: {len(conversion.converted)} keys of verl"
    for title, cannot in (("cannot be done here", True), ("lost, but no result changes", False)):
        reasons: dict[str, list[str]] = {}
        for left in conversion.left:
            if left.cannot is cannot:
                reasons.setdefault(left.reason, []).append(f"{left.key}={left.text}"[:_LONGEST])
        lines = [f"  {reason}: {', '.join(settings)}" for reason, settings in reasons.items()]
        lines += [f"  {line}" for line in conversion.cannot] if cannot else []
        if lines:
            yield f"{title} ({len(lines)}):"
            yield from (f"  {plain(line)}" for line in lines)
    if conversion.notes:
        yield f"different here ({len(conversion.notes)}; see `slipstream docs coming_from`):"
        yield from (f"  {plain(note)}" for note in conversion.notes)


if __name__ == "__main__":
    sys.exit(main())
