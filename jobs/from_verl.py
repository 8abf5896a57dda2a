"""A verl launch script as an experiment of ours: `python -m jobs.from_verl SCRIPT_OR_OVERRIDES... [--out FILE]`.

    python -m jobs.from_verl run_qwen2_7b.sh --out configs/experiment/qwen2_7b.yaml
    python -m jobs.train --dry-run experiment=qwen2_7b

The script is read, never run. See docs/from_verl.md, and `jobs/verl/` for what is converted and how.
"""

import argparse
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jobs.verl.convert import convert
from jobs.verl.script import Argument, Script
from jobs.verl.settings import Settings
from jobs.verl.state import Conversion
from jobs.verl.words import ScriptError
from pipeline.checks import check
from pipeline.config import ConfigError, load_config

EPILOG = """\
examples:
  python -m jobs.from_verl run_qwen2_7b.sh --out configs/experiment/qwen2_7b.yaml
  python -m jobs.from_verl env.sh run.sh trainer.total_epochs=3     scripts as if they were one, later settings win
  python -m jobs.from_verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8

The experiment goes to FILE or to standard output; what was not converted, and what means something else here, to
standard error and into the experiment's comments.
"""

ARGUMENTS = "the arguments"
WIDTH = 118


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code (0 converted, 2 nothing that could be)."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.from_verl",
        description="Convert a verl launch script into an experiment.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", nargs="+", metavar="SCRIPT_OR_OVERRIDES", help="bash scripts and key=value of verl")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the experiment here: DIR/experiment/NAME.yaml")
    parser.add_argument("--name", help="name of the run (trainer.experiment_name); default: verl's")
    options = parser.parse_intermixed_args(arguments)
    try:
        settings = read(options.sources)
        conversion = convert(settings.settings, options.name)
        conversion.notes[:0] = settings.notes
        names = ", ".join(Path(source).name for source in options.sources if Path(source).is_file()) or ARGUMENTS
        conversion.notes += problems(render(conversion, names))
        text = render(conversion, names, options.out)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(text, encoding="utf-8")
    except (OSError, ScriptError) as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return 2
    if not options.out:
        print(text, end="")
    for line in report(conversion):
        print(line, file=sys.stderr)
    if options.out:
        print(f"written: {options.out}", file=sys.stderr)
        if options.out.parent.name != "experiment":
            print("move it into a folder DIR/experiment to use it as --config-dir DIR", file=sys.stderr)
    return 0 if conversion.converted else 2


def read(sources: list[str]) -> Settings:
    """All settings of scripts and `key=value` arguments, in their order.

    Raises:
        OSError: a script does not exist or cannot be read.
        ScriptError: a script cannot be understood, or nothing of verl's is set anywhere.
    """
    script, settings = Script(), Settings()
    for source in sources:
        path = Path(source)
        if "=" in source and not path.is_file():
            settings.add([Argument(source, 1, ARGUMENTS)])
            continue
        if not path.is_file():
            raise OSError(f"there is no script {source}; give a file, or settings of verl as key=value")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ScriptError(f"{source} is not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
        before = len(script.launches)
        script.read(text, path.name)
        launches = script.launches[before:]
        if len(launches) > 1:
            others = ", ".join(str(launch.line) for launch in launches[1:])
            settings.notes.append(
                f"{path.name} starts verl more than once; the command of line {launches[0].line} is converted, not "
                f"that of line {others}"
            )
        for launch in launches[:1]:
            settings.add(launch.arguments)
            settings.notes += launch.notes
    settings.notes += script.notes
    if not settings.settings:
        raise ScriptError(
            f"no settings of verl found in {', '.join(sources)}; expected a command such as "
            "`python3 -m verl.trainer.main_ppo data.train_files=...`, or key=value arguments"
        )
    return settings


def render(conversion: Conversion, source: str, out: Path | None = None) -> str:
    """The experiment as YAML, with what was not converted and what differs as comments."""
    name = out.stem if out else "NAME"
    lines = [
        "# @package _global_",
        *_comment(f"Converted by python -m jobs.from_verl from {source}; as DIR/experiment/{name}.yaml it is run by"),
        *_comment(f"  python -m jobs.train --config-dir DIR experiment={name}"),
    ]
    if conversion.left:
        lines += ["#", "# Not converted:"]
        lines += [line for left in conversion.left for line in _comment(f"{left.key}={left.text}: {left.reason}", "- ")]
    if conversion.notes:
        lines += ["#", "# Different here:"]
        lines += [line for note in conversion.notes for line in _comment(note, "- ")]
    return "\n".join([*lines, *_body(conversion)]) + "\n"


def _body(conversion: Conversion) -> Iterator[str]:
    """Nested keys, one a line."""
    above: list[str] = []
    for key, value in conversion.values.items():
        *sections, last = key.split(".")
        for depth, section in enumerate(sections):
            if above[: depth + 1] != sections[: depth + 1]:
                if not depth:
                    yield ""
                yield f"{'  ' * depth}{section}:"
                above = sections[: depth + 1]
        above = sections
        mark = "  # verl's default" if key in conversion.defaults else ""
        yield f"{'  ' * len(sections)}{last}: {_scalar(value)}{mark}"


class _OneLine(yaml.SafeDumper):
    """Writes values in one line each, and text so that it is read as text."""


def _text(dumper: _OneLine, text: str) -> yaml.ScalarNode:
    # OmegaConf reads more as a number than PyYAML, and a value in several lines would not stay in its place.
    style = '"' if not text.isprintable() or _number(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_OneLine.add_representer(str, _text)


def _scalar(value: Any) -> str:
    """A value in one line of YAML."""
    text: str = yaml.dump(value, Dumper=_OneLine, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _comment(text: str, bullet: str = "") -> list[str]:
    first, further = f"# {bullet}", f"# {' ' * len(bullet)}"
    indent = text[: len(text) - len(text.lstrip(" "))]
    return textwrap.wrap(
        plain(text),
        WIDTH,
        initial_indent=first + indent,
        subsequent_indent=further + indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def plain(text: str) -> str:
    """`text` in one line without control characters, so that it neither ends a comment nor moves a cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def problems(text: str) -> list[str]:
    """Why the experiment cannot be run on this machine as it is, one sentence per problem."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment" / "converted.yaml"
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        try:
            check(load_config(["experiment=converted"], config_dir=folder))
        except ConfigError as error:
            found = [line.removeprefix("- ") for line in str(error).splitlines()]
            # The first of several lines only counts the others.
            return [f"to be settled: {line.replace(str(path), 'this file')}" for line in found[len(found) > 1 :]]
    return []


def report(conversion: Conversion) -> Iterator[str]:
    """What was converted, what was not and what differs, line by line."""
    yield (
        f"converted {len(conversion.converted)} keys of verl, and wrote out {len(conversion.defaults)} of verl's "
        "defaults that differ from ours"
    )
    if conversion.left:
        yield f"not converted ({len(conversion.left)}):"
        yield from (f"  {plain(f'{left.key}={left.text}: {left.reason}')}" for left in conversion.left)
    if conversion.notes:
        yield f"different here ({len(conversion.notes)}):"
        yield from (f"  {plain(note)}" for note in conversion.notes)


if __name__ == "__main__":
    sys.exit(main())
