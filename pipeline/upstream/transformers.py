"""Private interfaces of transformers (5.19): its loader of weights, which can be replaced here."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedModel, modeling_utils

ARGUMENTS = ["model", "state_dict", "checkpoint_files", "load_config"]
"""Names of the first arguments of the loader, in the versions of transformers that are known to work."""
LOADER, FINISHER, OPENER = "_load_pretrained_model", "_finalize_model_loading", "safe_open"


def knows_loader() -> bool:
    """Return whether the weight loader of the installed transformers has the known functions and arguments."""
    read: Any = getattr(PreTrainedModel, LOADER, None)
    if read is None or not hasattr(PreTrainedModel, FINISHER) or not hasattr(modeling_utils, OPENER):
        return False
    return list(inspect.signature(read).parameters)[: len(ARGUMENTS)] == ARGUMENTS


@contextmanager
def replaced_loader(
    load: Callable[..., Any], finish: Callable[..., Any] | None = None, open_file: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Replace, within the block, the weight loader that `from_pretrained` calls.

    With another loader a rank can read only its slices of the weights. transformers reads slices only for its own
    parallelism: https://github.com/huggingface/transformers/pull/45028

    Args:
        load: called in place of the loader, with the original loader as its first argument.
        finish: called in place of the function that reports missing and unexpected names, with the original function as
            its first argument.
        open_file: opens a file of weights in place of `safetensors.safe_open`.

    Raises:
        ImportError: the installed transformers has another loader.
    """
    if not knows_loader():
        raise ImportError("transformers loads weights in an unknown way; install the version of requirements/")
    with ExitStack() as stack:
        for name, wrapper in ((LOADER, load), (FINISHER, finish)):
            if wrapper is not None:
                stack.enter_context(patch.object(PreTrainedModel, name, staticmethod(_around(name, wrapper))))
        if open_file is not None:
            stack.enter_context(patch.object(modeling_utils, OPENER, open_file))
        yield


def _around(name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    own = getattr(PreTrainedModel, name)
    return lambda *args, **options: wrapper(own, *args, **options)
