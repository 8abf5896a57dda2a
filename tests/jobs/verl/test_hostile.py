"""Scripts that attack: what they reach, what ends them, and what they may write into the record."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from jobs.verl.recorder import ScriptError, record
from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import runner
from pipeline.reward.sandbox.isolation import SandboxError
from pipeline.reward.sandbox.outcome import ProgramRun
from tests.jobs.verl.test_recorder import HERE, recorded, settings, started

FORGED = {
    "another script": r"3 99 1 x",
    "a number with a sign": r"3 -1 1 x",
    "a long number": r"3 0 $(printf '%05000d' 1) x",
    "the number of another alphabet": r"3 $'\u0663' 1 x",
    "more than there is": r"5000000 0 1 x",
    "no number": r"x 0 1 x",
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_records_are_passed_over(name: str) -> None:
    (command,) = recorded(f"python3 -m verl data.a=1\nprintf '%s\\0' {FORGED[name]} >> $_LOG").commands
    assert settings(command) == ["data.a=1"]


def test_a_record_that_is_cut_off_is_none() -> None:
    script = "A=$(printf '%0700000d' 1)\npython3 -m verl data.a=1\npython3 -m verl data.b=$A data.c=$A"
    assert settings(started(script)) == ["data.a=1"]


def test_forged_errors_of_bash(tmp_path: Path) -> None:
    text = "printf 'line %05000d: HOME: unbound variable\n' 1 >&2\npython3 -m verl data.a=1"
    assert settings(started(text)) == ["data.a=1"]


SECRET = "the-secret-of-the-user"


def test_hostile_scripts_stay_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the user is read, changed or made, no network is reached, and limits end what does not end."""
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.setenv("TOKEN", SECRET)
    text = f"""cat {tmp_path}/secret > {tmp_path}/copy
read -r A < {tmp_path}/secret
B=$(</etc/passwd)
/usr/bin/touch {tmp_path}/touched
/bin/rm -rf {tmp_path}
builtin command rm -rf {tmp_path}
trap '/usr/bin/touch {tmp_path}/trap' EXIT
(exec 3<> /dev/tcp/127.0.0.1/22) && C=open
D=$(/usr/bin/env)
enable -f {tmp_path}/secret x
python3 -m verl data.a="$A" data.b="$B" data.c=${{C:-closed}} data.d="$D"
"""
    command = started(text, PWD=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]
    assert (tmp_path / "secret").read_text() == SECRET
    assert SECRET not in str(command) and "data.c=closed" in command.arguments and "data.b=" in command.arguments


@pytest.mark.parametrize("text", ["while true; do :; done", "A=a; while true; do A=$A$A; done", "/bin/kill -9 $PPID"])
def test_scripts_that_take_everything_are_ended(text: str) -> None:
    with pytest.raises(ScriptError, match=r"ended the script|does not end|line 1"):
        recorded(text)


def test_many_processes_end_with_the_sandbox() -> None:
    assert not recorded("x() { x | x & }; x").commands


def test_without_a_sandbox_a_script_runs_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner.run

    def without_namespaces(code: str, stdin: str, config: SandboxConfig) -> ProgramRun:
        if config.isolation == "namespaces":
            raise SandboxError("no user namespaces")
        return run(code, stdin, config)

    monkeypatch.setattr(runner, "run", without_namespaces)
    scripts: Mapping[str, str] = {"/jobs/x/run.sh": "mkdir logs; python3 -m verl data.a=$(basename $PWD) > logs/x"}
    with pytest.raises(ScriptError, match=r"sandbox, which this machine does not allow \(no user namespaces\).*--run"):
        record(scripts, HERE)
    ((command,),) = (recording.commands for recording in record(scripts, HERE, bare=True))
    assert settings(command) == ["data.a=x"]


def test_odd_letters() -> None:
    assert settings(started("python3 -m verl data.a='\x02A\x03' data.b='é\n\t' data.c='\x1e'")) == [
        "data.a=${A}",
        "data.b=é\n\t",
        "data.c=\x1e",
    ]
