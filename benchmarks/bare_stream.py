"""Bare Ray Data in the shape of the stream: the cost of the stream if no stage does anything.

Pages, prompts, blocks cut to chunks, an asynchronous actor that waits for the policy store, one task for each chunk,
and splits for the trainers. Rows have two columns.
"""

from typing import Any

import pyarrow as pa
from ray.data import DataContext, Dataset

from pipeline import stream
from pipeline.config import Config
from pipeline.prompts.stage import Schedule
from pipeline.rollout.policy_source import StorePolicy
from pipeline.store.client import StoreClient
from pipeline.store.policy_store import PolicyStore
from pipeline.upstream.ray_waits import shorten_waits
from pipeline.weights.load import checksum


class Chunks:
    """A stand-in for the prompt source: the rows of a page, with the numbers of their chunk and iteration."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __call__(self, table: pa.Table) -> pa.Table:
        schedule = self._schedule
        per_page = schedule.page_iterations * schedule.chunks_per_iteration
        first = table["id"][0].as_py() * per_page
        last = schedule.iterations * schedule.chunks_per_iteration
        chunks = [c for c in range(first, min(first + per_page, last)) for _ in range(schedule.chunk_prompts)]
        iterations = [c // schedule.chunks_per_iteration + 1 for c in chunks]
        return pa.table({"chunk": pa.array(chunks, pa.int64()), "iteration": pa.array(iterations, pa.int64())})


class Admitted:
    """A stand-in for an engine: it waits until the chunk may start, and passes it on."""

    def __init__(self, policy: StorePolicy) -> None:
        self._policy, self._version = policy, -1

    async def __call__(self, table: pa.Table) -> pa.Table:
        ticket = await self._policy.admit("train", table["chunk"][0].as_py(), 0)
        if ticket is not None and ticket.version > self._version:
            self._version = ticket.version
            await self._policy.acknowledge("bare", ticket.version, checksum(ticket.shards), 0.0, 0.0, 0.0)
        return table


def build(config: Config, schedule: Schedule, store: Any, run_dir: str, rollout_stage: Any = None) -> Dataset:
    """Build the bare stream, with the arguments of `pipeline.stream.build`."""
    stream.set_context()
    shorten_waits(DataContext.get_current())
    client = StoreClient(store, StoreClient(store).ask(PolicyStore.new_attempt))
    policy = StorePolicy(client, config.trainer.deadlines.admission)
    engine = stream.several(config.rollout.in_flight(schedule.chunks_per_iteration, schedule.chunk_prompts)) | {
        "num_cpus": 1
    }
    found = stream.source(schedule.pages, schedule.chunk_prompts, Chunks, (schedule,), config)
    found = found.map_batches(Admitted, fn_constructor_args=(policy,), **engine, **stream.WHOLE)
    return found.map_batches(_same, num_cpus=config.reward.num_cpus, **stream.WHOLE)


def _same(table: pa.Table) -> pa.Table:
    return table
