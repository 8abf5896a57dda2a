"""The command line that compares runs."""

from pathlib import Path

import pytest

from jobs.compare import main
from tests.track.run_folders import write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    for name, score in (("one", 0.25), ("two", 0.5)):
        record = {"iteration": 3, "critic/score/mean": 0.1, "timing_s/step": 1.5, "val-core/s/acc/mean@1": score}
        write_run(tmp_path / name, record)
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def test_figure_and_table(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "compared.png"
    assert main([*runs, "--out", str(out), "--labels", "PPO, REINFORCE++"]) == 0
    printed = capsys.readouterr()
    assert out.read_bytes().startswith(b"\x89PNG") and printed.err == ""
    lines = [line.split() for line in printed.out.splitlines()]
    assert ["PPO", "0.250", "(3)", "0.250", "(3)", "0.250", "(3)", "1.50"] in lines
    assert ["REINFORCE++", "0.500", "(3)", "0.500", "(3)", "0.500", "(3)", "1.50"] in lines


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--out", "compared.jpg"], 2, "compared.jpg is not the name of a PNG file"),
        (["--labels", "one", "--out", "compared.png"], 2, "1 labels (one) for 2 runs"),
        (["--out", "mine.png"], 2, "mine.png exists and is not a PNG file; choose another name or remove it"),
        (["nowhere", "--out", "compared.png"], 2, "nowhere is not a folder"),
        (["--out", "one/metrics.jsonl/compared.png"], 1, "the figure cannot be written to one/metrics.jsonl"),
    ],
)
def test_refusals_are_one_sentence(
    runs: list[str], arguments: list[str], code: int, sentence: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.png").write_text("mine")
    assert main([*runs, *arguments]) == code
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and sentence in error and len(error.splitlines()) == 1
    assert not list(tmp_path.glob("compared.*"))
