"""Runs of bash scripts with recorders in place of programs. The sandbox runs this file, which imports nothing else.

It reads scripts and variables as JSON from standard input, and writes a report of each run as JSON. PATH holds a few
text tools, and recorders under the names of launchers. A command that bash does not find is recorded, too.

A run does not know outputs of programs, their success, the files of the machine, and variables that are not set. So
the scripts run once for each of `KINDS`, and each kind answers one of these questions differently. A command that is
not the same in all runs depends on the answer.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

KINDS = ("again", "plain", "prints", "fails", "files", "globs")
"""Runs after the first one, which decides: the same again; unset variables are empty; programs print a number;
programs fail; tests of files turn out the other way; patterns of file names match nothing."""

TOOLS = "awk basename bash cat cut date dirname expr grep head mkdir readlink realpath rev sed seq sort tail tr uniq wc"
PROGRAMS = ("/bin", "/usr/bin", "/usr/local/bin")
RECORDED = "accelerate nohup python python3 ray sbatch srun torchrun uv"
TOP = ".top_of_these_files"
ROOT = f"{os.getcwd()}/{TOP}"  # stands for the root of the file system
NOT_SET = "\x02{}\x03"  # the value of a variable that is not set
NUMBER = "7"  # the same in arithmetic, and the output of programs
MAX_REPAIRS, MAX_LOG, MAX_ERRORS = 60, 1 << 20, 1 << 14
CPU_SECONDS, SECONDS = 1, 30.0  # of one run
SLEEPS = 10  # of a loop that waits

SHELL = r"""
_record() {
    local line=${_AT:-$1}; shift
    if [[ "$1" == python* && "${*:2}" == "-c import torch_npu" ]]; then return 1; fi
    printf '%s\0' "$(($# + 2))" "$_SCRIPT" "$line" "$@" >> "$_LOG"
    case $_KIND in prints) printf '7\n' ;; fails) return 1 ;; esac
}
command_not_found_handle() { _record "${BASH_LINENO[0]}" "$@"; }
_failed() {
    local status=$1; shift
    # These two answer with status 1.
    [[ $status -gt 2 || ( $status -eq 1 && ( $2 == grep || $2 == expr ) ) ]] && return "$status"
    _record "$@"
}
_line='"${BASH_LINENO[0]}"'
for _name in awk cat cut grep expr head readlink realpath rev sed sort tail tr uniq wc; do
    eval "$_name() { builtin command $_name \"\$@\" 2> /dev/null || _failed \$? $_line $_name \"\$@\"; }"
done
for _name in RECORDED; do eval "$_name() { _record $_line $_name \"\$@\"; }"; done
unset _name _line
date() { builtin command date -d "@$_NOW" "$@"; }
tee() { builtin command cat; }
which() { printf '%s\n' "$@"; }
mkdir() { builtin command mkdir "$@" 2> /dev/null; return 0; }
ulimit() { :; }
kill() { :; }
exit() {
    local status=${1-$?}
    [[ $BASHPID == $$ ]] && printf '%s\0' 2 "${_AT:-${BASH_LINENO[0]}}" "exit $status" >> "$_LOG"
    builtin exit "$status"
}
# A loop that sleeps waits for something; it goes on for a while.
sleep() { :; }
shopt -s expand_aliases
_SLEPT=0
alias sleep='(( ++_SLEPT % SLEEPS == 0 )) && break 2> /dev/null || :'
command() {
    builtin command "$@" || { local status=$?; [[ ${1-} == -[vV] && -n $_FILES ]] || return "$status"; }
}
_enter() {
    builtin "$@" 2> /dev/null && return
    [[ $# -gt 1 ]] || return
    local folder=${!#}
    [[ $folder == /* && $folder != "$_ROOT"/* ]] && folder=$_ROOT$folder
    builtin command mkdir -p -- "$folder" && builtin "$1" "$folder"
}
cd() { _enter cd "$@"; }
pushd() { _enter pushd "$@"; }
_read() {
    local line=$1; shift
    if [[ -f ${2-} ]]; then builtin source "${@:2}"; else _record "$line" "$@"; fi
}
source() { _read "${BASH_LINENO[0]}" source "$@"; }
function . { _read "${BASH_LINENO[0]}" . "$@"; }
_shell() {
    local line=$1; shift
    if [[ $# -gt 1 && ${2-} != -*[cs] && ! -f ${2-} ]]; then _record "$line" "$@"; return; fi
    _AT=${_AT:-$line} builtin command bash "${@:2}"
}
bash() { _shell "${BASH_LINENO[0]}" bash "$@"; }
sh() { _shell "${BASH_LINENO[0]}" sh "$@"; }
""".replace("RECORDED", RECORDED).replace("SLEEPS", str(SLEEPS))

_START = "export _SCRIPT; unset BASH_EXECUTION_STRING {}\n"
_SCRIPT = "_SCRIPT={} BASH_ARGV0={}; builtin source {}; printf '%s\\0' 1 end >> \"$_LOG\"\n"
_SET_BY_BASH = ("HOSTNAME", "HOSTTYPE", "MACHTYPE", "OSTYPE")
# Bash makes a process substitution a file of `/proc`, which the sandbox lacks.
_TO_TEE = re.compile(r">\s*>\(\s*tee\b(?:[^()\n]|\([^()\n]*\))*\)")
_ERREXIT = re.compile(r"(\bset\s+-[a-zA-Z]*)e|-o\s+errexit\b")
_FILE_TEST = re.compile(r"((?:\[|\btest|&&|\|\||!)\s+)-[defrswx](?=\s)")
_UNBOUND = re.compile(r"line (\d{1,7}): \$?(\w+)(\[.*\])?: (.*)")
_NO_FILE = re.compile(r"line \d+: (.*): (?:No such file or directory|Permission denied|Read-only file system)")
_NUMBER = re.compile("[0-9]{1,7}")
_NO_NUMBER = re.compile("\x02(\\w+)\x03.*(?:syntax error|expression expected)")


class Runs:
    """Scripts, and what bash lacks to run them."""

    def __init__(self, scripts: list[tuple[str, str]], variables: dict[str, str], work: str, now: float) -> None:
        """
        Args:
            scripts: paths and texts.
            variables: the environment.
            work: folder in which the scripts start.
            now: seconds since 1970 that `date` prints.
        """
        self.scripts = {ROOT + path: _TO_TEE.sub("> /dev/null", text) for path, text in scripts}
        self.work = ROOT + work
        here = os.getcwd()
        self.variables = {**variables, "_NOW": str(int(now)), "_ROOT": ROOT, "PATH": f"{here}/.bin"}
        if "HOME" in variables:
            self.variables["HOME"] = ROOT + variables["HOME"]
        self.variables["BASH_ENV"] = f"{here}/.shell"
        self.files = False
        """True if tests of files hold."""
        self.not_set: dict[str, tuple[int, str]] = {}
        """Variables that are not set, each with the line that reads it and its value in the runs."""
        self.folders: set[str] = set()
        """Folders of files that the scripts write."""
        self.programs = {f"{folder}/{name}" for name in RECORDED.split() for folder in PROGRAMS}
        """Programs that the scripts call by a path."""
        self._number = 0
        os.mkdir(".bin")
        for tool in TOOLS.split():
            if path := shutil.which(tool):
                os.symlink(path, f".bin/{tool}")
        self._bash = shutil.which("bash") or "bash"
        for name in RECORDED.split():
            # The mode is given here, because a sandbox without namespaces refuses to change it.
            with open(f".bin/{name}", "w", opener=lambda path, flags: os.open(path, flags, 0o755)) as file:
                file.write(f'#!{self._bash}\n_record 0 "${{0##*/}}" "$@"\n')

    def first(self) -> dict[str, Any]:
        """Return the run that decides. It is repeated until nothing is lacking that can be given."""
        report = self._repaired()
        if not report["ended"] and report["exited"]:
            # A script that ends because a file is missing is meant for a machine that has the file.
            self.files = True
            other = self._repaired()
            if len(other["commands"]) > len(report["commands"]):
                return other
            self.files = False
        return report

    def _repaired(self) -> dict[str, Any]:
        for _ in range(MAX_REPAIRS):
            report = self.run("first")
            if not self._repair(report["errors"]):
                break
        return report

    def run(self, kind: str) -> dict[str, Any]:
        """Run all scripts in one shell; return its commands, its end and its errors."""
        files = self.files != (kind == "files")
        self._write_files(kind, files)
        self._number += 1
        log, errors = (f"{os.getcwd()}/.{name}{self._number}" for name in ("log", "errors"))
        values = {} if kind == "plain" else {name: value for name, (_, value) in self.not_set.items()}
        arguments = [values.pop(name) for name in sorted(values) if name.isdecimal()]
        ours = [name for name in _SET_BY_BASH if name not in {**self.variables, **values}]
        # A loop that never ends takes CPU time, on a busy machine as well: `sleep` returns at once.
        start = f"builtin ulimit -t {CPU_SECONDS}\n"
        start += _START.format(" ".join(ours))
        start += "set -u\n" * (kind == "first") + "shopt -s nullglob\n" * (kind == "globs")
        for number, path in enumerate(self.scripts):
            start += _SCRIPT.format(number, _quoted(path), _quoted(path))
        with open(errors, "wb") as stderr, open(".input", "rb") as given:
            process = subprocess.Popen(
                [self._bash, "-c", f"{start}wait", list(self.scripts)[-1], *arguments],
                cwd=self.work,
                env={**self.variables, **values, "_KIND": kind, "_FILES": "1" * files, "_LOG": log},
                stdin=given if kind == "prints" else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        entries = list(_entries(_text(log, MAX_LOG)))
        lines = _text(errors, MAX_ERRORS, from_end=True).splitlines()
        return {
            "commands": [entry for entry in entries if len(entry) > 2],
            "ended": sum(entry == ["end"] for entry in entries) == len(self.scripts),
            "exits": [f"line {entry[0]}: {entry[1]}" for entry in entries if len(entry) == 2],
            "exited": process.returncode is not None and process.returncode >= 0,
            "errors": [line for line in lines if re.search(r"\bline \d+: ", line) and not line.startswith("+")],
        }

    def _write_files(self, kind: str, files: bool) -> None:
        shutil.rmtree(ROOT, ignore_errors=True)
        for folder in {self.work, self.variables.get("HOME", self.work), *self.folders}:
            os.makedirs(folder, exist_ok=True)
        with open(".shell", "w") as file:
            file.write(SHELL)
            for program in sorted(self.programs):
                file.write(f'function {program} {{ _record "${{BASH_LINENO[0]}}" {program} "$@"; }}\n')
        with open(".input", "w") as file:
            file.write(f"{NUMBER}\n" * 7)
        for path, text in self.scripts.items():
            text = _ERREXIT.sub(r"\1", text) if kind == "fails" else text
            text = _FILE_TEST.sub(r"\1-n", text) if files else text
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)

    def _repair(self, errors: list[str]) -> bool:
        """Give the scripts what a run lacked: values, programs and folders; return whether anything is new."""
        before = self.scripts, len(self.folders), len(self.programs), dict(self.not_set)
        for error in errors:
            if match := _UNBOUND.search(error):
                line, name, place, problem = match.groups()
                required = any(re.search(rf"\$\{{{name}:?\?", text) for text in self.scripts.values())
                filled = place and any(re.search(rf"\b{name}(?:\+?=|\s*<)", text) for text in self.scripts.values())
                if (problem == "unbound variable" or required) and not filled:
                    self.not_set.setdefault(name, (int(line), NOT_SET.format(name)))
                if place:
                    # A list that is filled with a program's output has no elements here.
                    element = f"${{{name}{place}"
                    self._replace(re.escape(element + "}"), element + "-}")
            if (match := _NO_NUMBER.search(error)) and match[1] in self.not_set:
                self.not_set[match[1]] = self.not_set[match[1]][0], NUMBER
                break  # what follows may lack the result
            if match := _NO_FILE.search(error):
                if re.fullmatch(r"[\w./+@:-]*/[\w.+@:-]+", match[1]):
                    self.programs.add(match[1])
                folder = os.path.dirname(os.path.normpath(os.path.join(self.work, match[1])))
                if not folder.startswith(ROOT):
                    self._replace(rf"(?<![\w./-]){re.escape(folder)}(?![\w.-])", ROOT + folder)
                    folder = ROOT + folder
                self.folders.add(folder)
        return (self.scripts, len(self.folders), len(self.programs), self.not_set) != before

    def _replace(self, pattern: str, by: str) -> None:
        self.scripts = {path: re.sub(pattern, lambda _: by, text) for path, text in self.scripts.items()}


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _entries(log: str) -> Iterator[list[str]]:
    """Yield the entries of a log; the number of its texts stands before each.

    A script may write anything into the log, and the end of a long log is cut off.
    """
    texts = iter(log.split("\0")[:-1])
    for count in texts:
        size = int(count) if _NUMBER.fullmatch(count) else 0
        entry = list(itertools.islice(texts, size))
        if entry and len(entry) == size and all(map(_NUMBER.fullmatch, entry[: min(size - 1, 2)])):
            yield entry


def _text(path: str, size: int, from_end: bool = False) -> str:
    if not os.path.exists(path):
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - size) if from_end else 0)
        return file.read(size).decode(errors="replace")


def main() -> None:
    """Read the job, run the scripts, and write the reports."""
    job = json.load(sys.stdin)
    runs = Runs(job["scripts"], job["variables"], job["work"], job["now"])
    reports = {"first": runs.first()}
    if reports["first"]["commands"]:
        reports.update((kind, runs.run(kind)) for kind in KINDS)
    lines = {name: line for name, (line, _) in runs.not_set.items()}
    print(json.dumps({"runs": reports, "not_set": lines, "top": TOP}).replace(ROOT, ""))
