"""The commands that bash scripts start, found by running the scripts with recorders in place of programs.

Scripts are foreign code. They run in the sandbox of reward code, which has no network, no files of the user, and
limits of time, memory and output; `inside.py` is the program in the sandbox. It runs the scripts several times. An
argument that differs between the runs is not known, and has a reason.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import runner
from pipeline.reward.sandbox.isolation import SandboxError
from pipeline.reward.sandbox.outcome import ProgramRun

_INSIDE = Path(__file__).with_name("inside.py")
_LIMITS: dict[str, Any] = {
    "timeout_s": 120.0,
    "total_timeout_s": 120.0,
    "cpu_s": 30,
    "max_processes": 64,
    "output_kb": 8192,
    "packages": False,
}
_NOT_SET = re.compile("\x02(\\w+)\x03")
_FILE_TEST = re.compile(r"(?:\[|\btest|&&|\|\||!)\s+-[defrswx]\s|\bcommand\s+-[vV]\b")
_TESTED = re.compile(r"\[|\(\(|\b(if|elif|case|while|until|test)\b")
_SHOWN = 3  # commands or lines in a reason


class ScriptError(ValueError):
    """A script that cannot be read for certain."""


@dataclass
class Command:
    """A program that a script starts."""

    arguments: list[str]
    line: int
    """Line of the script; 0 if it is not known."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Arguments whose values are not known, each with its reason."""
    more: dict[str, str] = field(default_factory=dict)
    """Arguments that the command may have, too, each with its reason."""
    doubt: str | None = None
    """The reason why it is not known whether the command runs."""


@dataclass
class ScriptRecording:
    """The commands of one script."""

    text: str
    error: str = ""
    """The `exit` that ends the scripts, or else the last error of bash."""
    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences about values that the script reads and the run does not know."""
    missing: list[str] = field(default_factory=list)
    """Sentences about files that the script reads, and that may hold settings."""


def record(scripts: Mapping[str, str], variables: Mapping[str, str], bare: bool = False) -> list[ScriptRecording]:
    """Return a recording of each script. One shell runs them all, so later ones see the variables of earlier ones.

    Args:
        scripts: texts by absolute path.
        variables: the environment, with PWD.
        bare: run them only with limits if this machine allows no sandbox.

    Raises:
        ScriptError: the sandbox does not work, a limit is passed, or the scripts only fail.
    """
    job = {"scripts": list(scripts.items()), "variables": dict(variables), "work": variables["PWD"], "now": time.time()}
    outcome = _outcome(json.dumps(job), bare)
    try:
        answer = json.loads(outcome.stdout)
    except ValueError:
        raise ScriptError(f"the sandbox ended the script: {outcome.failure or 'it printed no report'}") from None
    runs, not_set = answer["runs"], answer["not_set"]
    first = runs.pop("first")
    errors = [_shown(line[line.index("line ") :]) for line in first["errors"]]
    for error in errors:
        if "/dev/fd/" in error:
            raise ScriptError(f"{error}: `<(...)` and `>(...)` do not work in the sandbox")
    error = errors[-1] if errors else "" if first["exited"] else "line 1: the script does not end"
    if not first["commands"] and error:
        raise ScriptError(error)
    if first["exits"] and not first["ended"]:
        error = first["exits"][-1]
    recordings = [ScriptRecording(text, error) for text in scripts.values()]
    for number, line, arguments in _entries(first):
        command = Command([_shown(text) for text in arguments], line)
        for text in arguments:
            if names := _NOT_SET.findall(text):
                command.unknown[_shown(text)] = "; ".join(_not_set(name, not_set) for name in dict.fromkeys(names))
            elif "/dev/fd/" in text:
                command.unknown[text] = f"`<(...)` in line {line} is a file of that run alone"
            elif answer["top"] in text:
                command.unknown[text] = "it is made from parts of a folder's name"
        if number < len(recordings):
            recordings[number].commands.append(command)
    for number, recording in enumerate(recordings):
        for kind, run in runs.items():
            _compare(recording, number, kind, run, not_set)
        _add_notes(recording, not_set if len(recordings) == 1 else {})
    return recordings


def _outcome(job: str, bare: bool) -> ProgramRun:
    code = _INSIDE.read_text(encoding="utf-8") + "\nmain()\n"
    try:
        return runner.run(code, job, SandboxConfig(isolation="namespaces", **_LIMITS))
    except SandboxError as error:
        if not bare:
            raise ScriptError(
                f"scripts run in a sandbox, which this machine does not allow ({error}). Allow user namespaces, give "
                "the settings as key=value instead of the script, or use --run for a script that you trust: it can "
                "then read all files that you may"
            ) from None
    try:
        return runner.run(code, job, SandboxConfig(isolation="none", **_LIMITS))
    except SandboxError as error:
        raise ScriptError(f"the script cannot run: {error}") from None


def _entries(run: Mapping[str, Any]) -> Iterable[tuple[int, int, list[str]]]:
    """Yield the commands of a run: number of the script, line, arguments."""
    for number, line, *arguments in run["commands"]:
        yield int(number), int(line), arguments


def _shown(text: str) -> str:
    return _NOT_SET.sub(r"${\1}", text)


def _not_set(name: str, lines: Mapping[str, int]) -> str:
    where = f"${name} in line {lines.get(name, 0)}"
    return f"{where} is an argument of the script" if name.isdecimal() else f"{where} is not set; give {name}=VALUE"


def _compare(
    recording: ScriptRecording, number: int, kind: str, run: dict[str, Any], not_set: Mapping[str, int]
) -> None:
    """Compare the commands of a script with the commands of the same lines in another run."""
    others: dict[int, set[str]] = {}
    lines = {command.line for command in recording.commands}
    for script, line, arguments in _entries(run):
        if script == number:
            others.setdefault(line, set()).update(map(_shown, _given(arguments)))
            if kind == "files" and arguments[0] in ("source", ".") and line not in lines:
                recording.notes.append(
                    f"line {line}: `{' '.join(arguments)}` is not read; give that file, if it is there"
                )
    own: dict[int, set[str]] = {}
    for command in recording.commands:
        own.setdefault(command.line, set()).update(_given(command.arguments))
    for place, command in enumerate(recording.commands):
        reason = _reason(kind, recording, recording.commands[:place], not_set)
        there = others.get(command.line)
        if there is None:
            # A run that ends early is not the one that the user means.
            if run["ended"] and kind != "globs":
                command.doubt = command.doubt or reason
            continue
        for text in _given(command.arguments):
            if text not in there and (kind != "globs" or re.search(r"[*?]", text)):
                command.unknown.setdefault(text, reason)
        keys = {text.partition("=")[0] for text in own[command.line]}
        for text in there - own[command.line]:
            if kind != "globs" and text.partition("=")[0] not in keys:
                command.more.setdefault(text, reason)


def _given(arguments: list[str]) -> list[str]:
    """Return the arguments of a module without the arguments of its launcher, or all arguments."""
    return arguments[arguments.index("-m") :] if "-m" in arguments else arguments


def _reason(kind: str, recording: ScriptRecording, earlier: list[Command], not_set: Mapping[str, int]) -> str:
    """Return the reason for differences between the first run and a run of this kind."""
    lines = recording.text.splitlines()
    if kind == "plain" and not_set:
        names = list(not_set)[:_SHOWN]
        return f"it depends on whether {' or '.join(f'${name}' for name in names)} is set; give {names[0]}=VALUE"
    if kind == "files":
        tests = [str(number) for number, line in enumerate(lines, 1) if _FILE_TEST.search(line)]
        where = f" (line {', '.join(tests[:_SHOWN])})" if tests else ""
        return f"it depends on files of the machine{where}"
    if kind in ("prints", "fails") and earlier:
        captured = [command for command in earlier if _captured(recording, command)]
        programs = list(dict.fromkeys(_name(command) for command in captured or earlier))
        what = "the output of {}, which is" if kind == "prints" else "the success of {}, which is"
        return f"it depends on {what.format(' or '.join(programs[:_SHOWN]))} not run"
    others = {"prints": "it depends on input that the script reads", "globs": "it stands for names of files"}
    return others.get(kind, "it changes from run to run")


def _captured(recording: ScriptRecording, command: Command) -> bool:
    """Return True if the script reads the output of a command, by the text of its line."""
    line = "".join(recording.text.splitlines()[max(command.line - 1, 0) : command.line])
    return re.search(r"(?:\$\(|`)[^)`]*" + re.escape(command.arguments[0]), line) is not None


def _name(command: Command) -> str:
    return f"`{' '.join(command.arguments)[:60]}` (line {command.line})"


def _add_notes(recording: ScriptRecording, not_set: Mapping[str, int]) -> None:
    """Name values that may have decided a branch, and files that are not read."""
    lines = recording.text.splitlines()
    for command in recording.commands:
        if command.arguments[0] in ("source", "."):
            recording.missing.append(
                f"line {command.line}: the file of `{' '.join(command.arguments)}` is not read; give it in front of "
                "this script"
            )
        elif _captured(recording, command):
            recording.notes.append(f"{_name(command)} is not run, and prints nothing here")
    for name, line in not_set.items():
        if _TESTED.search("".join(lines[line - 1 : line])):
            recording.notes.append(_not_set(name, not_set))
    recording.notes = list(dict.fromkeys(recording.notes))
