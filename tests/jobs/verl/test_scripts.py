"""The list of verl's scripts, and the command that checks them."""

import json
from pathlib import Path

import pytest

from tests.jobs.verl import scripts

START = "python3 -m verl.trainer.main_ppo data.train_files=$HOME/a.parquet data.val_files=$PWD/b.parquet"
NAMED = f'{START} trainer.experiment_name=run_$(date +%s) +custom_reward_function.path="$(dirname $0)/r.py"\n'


def test_the_list_says_what_became_of_each_script() -> None:
    entries = json.loads(scripts.LIST.read_text())
    assert len({(entry["repository"], entry["path"]) for entry in entries}) == len(entries) > 20
    for entry in entries:
        assert len(bytes.fromhex(entry["commit"])) == 20 and entry["path"].endswith(".sh")
        assert entry["code"] in (0, 2, 3) and (entry["digest"] is None) == (entry["code"] == 2)


def test_a_script_that_converts_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The digest holds neither the date nor the folder of the script."""
    listed = []
    for name, text in {"same": NAMED, "other": f"{START} trainer.total_epochs=3\n"}.items():
        path = tmp_path / "verl" / "examples" / f"{name}.sh"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        known = {"repository": "verl", "path": f"examples/{name}.sh", "commit": "0" * 40, "length": len(text)}
        listed.append({**known, **scripts.result(path)})
    path.write_text(path.read_text().replace("epochs=3", "epochs=4"))
    monkeypatch.setattr(scripts, "LIST", tmp_path / "list.json")
    scripts.LIST.write_text(json.dumps(listed))
    assert scripts.check(tmp_path) == 1
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["same", "examples/same.sh"],
        ["differs", "examples/other.sh"],
        ["2", "scripts,", "1", "differ"],
    ]
