"""Check the converter against verl's own scripts: `python -m tests.jobs.verl.scripts FOLDER`, a clone of verl.

`scripts.json` lists scripts of verl, each with its repository, path, commit and length, the exit code of the
conversion, and a digest of the experiment. Their texts are not part of this project. Names of runs are left out of the
digest, because some hold the date.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from jobs.from_verl import main

LIST = Path(__file__).with_name("scripts.json")
HOME, WORK = "/home/me", "/home/me/verl"


def result(path: Path) -> dict[str, Any]:
    """Convert a script as a user of `HOME` in the folder `WORK`; return its exit code and the experiment's digest."""
    printed, said = io.StringIO(), io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"HOME": HOME, "PWD": WORK}),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
    ):
        script = Path(folder) / "examples" / "trainer" / "run.sh"
        script.parent.mkdir(parents=True)
        script.write_bytes(path.read_bytes())
        code = main([str(script)])
        text = printed.getvalue().replace(str(Path(folder).resolve()), WORK)
    if code == 2:
        return {"code": code, "digest": None}
    values = yaml.safe_load(text)
    values["trainer"].pop("experiment_name", None)
    settings = json.dumps(values, sort_keys=True).encode()
    return {"code": code, "digest": hashlib.sha256(settings).hexdigest()[:16]}


def check(folder: Path) -> int:
    """Compare the scripts of the list that are in `folder` with it; print each, and return the number that differ."""
    differing = checked = 0
    for entry in json.loads(LIST.read_text()):
        for path in (folder / entry["path"], folder / entry["repository"] / entry["path"]):
            if path.is_file() and len(path.read_text(encoding="utf-8")) == entry["length"]:
                same = result(path) == {"code": entry["code"], "digest": entry["digest"]}
                checked, differing = checked + 1, differing + (not same)
                print("same    " if same else "differs ", entry["path"])
    print(f"{checked} scripts, {differing} differ")
    return differing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    sys.exit(min(check(parser.parse_args().folder), 1))
