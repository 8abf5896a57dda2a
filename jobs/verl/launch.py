"""The command that starts verl, and its settings as verl reads them: with Hydra's own grammar."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from jobs.verl.keys import SECTIONS
from jobs.verl.recorder import Command, ScriptError, ScriptRecording

_PPO = re.compile(r"(.*\.)?(verl\.trainer\.main_ppo(_sync)?|recipe\.dapo\.(src\.)?main_dapo)")
_ASYNC = re.compile(r".*\b(one_step_off_policy|fully_async_policy)\.\w*main\w*")
_VERL = re.compile(r"(.*\.)?(verl|recipe|examples)\..*|main_\w+")
_AS_TEXT = re.compile(r"-m\s+(verl|recipe)\.")
_OTHERS = {
    "sft": "supervised fine-tuning, for which there is jobs.sft",
    "rm_trainer": "a reward model's training, for which there is jobs.reward_model",
    "gener": "generation, for which there is jobs.evaluate",
    "eval": "an evaluation, for which there is jobs.evaluate",
    "merge": "an export of checkpoints, for which there is jobs.export",
}
"""Purposes of other programs of verl, by a part of their names."""

_FIRST_SETTING = re.compile(r"[+~]{0,2}(actor_rollout_ref|data|critic|algorithm|trainer|reward\w*)\.[\w.]+=")
_SETTING = re.compile(r"([+~]{0,2})([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
_OPTION = re.compile(r"(--config-(?:name|path|dir)|-c[npd])(?:=(.*))?", re.DOTALL)
MAX_LEVELS = 32
"""Levels of lists and dicts in a value."""
_DEFAULT_FILES = (
    *(f"{name}{ending}" for name in ("ppo_trainer", "ppo_megatron_trainer") for ending in ("", ".yaml", ".yml")),
    *("config", "./config"),
)


@dataclass(frozen=True)
class Setting:
    """One key that verl is given."""

    key: str
    text: str
    """The value as it is written."""
    value: Any = None
    problem: str | None = None
    """The reason why the value cannot be converted; None if it can."""


@dataclass
class Settings:
    """All settings that verl is given. The last one of equal keys counts."""

    settings: dict[str, Setting] = field(default_factory=dict)
    cannot: list[str] = field(default_factory=list)
    """Sentences about arguments and files that may hold settings."""
    notes: list[str] = field(default_factory=list)

    def add(self, arguments: Iterable[str], unknown: Mapping[str, str] | None = None) -> None:
        """Add the settings in `arguments`. `unknown` has the reason why the value of an argument is not known."""
        parser = OverridesParser.create()
        option = ""
        for argument in arguments:
            reason = (unknown or {}).get(argument)
            match = _SETTING.fullmatch(argument)
            named = _OPTION.fullmatch(f"{option}={argument}" if option else argument)
            option = named[1] if named and named[2] is None else ""
            if named:
                if named[2] and named[2].startswith("ppo_megatron_trainer"):
                    self.notes.append(f"{named[0]}: FSDP2 trains, with the sizes that the script gives to Megatron")
                if named[2] not in (*_DEFAULT_FILES, None):
                    self.cannot.append(f"{named[0]}: the settings in a file of verl's are not read; give them by key")
            elif match and (match[3] is not None or match[1] == "~"):
                problem = f"its value is not known: {reason}" if reason else None
                for setting in _read(parser, argument, match, problem):
                    # A key that is given again moves to its new place.
                    self.settings.pop(setting.key, None)
                    self.settings[setting.key] = setting
            elif reason:
                self.cannot.append(f"{argument} may hold settings that are not known: {reason}")
            else:
                self.cannot.append(f"{argument} is not a setting of the form key=value")


def launch(recording: ScriptRecording, source: str, settings: Settings) -> None:
    """Add the settings of the command in `source` that starts PPO training.

    Raises:
        ScriptError: no command does, or a command starts another program of verl's or one that is not known.
    """
    starts: list[tuple[Command, str, list[str]]] = []
    others: list[tuple[Command, str]] = []
    for command in recording.commands:
        program, arguments = _program(command.arguments)
        if _FIRST_SETTING.match(command.arguments[0]):
            settings.notes.append(
                "a comment or a missing backslash ends the command above, so verl does not see "
                f"{' '.join(command.arguments)} in {source}{_line(command)}"
            )
        elif any(_FIRST_SETTING.match(argument) for argument in command.arguments) or _VERL.fullmatch(program):
            if _PPO.fullmatch(program) or _ASYNC.fullmatch(program):
                starts.append((command, program, arguments))
            else:
                others.append((command, program))
    if not starts and others:
        command, program = others[0]
        raise ScriptError(f"{source}{_line(command)}{refusal(program, command.arguments[0])}")
    for command, _, _ in starts:
        if command.doubt:
            raise ScriptError(f"{source}{_line(command)}: it is not known whether verl is started: {command.doubt}")
    for command, program, arguments in starts[:1]:
        settings.add(arguments, command.unknown)
        if "xargs" in command.arguments:
            settings.cannot.append(
                f"{source}{_line(command)}: `xargs` adds settings from its input, which are not read"
            )
        for text, reason in command.more.items():
            named = f"{text} may be a setting, too" if "=" in text else "more settings may follow"
            settings.cannot.append(f"{named}: {reason}")
        if _ASYNC.fullmatch(program):
            settings.notes.append(
                f"{program} generates ahead; here algorithm.max_staleness and rollout.weight_update do that"
            )
    for command, program, _ in starts[1:]:
        settings.cannot.append(f"{source} starts {program} again{_line(command)}, which is not converted")
    for command in recording.commands:
        if any(_AS_TEXT.search(argument) for argument in command.arguments):
            text = (
                f"`{command.arguments[0]}` gets a command of verl's as text, which is not run; make that text a script"
            )
            settings.cannot.append(f"{source}{_line(command)}: {text}")
    settings.cannot += [f"{source}, {missing}" for missing in recording.missing]
    settings.notes += [f"{source}: {note}" for note in recording.notes]
    for command, program in others:
        settings.notes.append(f"{source} also starts {program or 'verl'}{_line(command)}, which is not converted")


def _line(command: Command) -> str:
    return f", line {command.line}" if command.line else ""


def _program(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the Python module that a command runs, and the module's arguments."""
    for place, argument in enumerate(arguments):
        if argument == "-m" and re.fullmatch(r"[A-Za-z_][\w.]*", "".join(arguments[place + 1 : place + 2])):
            return arguments[place + 1], arguments[place + 2 :]
        if argument.endswith(".py") and "=" not in argument:
            return argument.removesuffix(".py").lstrip("./").replace("/", "."), arguments[place + 1 :]
    return "", []


def refusal(program: str, name: str = "") -> str:
    """Return the reason why a program of verl's is not converted; `name` is the first word of the command."""
    if _PPO.fullmatch(program):
        return ""
    if not program:
        return f": settings of verl are given to `{name}`, and it is not known what that starts"
    purpose = next((purpose for part, purpose in _OTHERS.items() if part in program), "another trainer than verl's PPO")
    return f": {program} is not PPO training but {purpose}; only verl.trainer.main_ppo and its kind are converted"


def inner_scripts(recording: ScriptRecording) -> list[str]:
    """Return the names of scripts that a script starts; they are not read."""
    arguments = (argument for command in recording.commands for argument in command.arguments)
    return list(dict.fromkeys(argument for argument in arguments if argument.endswith(".sh")))


def _read(parser: OverridesParser, argument: str, match: re.Match[str], problem: str | None) -> Iterator[Setting]:
    key, text = match[2], match[3] or ""
    if problem is None and match[1] == "~":
        problem = "it takes a key of verl away; here every key has a value"
    if problem is None and _levels(text) > MAX_LEVELS:
        problem = f"its value has more than {MAX_LEVELS} levels of brackets"
    if problem is None:
        try:
            override = parser.parse_override(argument)
            if not override.is_sweep_override():
                yield from _leaves(key, text, override.value())
                return
            problem = "it gives several values for a sweep; one run takes one"
        except HydraException:
            problem = "Hydra cannot read the value, so verl refuses it too"
        except RecursionError:
            problem = "its brackets are nested too deeply to be read"
        except ValueError as error:
            problem = f"its value cannot be read ({error})"
    yield Setting(key, text, problem=problem)


def _levels(text: str) -> int:
    """Count levels of lists and dicts. Hydra's parser would take seconds for thousands of them."""
    level = most = 0
    for letter in text:
        level += (letter in "[{") - (letter in "]}")
        most = max(most, level)
    return most


def _leaves(key: str, text: str, value: Any) -> Iterator[Setting]:
    if isinstance(value, dict) and value and all(key != section for section, _ in SECTIONS):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", str(inner), inner)
    elif "${" in str(value):
        yield Setting(key, text, problem="it is looked up in the environment or in another key; write the value out")
    else:
        yield Setting(key, text, value)
