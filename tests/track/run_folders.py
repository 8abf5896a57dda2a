"""Folders of runs as a run leaves them, for tests of what reads them."""

import json
from pathlib import Path
from typing import Any


def write_run(folder: Path, *records: dict[str, Any]) -> Path:
    """`folder` with these lines of `metrics.jsonl`."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder
