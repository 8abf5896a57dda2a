import itertools
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.data import DataConfig
from pipeline.prompts.feedback import Outcome
from pipeline.prompts.sampler import Sampler, SolveRate, make_sampler

ROWS = {"a": 50, "b": 8, "c": 20}


class EasyFirst(Sampler):
    """A curriculum of one's own: only small numbers in the first iterations, and a share that moves."""

    def __init__(self, data, seed, until=3):
        super().__init__(data, seed)
        self.until, self.iteration = until, 0

    def shares(self, iteration):
        self.iteration = iteration
        return {"a": 1, "b": 0, "c": iteration >= self.until}

    def chance(self, index, row):
        return 1.0 if self.iteration >= self.until else float(row["extra_info"]["index"] < 20)


class Never(Sampler):
    def chance(self, index, row):
        return 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory, prompt_row):
    """Three data sources, two of them mixed in one file."""
    path = tmp_path_factory.mktemp("sampled")
    index = itertools.count()
    rows = {name: [prompt_row(next(index), data_source=name) for _ in range(many)] for name, many in ROWS.items()}
    mixed = [row for pair in itertools.zip_longest(rows["a"], rows["b"]) for row in pair if row]
    pq.write_table(pa.Table.from_pylist(mixed), path / "mixed.parquet", row_group_size=7)
    pq.write_table(pa.Table.from_pylist(rows["c"]), path / "pure.parquet", row_group_size=5)
    return str(path)


@pytest.fixture
def sampled(loader_of, folder):
    def make(sampler, paths=folder, **changes):
        return loader_of(paths, sampler=sampler, **{"shuffle_window_rows": 12} | changes)

    return make


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0}


def test_weights_are_the_shares_of_the_prompts_whatever_the_rows(sampled):
    loader = sampled("weighted", source_weights=WEIGHTS)
    rows = loader.iteration(1, 2000)
    count = Counter(row["data_source"] for row in rows)
    for name, share in (("a", 0.25), ("b", 0.5), ("c", 0.25)):
        # Within four standard deviations of a fair draw.
        assert abs(count[name] / 2000 - share) < 4 * (share * (1 - share) / 2000) ** 0.5
    assert len({row["uid"] for row in rows}) == 2000
    assert (loader.cursor.epoch, loader.cursor.offset) == divmod(2000, sum(ROWS.values()))


def test_each_source_is_a_shuffled_order_of_its_own(sampled):
    rows = sampled("weighted", source_weights=WEIGHTS).iteration(1, 300)
    for name, many in ROWS.items():
        own = [row["prompt_index"] for row in rows if row["data_source"] == name]
        epochs = [own[i : i + many] for i in range(0, len(own) - many + 1, many)]
        assert len(epochs) > 0 and all(len(set(epoch)) == many for epoch in epochs)
        assert epochs[0] != sorted(epochs[0])
    # Rows know their number, whatever the order they came in.
    by_index = {}
    for row in rows:
        assert by_index.setdefault(row["prompt_index"], row["extra_info"]) == row["extra_info"]


def test_a_weight_of_0_leaves_a_source_out_and_epochs_count_all_rows(sampled):
    loader = sampled("weighted", source_weights={"a": 0, "b": 1, "c": 0}, epochs=2)
    rows = loader.iteration(1, 10_000)
    assert len(rows) == 2 * loader.epoch_rows == 2 * sum(ROWS.values())
    assert {row["data_source"] for row in rows} == {"b"}


def test_only_row_groups_that_hold_the_source_are_in_its_order(sampled):
    orders = sampled("weighted", source_weights=WEIGHTS).orders
    assert orders["c"].rows == ROWS["c"]
    assert {unit.file for unit in orders["a"].units} == {unit.file for unit in orders["b"].units} == {0}
    assert orders["b"].rows < ROWS["a"] + ROWS["b"]


def test_rows_without_a_source_are_set_aside_wherever_they_stand(sampled, prompt_row, write):
    path = write([prompt_row(i, data_source=None if i % 5 == 0 else "ab"[i % 2]) for i in range(30)])
    loader = sampled("weighted", paths=path, source_weights={"a": 1, "b": 1}, max_bad_rows=6)
    rows = loader.iteration(1, 60)
    assert loader.encoder.quarantine.count == 6
    assert not any(json.loads(row["extra_info"])["index"] % 5 == 0 for row in rows)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"a": 1, "b": 1, "cc": 1},
            "gives a share to 'cc', which is not a data_source .*nearest is 'c'",
        ),
        ({"a": 1, "c": 1}, "gives no share to b"),
        ({"a": 0, "b": 0, "c": 0}, "one of them above 0"),
        ({"a": -1, "b": 1, "c": 1}, "at least 0"),
        ({"a": float("nan"), "b": 1, "c": 1}, "at least 0"),
        ({}, "data.sampler=weighted cannot be made .*needs data.source_weights"),
    ],
)
def test_weights_that_do_not_fit(sampled, weights, message):
    with pytest.raises(ValueError, match=message):
        sampled("weighted", source_weights=weights)


def test_a_source_that_max_samples_cuts_off(sampled, named):
    loader = sampled("weighted", source_weights=WEIGHTS, train_max_samples=30)
    with pytest.raises(ValueError) as refused:
        loader.iteration(1, 100)
    named(refused.value, "train_max_samples 'c'")


def test_rows_that_are_always_or_never_solved_come_less_often(sampled):
    epochs = 60
    loader = sampled("solve_rate", sampler_kwargs={"least": 0.2}, epochs=epochs)
    solved = {index: (0.0, 1.0, 0.5, 0.1)[index % 4] for index in range(60)}
    outcomes = [Outcome(index, "a", [], None, None, [], rate) for index, rate in solved.items()]
    loader.sampler.update(1, outcomes)
    rows = loader.iteration(1, 10_000)
    count = Counter(row["prompt_index"] for row in rows)
    assert loader.passed_over == epochs * 78 - len(rows)
    # Those that were not tried yet, and those of medium difficulty, every time.
    assert all(count[index] == epochs for index in (*range(2, 60, 4), *range(60, 78)))
    for rest, chance in ((0, 0.2), (1, 0.2), (3, 0.36)):
        mean = np.mean([count[index] for index in range(rest, 60, 4)]) / epochs
        assert abs(mean - chance) < 4 * (chance * (1 - chance) / (15 * epochs)) ** 0.5


def test_solve_rate_is_a_running_mean_and_bounded(monkeypatch):
    sampler = SolveRate(DataConfig(), 0, least=0.01, decay=0.75)

    def tried(*rates):
        sampler.update(1, [Outcome(index, "a", [], None, None, [], rate) for index, rate in rates])

    tried((0, 1.0), (1, 0.5), (-1, 1.0))
    tried((0, 0.0))
    assert sampler.chance(0, {}) == pytest.approx(4 * 0.75 * 0.25)
    assert sampler.chance(1, {}) == 1.0 == sampler.chance(-1, {})
    again = SolveRate(DataConfig(), 0, least=0.01, decay=0.75)
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    monkeypatch.setattr(SolveRate, "MAX_ROWS", 2)
    for one in (sampler, again):
        one.update(2, [Outcome(7, "a", [], None, None, [], 1.0)])
        # Row 1 was tried longest ago.
        assert (one.chance(1, {}), one.chance(7, {})) == (1.0, 0.01)
        assert one.chance(0, {}) == pytest.approx(0.75)
    assert sampler.state_dict() == again.state_dict()
    again.load_state_dict({})
    assert again.chance(7, {}) == 1.0


def test_a_sampler_of_ones_own(sampled):
    loader = sampled(f"{__name__}:EasyFirst", sampler_kwargs={"until": 2})
    rows = loader.iteration(1, 40)
    assert {row["data_source"] for row in rows} == {"a"}
    assert max(json.loads(row["extra_info"])["index"] for row in rows) < 20
    rows = loader.iteration(2, 80)
    assert Counter(row["data_source"] for row in rows)["c"] > 20
    assert max(json.loads(row["extra_info"])["index"] for row in rows) > 20


def test_a_sampler_that_takes_nothing(sampled, named):
    with pytest.raises(ValueError) as refused:
        sampled(f"{__name__}:Never").iteration(1, 1)
    named(refused.value, "78 test_sampler:Never")


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("unifrom", {}, "data.sampler 'unifrom' is unknown. Did you mean 'uniform'"),
        ("no.such:Sampler", {}, "module 'no.such' cannot be imported"),
        ("operator:add", {}, "is not a class derived from pipeline.prompts.sampler.Sampler"),
        ("solve_rate", {"least": 0}, "solve_rate cannot be made with .*least=0 must be above 0"),
        ("solve_rate", {"decay": 1}, "decay=1 must be at least 0 and below 1"),
        ("solve_rate", {"decoy": 1}, "solve_rate cannot be made with .*unexpected keyword argument 'decoy'"),
    ],
)
def test_samplers_that_cannot_be_made(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_sampler(DataConfig(sampler=name, sampler_kwargs=kwargs), 0)


def test_windows_of_all_sources_together_stay_within_the_bound(sampled):
    orders = sampled("weighted", source_weights=WEIGHTS).orders
    assert sum(max(window.rows for window in order.windows(0)) for order in orders.values()) <= 12
