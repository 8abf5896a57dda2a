"""Rows are dealt to the ranks by their work: evenly, within their mini-batch, and alike on every rank."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from pipeline.config.learner import ParallelConfig
from pipeline.models.mesh import make_mesh
from pipeline.models.micro_batches import minimum_parts, split_micro_batches
from pipeline.train.deal import Dealer, deal, trains, work_of
from tests.train.updates import (
    CPU,
    N,
    in_chunks,
    masked,
    spawn,
    table,
    with_contexts,
    with_values,
    without_advantage,
    worlds,
)


def everything(count: int) -> np.ndarray:
    return np.ones(count, dtype=bool)


def test_each_rank_gets_one_of_the_longest_and_the_longest_goes_where_least_was_done() -> None:
    work = np.array([1.0, 9.0, 5.0, 7.0, 4.0, 8.0])
    assert deal(work, everything(6), 2).tolist() == [1, 0, 0, 1, 0, 1]  # 9 | 8, then 5 to the 9 and 7 to the 8
    assert deal(work, everything(6), 2).tolist() == deal(work.copy(), everything(6), 2).tolist()
    assert deal(np.ones(4), everything(4), 1).tolist() == [0] * 4


@pytest.mark.parametrize("unit", [1, 8])
def test_no_rank_waits_for_another_by_more_than_a_tenth(unit: int) -> None:
    """64 ranks with 64 rows of log-normal lengths: a pass takes as long as on the slowest rank, in real tokens."""
    ranks, rows, budget = 64, 64, 32768
    for mean, sigma, longest in ((1500, 0.7, 8192), (6000, 0.8, 30000)):
        for seed in range(10):
            rng = np.random.default_rng(seed)
            drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, ranks * rows)
            lengths = np.clip(drawn, 16, longest).astype(int) + 256
            owner = deal(lengths.reshape(-1, unit).sum(1).astype(float), everything(ranks * rows // unit), ranks)
            own = [lengths[np.repeat(owner, unit) == rank].tolist() for rank in range(ranks)]
            count = max(minimum_parts(part, budget, packed=True) for part in own)
            split = [split_micro_batches(part, budget, count, packed=True) for part in own]
            passes = [
                [sum(part[i] for i in batch) for batch in batches] for part, batches in zip(own, split, strict=True)
            ]
            assert np.max(passes, axis=0).sum() < 1.05 * lengths.sum() / ranks


def test_units_that_train_are_dealt_apart_from_those_that_do_not() -> None:
    rng = np.random.default_rng(0)
    work, active = rng.uniform(1, 9, 64), np.arange(64) % 4 == 0
    for idle in (0.0, 0.25):
        owner = deal(work, active, 4, idle)
        assert np.bincount(owner).tolist() == [16] * 4
        assert np.bincount(owner[active]).tolist() == [4] * 4
        sums = np.bincount(owner, work * np.where(active, 1.0, idle))
        assert sums.max() < 1.1 * sums.mean()


def test_work_counts_a_shared_prompt_once_and_every_context() -> None:
    rows, hidden = table(), 10
    prompts = [len(ids) for ids in rows["prompt_ids"].to_pylist()]
    lengths = [prompt + len(ids) for prompt, ids in zip(prompts, rows["response_ids"].to_pylist(), strict=True)]
    alone = np.array([length * (12 * hidden + length) for length in lengths], dtype=float)
    assert work_of(rows, hidden).tolist() == alone.tolist()
    shared = alone.reshape(-1, N).sum(1) - 12 * hidden * np.array(prompts[::N]) * (N - 1)
    assert work_of(rows, hidden, N).tolist() == shared.tolist()
    cut = with_contexts(rows)
    row = next(i for i, parts in enumerate(cut["contexts"].to_pylist()) if parts)
    parts = cut["contexts"].to_pylist()[row]
    sizes = [len(part["prompt"] or rows["prompt_ids"][row]) + part["tokens"] for part in parts]
    assert work_of(cut, hidden)[row] == sum(size * (12 * hidden + size) for size in sizes)


def test_rows_without_advantage_or_mask_do_not_train() -> None:
    rows = without_advantage(table(), every=2)
    assert trains(rows, N).tolist() == [False, True] * 4
    assert not trains(masked(rows)).any()


def names(rows: pa.Table) -> list[tuple[str, int]]:
    return list(zip(rows["uid"].to_pylist(), rows["sample"].to_pylist(), strict=True))


def exchanged(rank: int, folder: str) -> None:
    """Two ranks deal 16 rows in two mini-batches; each writes what it has."""
    for world in worlds(rank, folder):
        rows = with_values(with_contexts(table()))
        own = pa.concat_tables(in_chunks(rows)[rank::world])
        for unit in (1, N):
            dealer = Dealer(CPU, segments=2, unit=unit, hidden_size=4, skips=False, idle=0.0, mesh=make_mesh(CPU))
            got = dealer(own)
            assert got is own if world == 1 else got is not own
            pa.parquet.write_table(got, f"{folder}/{world}-{unit}-{rank}.parquet")
        mesh = make_mesh(CPU, ParallelConfig(sequence=world))
        pooled = Dealer(CPU, 2, N, hidden_size=4, skips=False, idle=0.0, mesh=mesh)(own)
        pa.parquet.write_table(pooled, f"{folder}/{world}-pooled-{rank}.parquet")


@pytest.fixture(scope="module")
def dealt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deal")
    spawn(exchanged, str(folder))
    return folder


@pytest.mark.parametrize("unit", [1, N])
def test_ranks_exchange_whole_rows_within_their_mini_batches(dealt: Path, unit: int) -> None:
    rows = with_values(with_contexts(table()))
    ranks = [pa.parquet.read_table(dealt / f"2-{unit}-{rank}.parquet") for rank in (0, 1)]
    known = dict(zip(names(rows), rows.to_pylist(), strict=True))
    chunks = in_chunks(rows)
    for half in (0, 1):
        parts = [got.slice(half * 4, 4) for got in ranks]
        wanted = {name for chunk in chunks[half * 2 : half * 2 + 2] for name in names(chunk)}
        assert {name for part in parts for name in names(part)} == wanted
        sums = [work_of(part, 4, unit).sum() for part in parts]
        before = [work_of(chunks[half * 2 + rank], 4, unit).sum() for rank in (0, 1)]
        assert max(sums) <= max(before) and abs(sums[0] - sums[1]) < 0.25 * sum(sums)
    for got in ranks:
        assert got.schema == rows.schema and len(got) == 8
        assert all(known[name] == row for name, row in zip(names(got), got.to_pylist(), strict=True))
        if unit == N:
            assert all(a[0] == b[0] for a, b in zip(names(got)[::N], names(got)[1::N], strict=True))
    assert any(name in {n for c in chunks[1::2] for n in names(c)} for name in names(ranks[0])), "no row moved"


def test_ranks_that_train_the_same_rows_get_all_of_their_group_in_one_order(dealt: Path) -> None:
    rows = with_values(with_contexts(table()))
    one, other = (pa.parquet.read_table(dealt / f"2-pooled-{rank}.parquet") for rank in (0, 1))
    assert one.equals(other) and len(one) == len(rows)
    for half in (0, 8):
        assert sorted(names(one.slice(half, 8))) == sorted(names(rows.slice(half, 8)))


@pytest.mark.parametrize("in_one_pass", [False, True])
@pytest.mark.parametrize(("shares", "of_pairs", "unit"), [(False, False, 1), (True, False, 4), (False, True, 4)])
def test_groups_stay_together_where_their_samples_share_a_prompt_or_are_compared(
    shares: bool, of_pairs: bool, unit: int, in_one_pass: bool
) -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=64))
    actor: Any = SimpleNamespace(
        device=CPU,
        shape=SimpleNamespace(mini_batches=6, epochs=1),
        shares_prompts=shares,
        loss=SimpleNamespace(of_pairs=of_pairs),
        module=SimpleNamespace(decoder=SimpleNamespace(config=config)),
        mesh="mesh",
        needs_old_log_probs=True,
        in_one_pass=in_one_pass,
        own_reference=False,
        skips_without_advantage=True,
    )
    critic: Any = SimpleNamespace(shape=SimpleNamespace(mini_batches=4, epochs=1))
    dealer = Dealer.of(actor, critic, samples=4, parts=2)
    assert (dealer.unit, dealer.segments, dealer.mesh) == (unit, 6, "mesh")
    assert dealer.idle == pytest.approx(4 / (6 if in_one_pass else 7))
