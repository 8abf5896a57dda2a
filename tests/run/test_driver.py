from pathlib import Path

from pipeline.run.driver import what_remains
from pipeline.storage import checkpoints


def test_what_a_run_that_broke_off_can_go_on_with(tmp_path: Path) -> None:
    assert what_remains(str(tmp_path)) == "No checkpoint was saved; the same command begins again"
    for iteration, files in ((2, True), (4, False)):
        folder = tmp_path / checkpoints.FOLDER / checkpoints.folder_name(iteration)
        folder.mkdir(parents=True)
        if files:
            (folder / "progress.json").write_text('{"version": 2, "world_size": 1}')
            (folder / checkpoints.complete_name(0)).write_text("")
    said = what_remains(str(tmp_path))
    assert said.startswith("The newest checkpoint is ") and "iteration_000002; the same command continues" in said
    (tmp_path / checkpoints.FOLDER / "iteration_000004" / "progress.json").write_text("{")
    assert what_remains(str(tmp_path)) == said
    (tmp_path / checkpoints.FOLDER / "iteration_000002" / "progress.json").write_text("{")
    assert what_remains(str(tmp_path)).startswith("Which checkpoint remains cannot be read (")
