"""The weight sync (`pipeline/weights/load.py`) as a weight transfer backend of vLLM, for in-process engines and
tensor-parallel workers.
"""

import contextlib
import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.rollout.engines.vllm.reload import Reload
from pipeline.weights.checkpoint_names import as_in_checkpoint, skeleton
from pipeline.weights.load import Shard, fetch, parameters

if TYPE_CHECKING:
    from pipeline.weights.confirm import Confirmation

BACKEND = "ray_object_store"


def skeleton_beside(vllm_config: Any, made_by: str) -> Any:
    """Build the `skeleton` of an engine's model in the engine's process; `made_by` names the class that makes it.

    For some families vLLM runs the classes of `transformers`, and patches them: to build a model they then need a vLLM
    configuration, here one without compilation.
    """
    from vllm.config import CompilationMode, set_current_vllm_config

    plain = copy.copy(vllm_config)
    plain.compilation_config = copy.copy(plain.compilation_config)
    plain.compilation_config.mode = CompilationMode.NONE
    with set_current_vllm_config(plain):
        return skeleton(vllm_config.model_config.model, vllm_config.model_config.trust_remote_code, made_by)


def confirm(worker: Any) -> "Confirmation | None":
    """Return a vLLM worker's findings on the version that it has just loaded.

    None if the version was not checked, because `accept` was called for one with the same names of tensors.
    """
    confirmation: Confirmation | None = worker.weight_transfer_engine.confirm()
    return confirmation


def accept(worker: Any) -> None:
    """Let a vLLM worker load further versions, with the same names of tensors as the last one, without checks."""
    worker.weight_transfer_engine.accept()


def register() -> None:
    """Register this transport as `BACKEND` in vLLM, in this process. vLLM's plug-in entry point calls this in each of
    its processes."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from pipeline.weights.confirm import Confirmation, Watch

    @dataclass
    class Init(WeightTransferInitInfo):
        made_by: str = ""

    @dataclass
    class Update(WeightTransferUpdateInfo):
        shards: list[Shard] = field(default_factory=list)
        timeout: float = 600.0

    class ObjectStoreTransfer(WeightTransferEngine[Init, Update]):
        init_info_cls = Init
        update_info_cls = Update

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._reload: Reload | None = None
            self._watch: Watch | None = None
            self._needed: set[str] = set()
            self._names: set[str] = set()
            self._accepted: set[str] = set()
            self._lm: Any = None

        def init_transfer_engine(self, init_info: Init) -> None:
            self._lm = skeleton_beside(self.vllm_config, init_info.made_by)

        def start_weight_update(self) -> None:
            if not self._needed:
                # Tied parameters are one until an update fails half way.
                self._needed.update(name for name, _ in self.model.named_parameters())
            self._reload = self._reload or Reload(self.model, self.device.type)
            self._reload.begin()

        def receive_weights(self, update_info: Update) -> None:
            def take(refs: list[Any]) -> list[Any]:
                return fetch(refs, self.device, update_info.timeout)

            model: Any = self.model
            weights = as_in_checkpoint(self._lm, parameters(update_info.shards, take))
            self._names = {piece.name for shard in update_info.shards for piece in shard.pieces}
            self._watch = None if self._names == self._accepted else Watch(model, self._needed)
            if self._watch is None:
                model.load_weights(weights)
            else:
                self._watch.load(weights)

        def finish_weight_update(self) -> None:
            assert self._reload is not None
            # Layers that are not filled before the end are loaded here.
            with self._watch or contextlib.nullcontext():
                self._reload.finish(self.model_config)

        def confirm(self) -> Confirmation | None:
            return self._watch.confirmation(self._lm, self._names) if self._watch else None

        def accept(self) -> None:
            self._watch, self._accepted = None, self._names

        def shutdown(self) -> None:
            pass

    # Registered before in this process.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, ObjectStoreTransfer)
