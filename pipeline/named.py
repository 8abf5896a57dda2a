"""Functions that a setting chooses: built-in ones by name, a user's own by import path."""

import importlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Protocol, TypeVar


class Registered(Protocol):
    """An entry of a registry."""

    @property
    def function(self) -> Callable[..., Any]: ...


T = TypeVar("T", bound=Registered)


def look_up(key: str, name: str, known: Mapping[str, T], unregistered: Callable[[str, Callable[..., Any]], T]) -> T:
    """The entry that the setting `key` names.

    Args:
        key: dotted name of the setting, for errors.
        name: a key of `known`, or an import path `package.module:function`.
        known: the registry.
        unregistered: makes an entry of an import path and its function, where importing has not registered it.

    Raises:
        ValueError: no such name (the sentence gives the nearest), or the import path leads nowhere.
    """
    if ":" in name:
        function = _imported(key, name)
        registered = (entry for entry in known.values() if entry.function is function)
        return next(registered, None) or unregistered(name, function)
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"{key} {name!r} is unknown.{hint} Known are {', '.join(sorted(known))}, and any function of yours as "
            "'package.module:function'."
        )
    return known[name]


def _imported(key: str, path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # anything a user's module may raise
        raise ValueError(
            f"{key} {path!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); it must be "
            "on the Python path of every worker"
        ) from error
    function = getattr(module, attribute, None)
    if function is None or not callable(function):
        raise ValueError(f"{key} {path!r}: module {module_name!r} has no function {attribute!r}")
    return function
