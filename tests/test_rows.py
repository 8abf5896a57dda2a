import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import rows

RUN = st.tuples(st.integers(0, 2**40), st.integers(0, 5))


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


@pytest.mark.parametrize("cut", [0, 1, 4])
def test_images_of_a_group_once(cut: int) -> None:
    images = pa.array([[b"a", b"b"]] * 3 + [[]] * 2 + [None] + [[b"c"]], rows.BINARIES)
    hashes = pa.array([[image * 16 for image in row or ()] for row in images.to_pylist()], rows.BINARIES)
    table = pa.table({"uid": list("xxxyyzx"), "images": images, "image_hash": hashes, "n": range(7)}).slice(cut)
    once = rows.images_once(table)
    wanted = [[b"a", b"b"], None, None, [], None, None, [b"c"]][cut:]
    wanted[0] = images[cut].as_py()
    assert once["images"].to_pylist() == wanted and once.drop_columns(["images"]) == table.drop_columns(["images"])
    assert once.schema == table.schema and rows.images_once(table.slice(0, 0)) == table.slice(0, 0)
    assert rows.images_once(table.drop_columns(["images"])) == table.drop_columns(["images"])


def test_images_of_an_episode_that_differ_from_those_of_the_first_row_stay() -> None:
    images = [[b"a"], [b"a", b"b"], [b"a"], [b"c"], [b"c"]]
    table = pa.table({"uid": list("xxxyy"), "images": pa.array(images, rows.BINARIES)})
    table = table.append_column("image_hash", table["images"])
    assert rows.images_once(table)["images"].to_pylist() == [[b"a"], [b"a", b"b"], None, [b"c"], None]


@pytest.mark.parametrize("name", rows.ROLLOUT.names)
def test_no_column_may_be_missing(name: str) -> None:
    values = {field.name: pa.nulls(1, field.type) for field in rows.ROLLOUT if field.name != name}
    with pytest.raises(ValueError, match=f"column '{name}' is missing"):
        rows.append(pa.table({"uid": ["a"]}), rows.ROLLOUT, values)


SPAN = st.tuples(
    st.sampled_from([rows.ANSWER, rows.OBSERVATION]), st.integers(0, 3), st.none() | st.floats(-2, 2, width=32)
)


@given(st.lists(st.lists(SPAN, max_size=5), max_size=6), st.integers(0, 6))
def test_spans_of_episodes(episodes: list[list[tuple[int, int, float | None]]], first: int) -> None:
    made = [[dict(zip(("kind", "tokens", "reward"), span, strict=True)) for span in spans] for spans in episodes]
    table = pa.table({"spans": pa.array(made, rows.SPANS), "uid": [str(row) for row in range(len(made))]}).slice(first)
    lengths = [sum(span["tokens"] for span in spans) for spans in made[first:]]
    found = rows.spans_of(table, np.cumsum([0, *lengths]))
    begin, number = 0, 0
    for row, spans in enumerate(made[first:]):
        turn = 0
        for span in spans:
            is_answer = span["kind"] == rows.ANSWER
            assert (found.row[number], found.answer[number]) == (row, is_answer)
            assert found.turn[number] == (turn if is_answer else -1)
            assert (found.tokens[number], found.tokens[number + 1]) == (begin, begin + span["tokens"])
            reward = found.reward[number]
            assert np.isnan(reward) if span["reward"] is None else reward == span["reward"]
            turn, begin, number = turn + is_answer, begin + span["tokens"], number + 1
    assert number == len(found.row)


def test_spans_must_cover_the_response() -> None:
    table = pa.table({"spans": pa.array([[], None], rows.SPANS), "uid": ["a", "b"]})
    with pytest.raises(ValueError, match="'spans' is null in a row"):
        rows.spans_of(table, np.array([0, 0, 0]))
    with pytest.raises(ValueError, match="uid a have 0 tokens, and its response has 2"):
        rows.spans_of(table.slice(0, 1), np.array([0, 2]))
