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


def look_up(
    key: str,
    name: str,
    known: Mapping[str, T],
    unregistered: Callable[[str, Callable[..., Any]], T],
    arguments: Sequence[str] = ("data", "config"),
) -> T:
    """The entry that the setting `key` names.

    Args:
        key: dotted name of the setting, for errors.
        name: a key of `known`, or an import path `package.module:name`, where the name is one that the module registers
            or its function's.
        known: the registry.
        unregistered: makes an entry of an import path and its function, where importing has not registered it.
        arguments: what it is called with, by position.

    Raises:
        ValueError: no such name (the sentence gives the nearest), or the import path leads to nothing that can be
            called so.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        return _imported(key, module, attribute, known, unregistered, arguments)
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
    module_name: str,
    attribute: str,
    known: Mapping[str, T],
    unregistered: Callable[[str, Callable[..., Any]], T],
    arguments: Sequence[str],
) -> T:
    path = f"{module_name}:{attribute}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{key} {path!r}: module {module_name!r} cannot be imported ({error}); it must be on the Python path of "
            "every worker"
        ) from error
    except Exception as error:  # anything a user's module may raise
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
