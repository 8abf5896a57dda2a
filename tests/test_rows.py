import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import rows

RUN = st.tuples(st.integers(0, 2**40), st.integers(0, 5))


@settings(deadline=None)
@given(st.lists(st.lists(RUN, max_size=4), max_size=6), st.integers(0, 6))
def test_versions_of_tokens(runs: list[list[tuple[int, int]]], first: int) -> None:
    flat = np.array([run for row in runs for run in row], dtype=np.int64).reshape(-1, 2)
    column = rows.version_runs(flat[:, 0], flat[:, 1], np.cumsum([0, *map(len, runs)]))
    assert column.type == rows.RUNS
    table = pa.table({"version_runs": column}).slice(first)
    assert table["version_runs"].to_pylist() == [
        [{"version": version, "tokens": tokens} for version, tokens in row] for row in runs[first:]
    ]
    wanted = [version for row in runs[first:] for version, tokens in row for _ in range(tokens)]
    assert rows.token_versions(table).tolist() == wanted


def test_a_row_keeps_its_runs_in_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import pyarrow.parquet as pq

    column = rows.version_runs(np.array([4, 5]), np.array([2, 1]), np.array([0, 2]))
    pq.write_table(pa.table({"version_runs": column}), tmp_path / "rows.parquet")
    assert rows.token_versions(pq.read_table(tmp_path / "rows.parquet")).tolist() == [4, 4, 5]


@pytest.mark.parametrize("name", rows.ROLLOUT.names)
def test_no_column_may_be_missing(name: str) -> None:
    values = {field.name: pa.nulls(1, field.type) for field in rows.ROLLOUT if field.name != name}
    with pytest.raises(ValueError, match=f"column '{name}' is missing"):
        rows.append(pa.table({"uid": ["a"]}), rows.ROLLOUT, values)
