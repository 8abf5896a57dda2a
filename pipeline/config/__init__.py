"""All settings as typed dataclasses, composed by Hydra. This package imports no other package of Slipstream."""

from typing import TYPE_CHECKING, Any

from pipeline.config.root import Config
from pipeline.config.schema import diff, to_flat

if TYPE_CHECKING:
    from pipeline.config.compose import (
        CONFIG_DIR,
        ConfigError,
        UnknownKey,
        load,
        load_config,
        load_yaml,
        save_yaml,
    )

__all__ = [
    "CONFIG_DIR",
    "Config",
    "ConfigError",
    "UnknownKey",
    "diff",
    "load",
    "load_config",
    "load_yaml",
    "save_yaml",
    "to_flat",
]


def __getattr__(name: str) -> Any:
    # Hydra takes half a second to import, and processes that only read settings (reward workers) do not need it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeline.config import compose

    return getattr(compose, name)
