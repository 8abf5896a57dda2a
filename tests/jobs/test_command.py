"""The command `slipstream`."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jobs.__main__ import JOBS, main
from jobs.command import called, new_parser

ROOT = Path(__file__).resolve().parents[2]


def test_every_job_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    runnable = [path for path in (ROOT / "jobs").rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    names = {path.parent.name if path.stem == "__main__" else path.stem for path in runnable} - {"jobs"}
    assert set(JOBS) == names
    for arguments in (["--help"], []):
        assert main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert {line.split()[0] for line in lines if line.startswith("  ")} == names
        assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("name", "hint"), [("trian", "did you mean train?"), ("zzz", "slipstream --help lists them"), ("kuberay", "")]
)
def test_an_unknown_job_is_refused(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "a=1"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"slipstream: the job '{name}' does not exist; ") and hint in captured.err
    assert captured.out == ""


def test_help_and_refusals_import_nothing_heavy() -> None:
    code = (
        "import sys; from jobs.__main__ import main; main(['--help']); main(['trian'])\n"
        "print([name for name in ('torch', 'ray', 'pyarrow', 'hydra', 'rich', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_job_gets_its_arguments_and_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward_of_the_user.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(ROOT))])
    options = ["--out", "data", "--train", "8", "--test", "2"]
    assert main(["prepare", "countdown", *options]) == 0
    assert Path("data/train.parquet").is_file() and importlib.util.find_spec("reward_of_the_user")
    assert main(["prepare", "countdown", *options, "--seed", "-1"]) == 2
    assert main(["from-verl", "nowhere.sh"]) == 2


def test_texts_name_a_job_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/venv/bin/slipstream", "train"])
    assert called("train") == ["slipstream", "train"]
    assert new_parser("show", "", "  python -m jobs.show runs/a").epilog == "  slipstream show runs/a"
    monkeypatch.setattr(sys, "argv", ["/code/jobs/train.py"])
    assert called("train") == ["python", "-m", "jobs.train"]


def test_the_package_installs_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"slipstream": "slipstream:main"}


def test_what_only_some_runs_use_is_an_extra_that_the_locks_hold() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = {re.split(r"[^\w-]", package)[0] for package in project["dependencies"]}
    for name in ("agents", "judge", "lora", "tensorboard"):
        for package in project["optional-dependencies"][name]:
            distribution = re.split(r"[^\w-]", package)[0]
            assert distribution not in always
            for accelerator in ("cpu", "gpu"):
                lock = (ROOT / "requirements" / f"{accelerator}.lock").read_text()
                assert f"\n{distribution}==" in lock, (accelerator, distribution)


def test_messages_name_packages_that_are_ours() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    all_of_them = [project["dependencies"], *project["optional-dependencies"].values()]
    packages = {re.split(r"[^\w-]", package)[0] for some in all_of_them for package in some}
    sources = [path.read_text() for folder in ("pipeline", "jobs") for path in (ROOT / folder).rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"pip install ([a-z]\w+)\b", text)}
    assert {"gguf", "openai", "peft", "nixl", "torchao", "tensorboard", "wandb"} <= named <= packages


EXTRAS = ("anthropic", "mcp", "openai", "peft", "tensorboard", "websockets")
WITHOUT = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1].split())  # importing them raises ImportError
import jobs.evaluate, jobs.export, jobs.replay, jobs.train, pipeline.agent.inside.load, pipeline.track.loggers
from jobs.from_verl import main
sys.exit(main(["run.sh"]))
"""


def test_commands_begin_without_the_extras(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo data.train_batch_size=8\n")
    command = [sys.executable, "-c", WITHOUT, " ".join(EXTRAS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "train_batch_size: 8" in done.stdout
