"""Updates of the actor for tests: rows, runs, and the same update on one rank and on two."""

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from pipeline.config import Config
from pipeline.models.batch import TrainBatch
from pipeline.models.fsdp import full_state_dict
from pipeline.models.support import SupportWriter
from pipeline.rows import INTS, ROUTES, SCHEMA, UNROUTED, flat, ragged
from pipeline.stats import Stats, reduce
from pipeline.train import ranks
from pipeline.train.deal import Dealer
from pipeline.train.learner import Learner
from pipeline.train.setup import build_actor
from pipeline.train.update import StreamedUpdate
from tests.forks import forking

PROMPTS, N, CHUNK_ROWS = 8, 2, 4
NAMES = ("uid", "sample", "prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "advantages", "returns")
COLUMNS = pa.schema([SCHEMA.field(name) for name in NAMES])
CPU = torch.device(os.environ.get("SLIPSTREAM_TEST_DEVICE", "cpu"))
"""The device of all learners of tests; `benchmarks/gpu` sets another one."""


def table(seed: int = 0, longest: int = 9) -> pa.Table:
    """One iteration: 8 prompts with 2 responses of up to `longest` tokens each, some masked; one row is masked as a
    whole, one has no tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(5, 300, rng.integers(1, 8)) for _ in range(PROMPTS)]
    rows = []
    for number in range(PROMPTS * N):
        length = 0 if number == 5 else int(rng.integers(1, longest + 1))
        rows.append(
            {
                "uid": str(number // N),
                "sample": number % N,
                "prompt_ids": prompts[number // N],
                "response_ids": rng.integers(5, 300, length),
                "response_mask": (rng.random(length) < 0.8) & (number != 9),
                "rollout_log_probs": rng.normal(-5.7, 0.4, length),
                "advantages": np.full(length, rng.normal()),
                "returns": np.zeros(length),
            }
        )
    return pa.Table.from_pylist(rows, schema=COLUMNS)


def with_column(rows: pa.Table, name: str, numbers: np.ndarray) -> pa.Table:
    """`rows` with these numbers [N] for the response tokens in column `name`."""
    field = SCHEMA.field(name)
    column = ragged(numbers, flat(rows, "response_ids")[1], field.type)
    if name in rows.column_names:
        return rows.set_column(rows.column_names.index(name), field, column)
    return rows.append_column(field, column)


def with_contexts(rows: pa.Table, seed: int = 3) -> pa.Table:
    """`rows`, two of three of which are cut into two to four contexts anywhere, behind prompts of 1 to 7 tokens."""
    rng = np.random.default_rng(seed)
    column: list[list[dict[str, Any]] | None] = []
    for number, length in enumerate(np.diff(flat(rows, "response_ids")[1])):
        if number % 3 == 0:
            column.append([None, []][number % 2])
            continue
        cuts = np.sort(rng.integers(0, length + 1, rng.integers(1, 4)))
        tokens = np.diff([0, *cuts, length])
        prompts = [None, *(rng.integers(5, 300, rng.integers(1, 8)) for _ in cuts)]
        column.append([{"prompt": prompt, "tokens": count} for prompt, count in zip(prompts, tokens, strict=True)])
    field = SCHEMA.field("contexts")
    return rows.append_column(field, pa.array(column, field.type))


def masked(rows: pa.Table) -> pa.Table:
    return with_column(rows, "response_mask", np.zeros(len(flat(rows, "response_mask")[0]), np.int8))


def with_reference(rows: pa.Table) -> pa.Table:
    rng = np.random.default_rng(7)
    return with_column(rows, "ref_log_probs", rng.normal(-5.7, 0.5, len(flat(rows, "response_ids")[0])))


def with_supports(rows: pa.Table, vocabulary: int, seed: int = 11) -> pa.Table:
    """`rows`, two of three of which have tokens that were sampled from a part of the vocabulary."""
    rng, written = np.random.default_rng(seed), []
    for number, ids in enumerate(rows["response_ids"].to_pylist()):
        writer = SupportWriter(vocabulary, vocabulary)
        for place, token in enumerate(ids):
            others = rng.permutation(np.setdiff1d(np.arange(vocabulary), [token]))[: rng.integers(1, 20)]
            if number % 3 == 0 or place % 4 == 3:
                writer.whole()
            else:
                writer.outside(others) if place % 4 == 2 else writer.inside(np.append(others, token))
        written.append(writer.columns())
    for place, name in enumerate(("support", "support_sizes")):
        rows = rows.append_column(name, pa.array([one and one[place] for one in written], INTS))
    return rows


def with_routes(rows: pa.Table, width: int, experts: int, seed: int = 13) -> pa.Table:
    """`rows`, one of three without experts, and the others with different ones for each layer and token."""
    rng, written = np.random.default_rng(seed), []
    for number, row in enumerate(rows.select(["prompt_ids", "response_ids"]).to_pylist()):
        tokens = len(row["prompt_ids"]) + len(row["response_ids"])
        drawn = np.stack([rng.permutation(experts)[:2] for _ in range(tokens * width // 2)]).reshape(tokens, width)
        drawn[-1] = UNROUTED
        written.append(None if number % 3 == 0 else drawn.reshape(-1).astype(np.int16))
    return rows.append_column("routes", pa.array(written, ROUTES))


def with_values(rows: pa.Table, seed: int = 0) -> pa.Table:
    """Rows of a run with a critic: random values, and returns around them."""
    rng, count = np.random.default_rng(seed + 100), len(flat(rows, "response_ids")[0])
    values = rng.normal(0, 1, count)
    return with_column(with_column(rows, "values", values), "returns", values + rng.normal(0.5, 0.7, count))


def without_advantage(rows: pa.Table, every: int = 2) -> pa.Table:
    """`rows` with advantages of 0 in one group of `every`."""
    advantages, offsets = flat(rows, "advantages")
    group = np.repeat(np.arange(len(rows)) // N, np.diff(offsets))
    return with_column(rows, "advantages", np.where(group % every == 0, 0.0, advantages))


def make_config(model: Path | str, **changes: Any) -> Config:
    """A run of 8 prompts an iteration; `changes` are settings of the actor."""
    config = Config()
    config.model.path = str(model)
    config.data.train_batch_size = PROMPTS
    config.data.max_response_length = 12
    config.rollout.n = N
    # A large eps keeps AdamW from blowing rounding noise of tiny gradients up to whole steps.
    for part in (config.actor, config.critic):
        part.optim.lr, part.optim.eps = 1e-2, 1e-2
    config.actor.old_log_probs = "engine"
    for name, value in changes.items():
        setattr(config.actor, name, value)
    return config


def update(learner: Learner, *parts: pa.Table | TrainBatch) -> Stats:
    """Train on an iteration that comes in these parts."""
    made = StreamedUpdate(learner, len(parts))
    for part in parts:
        made.add(part if isinstance(part, TrainBatch) else TrainBatch.from_table(part))
    return made.finish()


def in_chunks(rows: pa.Table) -> list[pa.Table]:
    return [rows.slice(start, CHUNK_ROWS) for start in range(0, len(rows), CHUNK_ROWS)]


def trained(config: Config, *tables: pa.Table, build: Callable = build_actor) -> tuple[dict[str, float], dict]:
    """Metrics of the last update and the weights after updates with these rows."""
    learner = build(config, CPU, 100)
    stats: Stats = {}
    for rows in tables:
        stats = update(learner, rows)
    return reduce([stats]), full_state_dict(learner.module)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance * 1e-2)


def assert_same_metrics(a: dict[str, float], b: dict[str, float]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        if not name.startswith("timing_s/"):
            assert b[name] == pytest.approx(value, rel=1e-4, abs=2e-6), name


def moved(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def worlds(rank: int, folder: str) -> Iterator[int]:
    """A process group of one rank and one of two, in turn: their sizes, as far as `rank` belongs to them."""
    torch.set_num_threads(1)
    for world in (1, 2):
        if rank < world:
            store = dist.FileStore(f"{folder}/store{world}", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
            yield world
            dist.destroy_process_group()


def save_update(learner: Learner, rows: pa.Table, path: str, streamed: bool = False) -> None:
    """Train on this rank's share of `rows`; all ranks' metrics and the new weights are written to `path`."""
    chunks = in_chunks(rows)[dist.get_rank() :: dist.get_world_size()]
    parts = chunks if streamed else [pa.concat_tables(chunks)]
    unit = N if learner.shares_prompts else 1
    segments = max(1, learner.shape.mini_batches // len(parts))
    dealer = Dealer(CPU, segments, unit, hidden_size=64, skips=True, idle=0.25, mesh=learner.mesh)
    metrics = reduce(ranks.all_gather(update(learner, *map(dealer, parts))))
    state = full_state_dict(learner.module)
    if dist.get_rank() == 0:
        torch.save({"metrics": metrics, "state": state}, path)


def _run(rank: int, work: Callable[..., None], args: tuple[str, ...]) -> None:
    work(rank, *args)
    # Now and then a thread of torch outlives its process group, and the way out through C++ aborts.
    os._exit(0)


def spawn(work: Callable[..., None], *args: str, ranks: int = 2) -> None:
    """Run `work(rank, *args)` in `ranks` processes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    method = forking().get_start_method()
    context = mp.start_processes(_run, (work, args), ranks, join=False, start_method=method)
    deadline = time.monotonic() + 120 * ranks
    while not context.join(timeout=1):
        assert time.monotonic() < deadline, f"{ranks} ranks did not finish in time"
