"""Functions that a setting chooses: built-in ones by name, a user's own by import path."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Protocol, TypeVar


class Registered(Protocol):
    """An entry of a registry."""

    @property
    def function(self) -> Callable[..., Any]: ...


T = TypeVar("T", bound=Registered)


def register(kind: str, known: dict[str, T], name: str, entry: T) -> None:
    """Add an entry to the registry `known` of `kind`, such as "policy loss".

    Raises ValueError if the name belongs to another function.
    """
    if name in known and known[name].function is not entry.function:
        raise ValueError(f"{kind} {name!r} is registered twice; give the second one another name")
    known[name] = entry


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
        name: a key of `known`, or an import path `package.module:name` of a function, or of a name that the module
            registers.
        known: the registry.
        unregistered: makes an entry of an import path and a function that is not registered.
        arguments: positional arguments that the function is called with.

    Raises:
        ValueError: the name is unknown (the error gives the nearest one), or the import path leads to no function with
            these arguments.
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
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{key} {path!r}: module {module_name!r} cannot be imported ({error}); it must be on the Python path of "
            "every worker"
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"{key} {path!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    registered = known.get(attribute)
    if registered is not None and registered.function.__module__ == module_name:
        return registered
    function = getattr(module, attribute, None)
    if function is None or not callable(function):
        raise ValueError(f"{key} {path!r}: module {module_name!r} has no function {attribute!r}")
    for entry in known.values():
        if entry.function is function:
            return entry
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key} {path!r}: it is called with {' and '.join(arguments)}: {error}") from error
    return unregistered(path, function)
