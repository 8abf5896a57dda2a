"""The policy store without Ray, with weights of any module in it."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipeline.store.admission import Admission
from pipeline.store.client import StoreClient
from pipeline.store.cursor import PromptCursor
from pipeline.store.policy_store import PolicyStore
from pipeline.store.status import TrainerState
from pipeline.weights.load import Shard
from pipeline.weights.publish import pack, parts

BUCKET = 20_000


def shard_of(module: nn.Module, rename: Callable[[str], str] = str, dtype: torch.dtype = torch.float32) -> Shard:
    """All weights of `module` as rank 0 publishes them, in several buckets that stand in for object refs."""
    return pack(parts(module, 0, dtype, rename), 0, BUCKET, lambda buffer: buffer)


class LocalStore(StoreClient):
    """The store of this process as a stage sees it. Put `get` in the place of `ray.get`."""

    def __init__(self) -> None:
        super().__init__(PolicyStore(Admission(1, 1, 0)))
        self._loop = asyncio.new_event_loop()
        self.asked: list[tuple[Any, ...]] = []
        self.begin()

    def begin(self) -> None:
        """A new attempt of one train rank."""
        self.attempt = self.ask(PolicyStore.new_attempt)
        self.call(PolicyStore.register_trainer, TrainerState(0, PromptCursor(), False), 1)

    def publish(self, version: int, **shards: Shard) -> None:
        """Make `version` current; the shard of the policy is one without weights where none is given."""
        shards = {"policy": Shard(0, [], [], []), **shards}
        self.call(PolicyStore.publish, version, shards, 0.0)

    def _send(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method is PolicyStore.weights:
            self.asked.append(args)
        return self._loop.run_until_complete(method(self._store, *args, **kwargs))


def get(refs: Any, timeout: float) -> Any:
    """`ray.get` of what is there already."""
    return refs
