"""The commands that scripts start, against bash itself if the script is harmless, and what is not known."""

import subprocess
from pathlib import Path

import pytest

from jobs.verl.recorder import Command, ScriptError, ScriptRecording, record

HERE = {"HOME": "/home/me", "PWD": "/jobs/x"}


def recorded(text: str, **variables: str) -> ScriptRecording:
    (recording,) = record({"/jobs/x/run.sh": text}, {**HERE, **variables})
    return recording


def started(text: str, **variables: str) -> Command:
    """The command with verl's module."""
    (command,) = [command for command in recorded(text, **variables).commands if "verl" in command.arguments]
    return command


def settings(command: Command) -> list[str]:
    """The arguments of verl's module."""
    return command.arguments[command.arguments.index("verl") + 1 :]


HARMLESS = {
    "quotes": """python3 -m verl data.a=1 data.b='x y' data.c="x y" data.d=x\\ y data.e='a'"b"c \\
  data.f=$'a\\tb' data.g="" data.h="it's" "data.i='x'" """,
    "continuations and comments": """# first
python3 -m verl \\
    data.a=1 \\
    data.b=x#y data.c=2 # the end
echo done""",
    "variables": """A=1 B="two words"; C=$A$B
D='$A'
python3 -m verl data.a=$A data.b="$B" data.c=${C} data.d=$D data.e="\\$A" data.f='"$A"'""",
    "defaults": """EMPTY=
python3 -m verl data.a=${NONE:-1} data.b=${NONE-2} data.c=${EMPTY:-3} data.d=${EMPTY-4} data.e=${EMPTY:+5} \\
  data.f=${NONE:-"a b"} data.g=${NONE:-${OTHER:-deep}} data.h=${ONE:=six} data.j=${1:-7} data.k=$ONE \\
  data.i="${NONE:-'[\\"it is\\"]'}" """,
    "arrays": """N=4
DATA=(
  data.n=$N   # four, isn't it
  data.files="['a','b']"
  "data.text=two words"
)
NONE=()
MORE=("${DATA[@]}" data.more=1)
MORE+=(data.last=2
)
LAUNCH=(python3 -m verl)
"${LAUNCH[@]}" "${MORE[@]}" "${NONE[@]}" ${NONE[@]+"${NONE[@]}"} ${DATA[@]+"${DATA[@]}"} \\
  ${DATA[@]} "data.c=${DATA[*]}" "data.${NONE[*]}" "<${DATA[@]}>" """,
    "arithmetic": """A=$((1024 * 4)); B=$(( (A + 7) / 3 - 2 )); C=$((A*$B-${B}*2)) D=$((1 - A % 3 - B))
python3 -m verl data.a=$A data.b=$B data.c=$C data.d=$D data.g=$(((1+2)*3))""",
    "redirections": """python3 -m verl data.a=1 2>&1 data.b=2 > /dev/null data.c=3 | tee /dev/null""",
    "here-document": """cat > /dev/null <<EOF
python3 -m verl data.no=1
EOF
cat <<-'END' > /dev/null
\tdata.no=2
\tEND
python3 -m verl data.a=1""",
    "prefixes": """set -euo pipefail; export X=1
Y=2 nohup python3 -m verl data.a=$X data.b=${Y:-none} || true""",
    "branches": """A=5; NAME=two_gpus
if [ "$A" -gt 4 ] && [[ $NAME == two* && -n $A ]]; then B=1; elif true; then B=2; else B=3; fi
case "$NAME" in one|three) C=1 ;; two*) C=2; echo "it's" ;; *) C=3 ;; esac
if ! false; then D=1; fi
[ -z "${NONE:-}" ] && E=yes || E=no
VOID=; [ "$VOID" ] && E=1; [[ $A && ! $VOID ]] && [ "$A" ] && E+=2; [ $VOID ] || E+=3; [ "a b" ] && E+=4
while false; do A=9; done
python3 -m verl data.a=$A data.b=$B data.c=$C data.d=$D data.e=$E""",
    "device": """DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case "${DEVICE}" in
  gpu) N=${NDEVICES:-8} ;;
  npu) N=16; EXTRA=(data.npu=1) ;;
  *) echo "no such device: ${DEVICE}" >&2; exit 1 ;;
esac
python3 -m verl data.n=$N "${EXTRA[@]}" """,
    "functions": """launch() { local A=5; if [ $# -eq 0 ]; then return; fi; python3 -m verl data.a=$A data.n=$# "$@" \\
    data.m=$1; }
function name { echo "run_$1"; }
launch
launch data.b=2 "data.c=$(name x) y" """,
    "options of the script": """LR=1e-6
while getopts "l:n:" option; do case $option in l) LR=$OPTARG ;; *) exit 1 ;; esac; done
while [[ $# -gt 0 ]]; do case "$1" in --lr) LR=$2; shift 2 ;; *) shift ;; esac; done
python3 -m verl data.lr=$LR""",
    "lines of alternatives": """A=2
if [[ $A == *"1"* ]]; then B=one
elif   [[ $A == *"2"* || $A == *"3"* ]]; then B=two
else B=none
fi
python3 -m verl data.b=$B""",
    "arithmetic with brackets in defaults": """A=3
B=${NONE:-$(((A + 1) * 2))}; C="x${NONE:-$(( (A - 1) % 2 ))}y"
python3 -m verl data.b=$B data.c=$C data.d=${A:-$(((1)))}""",
    "folders in folders": """A=a; B=b; export C=$A/$B/$A D="$B/$A/$B" # not $A/$B
E=$B/$A/x/$A
python3 -m verl data.c=$C data.d=$D data.e=$E data.f=$A/$B/$A""",
    "folders and file names": """HERE=$(pwd)
MINE="$(cd -- "$(dirname "${BASH_SOURCE[0]}")" > /dev/null 2>&1 && pwd)"; ABOVE=$(cd "$(dirname "$0")/.." && pwd)
(cd / && cd /)
python3 -m verl data.here=$HERE/x data.mine=$MINE data.above=$ABOVE data.pwd=$PWD data.name=$(basename "$0" .sh) \\
  data.file=$(basename $0) data.last=$(basename org/model-7b/) data.org=$(dirname org/model-7b) \\
  data.root=$(dirname /x) data.dot=$(dirname x) data.all=$(basename .sh .sh) data.end=$(cd /; echo $PWD; cd; cd /)""",
    "only what goes to the output": """A=$(echo -n x; echo y >&2; { echo z; } > /dev/null; echo w 2> /dev/null)
python3 -m verl data.a=$A""",
    "loops over known words": """LIST="3 4"; ALL=()
for SIZE in 1 '2 b' $LIST; do
  for KIND in k "$SIZE"; do ALL+=("data.x=$SIZE-$KIND"); done
done
for NEVER in ${NONE:-}; do ALL=(); done
python3 -m verl "${ALL[@]}" data.last=$SIZE""",
    "needed variables, further arguments": """python3 -m verl data.a=${HOME:?no home} data.b=${HOME?no} "${@:2}" ${@:3}
echo ${NONE:?the end}""",
    "groups": """{ (A=0); A=1; B=2; }
true && C=3 && (A=7; exit 0) && python3 -m verl data.a=$A data.b=$B data.c=$C""",
    "given as text": """CMD="python3 -m verl data.a=1"; CMD="$CMD data.b='two words'"
if [ -n "$CMD" ]; then eval "$CMD"; fi""",
}


PLAIN = """python3() { [[ "$*" == "-c import torch_npu" ]] && return 1; printf '%s\\0' "$@" > log; }
nohup() { "$@"; }
"""


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_scripts_start_what_bash_starts(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{PLAIN}{HARMLESS[name]}")
    environment = {"HOME": "/home/me", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", str(path)], cwd=tmp_path, env=environment, capture_output=True)
    (recording,) = record({str(path): HARMLESS[name]}, {"HOME": "/home/me", "PWD": str(tmp_path)})
    (command,) = [command for command in recording.commands if "verl" in command.arguments]
    assert ["-m", "verl", *settings(command), ""] == (tmp_path / "log").read_text().split("\0")
    assert not (command.unknown or command.more or command.doubt or recording.missing)


UNKNOWN = {
    "N=$(nproc); A=$((N * 2))": "the output of `nproc` (line 1)",
    "A=x`nproc`": "the output of `nproc` (line 1)",
    "A=$(nvidia-smi -L | wc -l)": "the output of `nvidia-smi -L` (line 1)",
    "A=$(cat x.txt)": "the output of `cat x.txt` (line 1)",
    "A=$(python3 -c 'print(3)')": "the output of `python3 -c print(3)` (line 1)",
    "A=$(hostname)": "the output of `hostname` (line 1)",
    "read -r A": "input that the script reads",
    "while read -r line; do A=2; done": "input that the script reads",
    "FILES=(/data/*.parquet); A=$FILES": "names of files",
    "A=$RANDOM": "changes from run to run",
    "A=$HOSTNAME": "$HOSTNAME in line 1 is not set; give HOSTNAME=VALUE",
    "A=${B:?no B}": "$B in line 1 is not set; give B=VALUE",
    "A=$((B + 3))": "whether $B is set; give B=VALUE",
    'if [ -n "$B" ]; then A=2; fi': "whether $B is set; give B=VALUE",
    "A=$1": "$1 in line 1 is an argument of the script",
    "A=<(:)": "a file of that run alone",
    "A=$(echo $HOME | cut -d/ -f3)": "parts of a folder's name",
    "A=$(pwd | tr / _)": "parts of a folder's name",
    "if [ -f /x ]; then A=2; fi": "files of the machine (line 1)",
    "if [ -f /x ]; then :; else A=2; fi": "files of the machine (line 1)",
    "[[ -d $HOME/x ]] && A=2": "files of the machine (line 1)",
    "A=5; [ -f /x ] && unset A": "files of the machine (line 1)",
    "command -v nvcc && A=2": "files of the machine (line 1)",
    "if [ -d x ]; then cd /; fi; A=$PWD": "files of the machine (line 1)",
    "nvidia-smi || A=2": "the success of `nvidia-smi` (line 1)",
    "grep -q x /etc/none || A=2": "the success of `grep -q x /etc/none` (line 1)",
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_a_value_that_a_run_cannot_know_has_a_reason(text: str) -> None:
    command = started(f"{text}\npython3 -m verl data.a=${{A-1}} data.b=3")
    ((argument, reason),) = command.unknown.items()
    assert argument.startswith("data.a=") and UNKNOWN[text] in reason


def test_given_variables_are_known() -> None:
    command = started("python3 -m verl data.a=${B:?no B} data.b=$((C + 1))", B="1", C="2")
    assert settings(command) == ["data.a=1", "data.b=3"] and not command.unknown


def test_settings_that_may_follow() -> None:
    command = started('A=(data.a=1)\nif [ -f /x ]; then A+=(data.b=2); fi\npython3 -m verl "${A[@]}"')
    assert settings(command) == ["data.a=1"] and "files of the machine (line 2)" in command.more["data.b=2"]
    assert "`extra` (line 1)" in started("python3 -m verl data.a=1 $(extra)").more["7"]


def test_a_start_that_depends_on_a_program_is_in_doubt() -> None:
    assert "`nvidia-smi` (line 1)" in str(started("if nvidia-smi; then\npython3 -m verl\nfi").doubt)
    assert started("set -e\nnvidia-smi\npip install x || exit 1\npython3 -m verl").doubt is None


def test_a_script_that_ends_without_its_files_is_meant_for_a_machine_with_them() -> None:
    text = "if [ ! -f /x ]; then exit 1; fi\n[[ -d y ]] || exit 1\nmkdir -p z || exit 1\npython3 -m verl data.a=1"
    command = started(text)
    assert settings(command) == ["data.a=1"] and not command.unknown and command.doubt is None
    assert not recorded("exit 0\npython3 -m verl").commands


WRITES = {
    "a folder that is made": "mkdir -p logs\npython3 -m verl data.a=$PWD > logs/run.log 2>&1",
    "a folder that is there": "python3 -m verl data.a=$PWD > logs/run.log 2>&1",
    "a folder of the machine": "LOGS=/data/logs\npython3 -m verl data.a=$PWD data.logs=$LOGS &> $LOGS/run.log",
    "the home folder": "nohup python3 -m verl data.a=$PWD > ~/run.log &",
    "a pipe": "exec > >(tee -a run.log) 2>&1\npython3 -m verl data.a=$PWD | tee /data/run.log",
}


@pytest.mark.parametrize("name", WRITES)
def test_files_that_a_script_writes(name: str) -> None:
    command = started(WRITES[name])
    assert settings(command)[0] == "data.a=/jobs/x" and not command.unknown
    assert settings(command)[1:] == ["data.logs=/data/logs"] * ("LOGS" in WRITES[name])


def test_folders_stand_for_the_folders_of_the_user() -> None:
    text = "cd /opt/verl || exit 1\npushd sub\npython3 -m verl data.a=$PWD data.b=${PWD%/*} data.c=$(basename $OLDPWD)"
    assert settings(started(text)) == ["data.a=/opt/verl/sub", "data.b=/opt/verl", "data.c=verl"]


def test_every_way_to_start_a_program_is_recorded() -> None:
    text = """exec 3>&1
ray start --head
env X=1 python3 a.py
$(which python3) b.py
(uv run python3 c.py)
bash -c 'python3 d.py'
eval "torchrun e.py"
bash missing.sh
sudo accelerate launch f.py
./launch.sh g.py > run.log
/usr/bin/python3 h.py
PYTHON=$HOME/conda/bin/python
$PYTHON i.py > /data/run.log
/opt/conda/bin/python j.py
exec python3 k.py"""
    found = [(command.line, " ".join(command.arguments)) for command in recorded(text).commands]
    assert found == [
        (2, "ray start --head"),
        (3, "env X=1 python3 a.py"),
        (4, "python3 b.py"),
        (5, "uv run python3 c.py"),
        (6, "python3 d.py"),
        (7, "torchrun e.py"),
        (8, "bash missing.sh"),
        (9, "sudo accelerate launch f.py"),
        (10, "./launch.sh g.py"),
        (11, "/usr/bin/python3 h.py"),
        (13, "/home/me/conda/bin/python i.py"),
        (14, "/opt/conda/bin/python j.py"),
        (0, "python3 k.py"),
    ]


def test_times_are_those_of_the_conversion() -> None:
    command = started("python3 -m verl data.a=$(date +%s) data.b=$(date -d yesterday +%Y | cut -c1)")
    assert not command.unknown and settings(command)[1] == "data.b=2"


def test_values_that_may_have_decided_a_branch_are_noted() -> None:
    text = "case $(uname -m) in x86*) A=1 ;; esac\nif [[ $RANK == 0 ]]; then A=2; fi\npython3 -m verl data.a=${A:-0}"
    notes = recorded(text).notes
    assert notes == [
        "`uname -m` (line 1) is not run, and prints nothing here",
        "$RANK in line 2 is not set; give RANK=VALUE",
    ]


def test_files_that_are_not_read_are_named() -> None:
    missing = recorded("source ./env.sh\n. other.sh\npython3 -m verl").missing
    assert [sentence.partition(" of ")[2].partition(" is")[0] for sentence in missing] == [
        "`source ./env.sh`",
        "`. other.sh`",
    ]
    assert missing[0].startswith("line 1: ") and "give it in front of this script" in missing[0]


def test_a_file_that_may_be_there_is_named() -> None:
    assert "line 1: `source .env` is not read" in recorded("[ -f .env ] && source .env\npython3 -m verl").notes[0]


WAITS = """N=${N:-2}; tries=0
while [ $(ray status | grep -c node_) -lt $N ]; do sleep 5; done
until nc -z head 6379; do tries=$((tries + 1)); sleep 1; done
while true; do
    if [ "$(ray status)" = ready ]; then break; fi
    echo waiting; sleep 2
done
for size in 1 2; do python3 -m verl data.n=$size; sleep 3; done
"""


@pytest.mark.parametrize("start", ["", "set -euo pipefail\n"])
def test_loops_that_wait_end(start: str) -> None:
    commands = [command for command in recorded(start + WAITS).commands if "verl" in command.arguments]
    assert [settings(command) for command in commands] == [["data.n=1"], ["data.n=2"]]
    assert all(command.doubt is None and not command.unknown for command in commands)


def test_lists_that_a_program_fills_may_be_empty() -> None:
    text = """nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
for ((i = 1; i <= SLURM_JOB_NUM_NODES - 1; i++)); do srun -w "${nodes[$i]}" ray start & done
srun -w "$head" python3 -m verl data.a=1 data.n=$SLURM_NNODES data.head=$head data.g=${GPUS[0]}"""
    command = started(text, SLURM_NNODES="2", SLURM_JOB_NODELIST="n[1-2]", SLURM_JOB_NUM_NODES="2")
    assert settings(command) == ["data.a=1", "data.n=2", "data.head=", "data.g=${GPUS}"]
    assert command.unknown.keys() == {"data.head=", "data.g=${GPUS}"} and not command.more
    assert "scontrol show hostnames" in command.unknown["data.head="] and "GPUS=VALUE" in str(command.unknown)


def test_a_result_that_is_not_known_is_not_a_variable_of_the_user() -> None:
    notes = recorded("n=$((NODES - 1))\nif ((n > 2)); then A=1; fi\npython3 -m verl data.n=$n").notes
    assert not any("$n " in note for note in notes)


def test_a_script_may_come_from_standard_input() -> None:
    assert settings(started("A=1\nbash <<EOF\npython3 -m verl data.a=$A\nEOF")) == ["data.a=1"]


def test_the_line_that_ends_a_script_is_known() -> None:
    assert (
        recorded("if [ $# -lt 1 ]; then\n  echo usage >&2; false || exit\nfi\npython3 -m verl").error
        == "line 2: exit 1"
    )
    assert recorded("(exit 3)\nray status").error == ""


def test_one_shell_runs_all_scripts() -> None:
    scripts = {
        "/w/env.sh": "A=${A:-1}\nLIST=(data.b=2)\nray status",
        "/w/run.sh": 'source env.sh\npython3 $0 $A "${LIST[@]}"',
    }
    environment, run = record(scripts, {"PWD": "/w", "A": "7"})
    assert [command.arguments for command in environment.commands] == [["ray", "status"]]
    assert [command.arguments for command in run.commands] == [
        ["ray", "status"],
        ["python3", "/w/run.sh", "7", "data.b=2"],
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("\npython3 data.a='x", "line 2: unexpected EOF"),
        ("if true; then\nx() {\n", "line "),
        ("A=1; unset A\necho $A", "line 2: A: unbound variable"),
        ("mapfile -t A < <(echo x)\npython3 ${A[0]}", "`<(...)` and `>(...)` do not work in the sandbox"),
    ],
)
def test_what_bash_cannot_run_is_refused_with_its_line(text: str, part: str) -> None:
    with pytest.raises(ScriptError) as caught:
        recorded(text)
    assert part in str(caught.value)
