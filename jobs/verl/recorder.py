"""Runs a script with recorders in place of the programs that it would start.

`bash` runs the script in a temporary folder. Its PATH holds a few tools that only print, and a recorder under the names
of `python3`, `ray`, `torchrun` and `uv`. Any other command is recorded, too, and counts as having succeeded. Nothing
of verl is run; `python3 -c` is. A program that the script calls by its full path is run as well, and redirections
write: a script that is not trusted must not be run so.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from shutil import which

from jobs.verl.script import Command
from jobs.verl.words import ScriptError

_TOOLS = (
    "bash basename cat cut date dirname echo expr grep head hostname id nproc readlink realpath sed seq sort tail tr"
)
_RECORDED = "accelerate conda nohup python python3 ray srun tee torchrun uv"
_END = "\x1e"

_RECORDER = """#!{bash}
name="${{0##*/}}"
if [[ "$name" == tee ]]; then exec cat; fi
if [[ "$name" == python* && "$1" == -c ]]; then exec {python} "$@"; fi
printf '%s\\0' "$name" "$@" $'\\x1e' >> {log}
"""
_SHELL = "ulimit() {{ :; }}\ncommand_not_found_handle() {{ printf '%s\\0' \"$@\" $'\\x1e' >> {log}; }}\n"


def record(script: Path, variables: Mapping[str, str], deadline: float = 60.0) -> list[Command]:
    """The commands that a script starts.

    Args:
        script: file for bash.
        variables: the environment; PATH is added.
        deadline: seconds after which the script is ended.

    Raises:
        ScriptError: it does not end in time, or it fails before it starts anything.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "bin").mkdir()
        log, names = folder / "log", {"log": folder / "log", "bash": which("bash"), "python": sys.executable}
        (folder / "shell").write_text(_SHELL.format(**names), encoding="utf-8")
        recorder = folder / "bin" / "recorder"
        recorder.write_text(_RECORDER.format(**names), encoding="utf-8")
        recorder.chmod(0o755)
        for program in _RECORDED.split():
            (folder / "bin" / program).symlink_to(recorder)
        for tool in _TOOLS.split():
            if path := which(tool):
                (folder / "bin" / tool).symlink_to(path)
        home = {"PATH": f"{folder}/bin", "BASH_ENV": f"{folder}/shell"}
        work = folder / "work"
        work.mkdir()
        process = subprocess.Popen(
            [str(names["bash"]), str(script.resolve())],
            cwd=work,
            env={**variables, **home},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            raise ScriptError(f"the script did not end within {deadline:g} s of --run") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        entries = log.read_text(encoding="utf-8", errors="replace").split(f"{_END}\0") if log.exists() else []
        if process.returncode and len(entries) <= 1:
            last = errors.decode(errors="replace").splitlines()[-1:]
            raise ScriptError(f"the script failed before it started anything: {' '.join(last)}")
    # The folder stands for the one in which the user would have run the script.
    return [
        Command(entry.replace(str(work), os.getcwd()).split("\0")[:-1], 0) for entry in entries if entry.strip("\0")
    ]
