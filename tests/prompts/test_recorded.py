"""The prompts of a replay: their order, passes over the recording, and positions."""

from pathlib import Path

import pytest

from pipeline.prompts.encode import to_table
from pipeline.prompts.recorded import RecordedSupply
from pipeline.prompts.recording import Recording
from tests.recordings import BATCH, record

GROUPS = 3 * BATCH


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    record(tmp_path, [1, 2, 3])
    return Recording(str(tmp_path))


def uids(supply: RecordedSupply, iterations: int, count: int) -> list[list[str]]:
    return [[row["uid"] for row in supply.iteration(number, count)] for number in range(1, iterations + 1)]


def test_prompts_come_in_the_order_of_the_recording(recording: Recording) -> None:
    supply = RecordedSupply(recording, epochs=1)
    made = uids(supply, 4, BATCH)
    assert made == [[f"0-{group}" for group in range(first, first + BATCH)] for first in range(0, GROUPS, BATCH)] + [[]]
    assert supply.iteration(9, BATCH) == []


def test_rows_have_the_columns_of_prompts(recording: Recording) -> None:
    rows = RecordedSupply(recording, epochs=1).iteration(1, BATCH)
    assert [row["offset"] for row in to_table(rows).to_pylist()] == list(range(BATCH))
    assert {row["epoch"] for row in rows} == {0} and rows[1]["prompt_index"] == 101


@pytest.mark.parametrize("count", [1, 3, 5, GROUPS, GROUPS + 2])
def test_another_batch_size_takes_the_same_prompts(recording: Recording, count: int) -> None:
    supply = RecordedSupply(recording, epochs=2)
    flat = [uid for iteration in uids(supply, 2 * GROUPS // count + 1, count) for uid in iteration]
    assert flat == [f"0-{group}" for group in range(GROUPS)] + [f"0-{group}/1" for group in range(GROUPS)]


def test_without_an_end_passes_follow_each_other(recording: Recording) -> None:
    made = uids(RecordedSupply(recording, epochs=None), 10, GROUPS + 1)
    assert all(len(set(iteration)) == GROUPS + 1 for iteration in made), "no two visits share a uid"
    assert made[0][-1] == "0-0/1" and made[9][-1] == "0-9/10"


def test_a_supply_goes_on_from_a_position(recording: Recording) -> None:
    whole = uids(RecordedSupply(recording, epochs=None), 8, 5)
    for stop in range(8):
        first = RecordedSupply(recording, epochs=None)
        uids(first, stop, 5)
        second = RecordedSupply(recording, epochs=None)
        # As the checkpoint's JSON gives it back.
        second.load(first.cursor)
        assert uids(second, 8 - stop, 5) == whole[stop:]


def test_counts_say_where_the_recording_stands(recording: Recording) -> None:
    supply, seen = RecordedSupply(recording, epochs=2), []
    for number in range(1, 7):
        supply.iteration(number, BATCH)
        seen.append(supply.counts()["prompts/recorded_iteration"])
    assert seen == [1, 2, 3, 1, 2, 3]
