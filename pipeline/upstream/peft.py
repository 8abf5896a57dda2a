"""Private interfaces of peft (0.21)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from pipeline.upstream import private

CONVERTER = "convert_peft_config_for_transformers"


@contextmanager
def targets_as_named() -> Iterator[None]:
    """Keep peft, within the block, from replacing the target modules of an adapter by others.

    In a mixture of experts peft replaces target layers with the former names of experts, such as the layers of a shared
    expert, by the single tensor that holds all experts: https://github.com/huggingface/peft/pull/3083

    Raises:
        ImportError: this peft has no such conversion.
    """
    from peft.utils import transformers_weight_conversion as conversion

    private(conversion, CONVERTER, "peft")
    with patch.object(conversion, CONVERTER, lambda *args, **options: None):
        yield


@contextmanager
def switched_off(layers: Iterable[Any]) -> Iterator[None]:
    """Switch the adapters of peft's layers off within the block.

    peft's public method, `BaseTunerLayer.enable_adapters`, would also freeze the adapters. We know of no upstream
    issue.

    Raises:
        ImportError: a layer of this peft has no such attribute.
    """
    layers = list(layers)
    before = [private(layer, "_disable_adapters", "peft") for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer._disable_adapters = value
