"""The policy store without Ray, with weights of any module in it."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pipeline.admission import Admission
from pipeline.rollout.weights import Shard
from pipeline.store import PolicyStore
from pipeline.train.broadcast import pack

BUCKET = 20_000


def shard_of(module: nn.Module, rename: Callable[[str], str] = str, dtype: torch.dtype = torch.float32) -> Shard:
    """All weights of `module` as rank 0 publishes them, in several buckets that stand in for object refs."""
    return pack(module, 0, dtype, BUCKET, lambda buffer: buffer, rename)


class LocalStore:
    """A store as a stage sees it: methods have a `remote` that is done at once. Put `get` in the place of `ray.get`."""

    def __init__(self) -> None:
        self._store, self._loop = PolicyStore(Admission(1, 1, 0)), asyncio.new_event_loop()
        self.asked: list[tuple[Any, ...]] = []
        self.weights = SimpleNamespace(remote=self._weights)
        self.generation = self.begin()

    def begin(self) -> int:
        """A new generation of one train rank."""
        generation = self.call("new_generation")
        self.call("begin", generation, 0, 1, None)
        return generation

    def publish(self, version: int, **shards: Shard) -> None:
        """Make `version` current; the shard of the policy is one without weights where none is given."""
        shards = {"policy": Shard(0, [], [], []), **shards}
        self.call("publish", self.generation, version, shards, 0.0)

    def call(self, method: str, *args: Any) -> Any:
        return self._loop.run_until_complete(getattr(self._store, method)(*args))

    def _weights(self, *args: Any) -> Any:
        self.asked.append(args)
        return self.call("weights", *args)


def get(refs: Any, timeout: float) -> Any:
    """`ray.get` of what is there already."""
    return refs
