"""`key=value` as verl reads it: with Hydra's own grammar."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from jobs.verl.keys import SECTIONS
from jobs.verl.script import Argument

_SETTING = re.compile(r"([+~]{0,2})([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
_INTERPOLATION = re.compile(r"\$\{(?!oc\.env:)")
_CONFIG_FILE = re.compile(r"(?:--config-(?:name|path|dir)|-c[npd])(?:=|$)")


@dataclass(frozen=True)
class Setting:
    """One key that verl is given."""

    key: str
    text: str
    """The value as it is written."""
    value: Any = None
    problem: str | None = None
    """Why the value cannot be converted; None where it is known."""


@dataclass
class Settings:
    """All that verl is given; of equal keys the last one counts."""

    settings: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, arguments: Iterable[Argument]) -> None:
        """Take the settings out of a command's arguments; other words are passed over."""
        parser = OverridesParser.create()
        for argument in arguments:
            match = _SETTING.fullmatch(argument.text)
            if _CONFIG_FILE.match(argument.text):
                self.notes.append(
                    f"{argument.text} in line {argument.line} of {argument.source}: what that file of verl's sets is "
                    "not read; the defaults of verl's ppo_trainer.yaml are taken instead"
                )
            elif match and (match[3] is not None or match[1] == "~"):
                for setting in _read(parser, argument, match):
                    # A key that is given again moves to its new place.
                    self.settings.pop(setting.key, None)
                    self.settings[setting.key] = setting
            elif argument.unknown:
                self.notes.append(
                    f"what {argument.text} holds needs the shell ({'; '.join(argument.unknown)}): settings in it are "
                    "not converted"
                )


def _read(parser: OverridesParser, argument: Argument, match: re.Match[str]) -> Iterator[Setting]:
    key, text = match[2], match[3] or ""
    if "." not in key and key.isupper():
        # An environment variable for the command, as in `env HF_HOME=/cache python3 -m ...`.
        return
    if argument.unknown:
        yield Setting(key, text, problem=f"its value needs the shell: {'; '.join(argument.unknown)}")
        return
    if match[1] == "~":
        yield Setting(key, text, problem="it takes a key of verl away; here every key has a value")
        return
    try:
        override = parser.parse_override(argument.text)
        if override.is_sweep_override():
            yield Setting(key, text, problem="it gives several values for a sweep; one run takes one")
            return
        value = override.value()
    except HydraException:
        yield Setting(key, text, problem="Hydra cannot read the value, so verl refuses it, too")
        return
    yield from _leaves(key, text, value)


def _leaves(key: str, text: str, value: Any) -> Iterator[Setting]:
    if isinstance(value, dict) and value and all(key != section for section, _ in SECTIONS):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", str(inner), inner)
    elif _INTERPOLATION.search(str(value)):
        yield Setting(key, text, problem="its value refers to another key of verl's")
    else:
        yield Setting(key, text, value)
