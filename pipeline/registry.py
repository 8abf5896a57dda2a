"""Look up functions and classes that settings name: built-in ones by name, user code by import path."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from pipeline import imports


@dataclass(frozen=True)
class Entry:
    """A registered name and its function or class."""

    name: str
    source: Callable[..., Any] | str
    """The function of a user, or the import path of a built-in function, which is imported at first use."""

    @property
    def function(self) -> Callable[..., Any]:
        """The function, imported if necessary."""
        return resolved(self.source)

    @property
    def built_in(self) -> bool:
        """True if the function is part of Slipstream."""
        return isinstance(self.source, str)

    @property
    def path(self) -> str:
        """Import path of the function."""
        return self.source if isinstance(self.source, str) else _path(self.source)

    def owns(self, function: Callable[..., Any]) -> bool:
        """Return True if `function` is the function of this entry. Imports nothing."""
        return self.source is function or (self.built_in and self.source == _path(function))


def _path(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"


def resolved(source: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return the function at a built-in import path. A function is returned unchanged."""
    if not isinstance(source, str):
        return source
    code, name = imports.split(source)
    function: Callable[..., Any] = getattr(imports.load(code), name)
    return function


T = TypeVar("T", bound=Entry)


def register(kind: str, known: dict[str, T], entry: T) -> None:
    """Add an entry to the registry `known` of `kind`, such as "policy loss".

    Raises:
        ValueError: the name belongs to another function.
    """
    if entry.name in known and not known[entry.name].owns(entry.function):
        raise ValueError(f"{kind} {entry.name!r} is registered twice; give the second one another name")
    # An existing entry is kept when its module is loaded again.
    known.setdefault(entry.name, entry)


def look_up(
    key: str,
    name: str,
    known: Mapping[str, T],
    unregistered: Callable[[str, Callable[..., Any]], T],
    arguments: Sequence[str] = ("data", "config"),
) -> T:
    """Return the entry that the setting `key` names.

    Args:
        key: dotted name of the setting, for errors.
        name: a key of `known`, or an import path `package.module:name` of a function or of a registered name.
        known: the registry.
        unregistered: makes an entry from an import path and a function that is not registered.
        arguments: names of the positional arguments that the function must accept.

    Raises:
        ValueError: the name is unknown (the error gives the nearest one), or the import path does not lead to a
            function with these arguments.
    """
    if ":" in name:
        return _imported(key, name, known, unregistered, arguments)
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{key} {name!r} is unknown.{hint} Known are {', '.join(sorted(known))}, and any function of yours as "
            "'package.module:function'."
        )
    return known[name]


def _imported(
    key: str,
    path: str,
    known: Mapping[str, T],
    unregistered: Callable[[str, Callable[..., Any]], T],
    arguments: Sequence[str],
) -> T:
    for entry in known.values():
        if entry.source == path:
            return entry
    module_name, attribute = imports.split(path)
    try:
        module = imports.load(module_name)
    except imports.NotCode as error:
        raise ValueError(f"{key} {path!r}: {module_name!r} {error}") from error
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{key} {path!r}: module {module_name!r} cannot be imported ({error}); it must be on the Python path of "
            "every worker"
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"{key} {path!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    registered = known.get(attribute)
    if registered is not None and imports.split(registered.path)[0] == module.__name__:
        return registered
    function = getattr(module, attribute, None)
    if function is None or not callable(function):
        raise ValueError(f"{key} {path!r}: module {module_name!r} has no function {attribute!r}")
    for entry in known.values():
        if entry.owns(function):
            return entry
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key} {path!r}: it is called with {' and '.join(arguments)}: {error}") from error
    return unregistered(path, function)
