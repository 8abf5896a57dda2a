"""Engines that get only adapters (`model.lora.weight_sync=adapter`) and read the base from the disk, once.

vLLM takes an adapter as a folder. All versions have the same id and replace each other in place, so an update in flight
also reaches running requests, between two of their tokens. Prompts of each version have their own cache salt, which
keeps them from KV that another version's adapter computed.
"""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.model import LoraConfig
from pipeline.errors import FinalError, short_reason
from pipeline.models import adapter
from pipeline.upstream.vllm import unused_layers
from pipeline.weights.load import Shard, fetch, parameters

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks for which vLLM can reserve memory."""
NAME, ID = "policy", 1
REMEDY = "set model.lora.weight_sync=merged, or other model.lora.target_modules"


def engine_args(config: LoraConfig) -> dict[str, Any]:
    """Return vLLM's `EngineArgs` for `model.lora`."""
    if not config.alone:
        return {}
    largest = next(rank for rank in RANKS if rank >= config.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": largest, "load_format": "auto"}


def use_adapter(engine: Any) -> None:
    """Make all requests use the adapter; they fail as long as none is loaded."""
    from vllm.lora.request import LoRARequest

    # The path is read only if the adapter is not there.
    request = LoRARequest(NAME, ID, "no adapter was published to this engine")
    engine.add_request = functools.partial(engine.add_request, lora_request=request)


def load(engine: Any, shards: Sequence[Shard], timeout: float) -> None:
    """Replace the engine's adapter in place.

    Args:
        engine: the engine.
        shards: the published adapter.
        timeout: seconds in which the adapter must arrive.

    Raises:
        TimeoutError: the adapter did not arrive in time.
        ValueError: the adapter arrived damaged.
        FinalError: vLLM cannot use the adapter with this model.
    """
    from vllm.lora.request import LoRARequest

    settings = shards[0].adapter
    assert settings is not None
    arrived = parameters(shards, lambda refs: fetch(refs, "cpu", timeout))
    state = {adapter.peft_name(name): tensor for name, tensor in arrived}
    with tempfile.TemporaryDirectory(prefix="slipstream-adapter-") as folder:
        adapter.write(Path(folder), settings, state)
        try:
            # Without `load_inplace` the engine would go on with the adapter that it has under this id.
            engine.add_lora(LoRARequest(NAME, ID, folder, load_inplace=True))
        except ValueError as error:
            raise FinalError(
                f"the engine cannot use the adapter without the base: {short_reason(error)}; {REMEDY}"
            ) from error
    if lost := sorted(set().union(*engine.collective_rpc(unread))):
        raise FinalError(
            f"the engine cannot use the adapter without the base: it has no place for the adapters of {len(lost)} "
            f"layers, the first {lost[0]}; {REMEDY}"
        )


def unread(worker: Any) -> set[str]:
    """Return the names of layers for which a vLLM worker has read an adapter but does not use it.

    vLLM compares only the ends of names, so an adapter can match no layer.
    """
    # vLLM packs the adapters of experts in several forms.
    return {name for name in unused_layers(worker, ID) if ".experts" not in name}
