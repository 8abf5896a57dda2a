import json

import pyarrow.dataset as ds
import pytest

from pipeline.prompts.parquet import Place
from pipeline.prompts.quarantine import Quarantine


def test_without_a_limit_the_first_row_is_the_error():
    with pytest.raises(ValueError, match=r"^a, row 1 \(row group 0\): it is wrong$"):
        Quarantine(0).add(Place("a", 0, 1), {}, ValueError("it is wrong"))


def test_rows_are_listed_once_with_place_reason_and_content(tmp_path):
    run = str(tmp_path / "run")
    quarantine = Quarantine(2, run)
    quarantine.add(Place("a.parquet", 2, 17), {"prompt": [b"x"], "n": 1}, ValueError("why"))
    quarantine.add(Place("b.parquet", 0, 3), {"n": 2}, ValueError("no row"))
    # Met again in the next epoch, and by a process that was started again.
    quarantine.add(Place("a.parquet", 2, 17), {}, ValueError("why"))
    again = Quarantine(2, run)
    again.add(Place("b.parquet", 0, 3), {}, ValueError("no row"))
    assert quarantine.count == again.count == 2
    rows = ds.dataset(f"{run}/quarantine").to_table().to_pylist()
    assert sorted(rows, key=lambda row: row["file"]) == [
        {
            "file": "a.parquet",
            "row_group": 2,
            "row": 17,
            "reason": "a.parquet, row 17 (row group 2): why",
            "content": json.dumps({"prompt": ["b'x'"], "n": 1}),
        },
        {
            "file": "b.parquet",
            "row_group": 0,
            "row": 3,
            "reason": "b.parquet, row 3 (row group 0): no row",
            "content": json.dumps({"n": 2}),
        },
    ]
    with pytest.raises(ValueError, match=rf"data\.max_bad_rows=2: 3 rows .* listed in {run}/quarantine.*: third"):
        again.add(Place("c", 0, 0), {}, ValueError("third"))
    # The one too many is listed too.
    assert Quarantine(9, run).count == 3


def test_without_a_folder_rows_are_counted():
    quarantine = Quarantine(1)
    quarantine.add(Place("a", 0, 0), {}, ValueError("first"))
    with pytest.raises(ValueError, match=r"2 rows cannot be used, the run has not begun"):
        quarantine.add(Place("a", 0, 1), {}, ValueError("second"))
