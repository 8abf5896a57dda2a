import json

import pyarrow.dataset as ds
import pytest

from pipeline.prompts.prompt_file import Place
from pipeline.prompts.quarantine import Quarantine


def test_without_a_limit_the_first_row_is_the_error():
    error = ValueError("it is wrong")
    with pytest.raises(ValueError) as raised:
        Quarantine(0).add(Place("a", 0, 1), {}, error)
    assert raised.value is error


def test_rows_are_listed_once_with_place_reason_and_content(tmp_path):
    run = str(tmp_path / "run")
    quarantine = Quarantine(3, run)
    quarantine.add(Place("a.parquet", 2, 17), {"prompt": [b"x"], "n": 1}, ValueError("why"))
    quarantine.add(Place("b.parquet", 0, 3), {"n": 2}, ValueError("no row"))
    # Met again in the next epoch, and by a process that was started again.
    quarantine.add(Place("a.parquet", 2, 17), {}, ValueError("why"))
    again = Quarantine(3, run)
    again.add(Place("b.parquet", 0, 3), {}, ValueError("no row"))
    assert quarantine.count == again.count == 2
    rows = ds.dataset(f"{run}/quarantine").to_table().to_pylist()
    assert sorted(rows, key=lambda row: row["file"]) == [
        {
            "file": "a.parquet",
            "row_group": 2,
            "row": 17,
            "reason": "why",
            "content": json.dumps({"prompt": ["b'x'"], "n": 1}),
        },
        {"file": "b.parquet", "row_group": 0, "row": 3, "reason": "no row", "content": json.dumps({"n": 2})},
    ]
    again.add(Place("c", 0, 0), {}, ValueError("third"))
    with pytest.raises(
        ValueError, match=rf"data\.max_bad_rows=3: 4 rows cannot be used, they are listed in {run}/quarantine.*: fourth"
    ):
        again.add(Place("d", 0, 0), {}, ValueError("fourth"))
    # The one too many is listed too.
    assert Quarantine(9, run).count == 4


def test_without_a_folder_rows_are_counted():
    quarantine = Quarantine(1)
    quarantine.add(Place("a", 0, 0), {}, ValueError("first"))
    with pytest.raises(ValueError, match=r"data\.max_bad_rows=1: 2 rows cannot be used, the run has not begun"):
        quarantine.add(Place("a", 0, 1), {}, ValueError("second"))


def test_a_limit_below_0():
    with pytest.raises(ValueError, match=r"data\.max_bad_rows is -1"):
        Quarantine(-1)
