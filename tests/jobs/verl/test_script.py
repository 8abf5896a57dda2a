"""What scripts start, against bash itself where the script is harmless."""

import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.verl.expand import MAX_TEXT
from jobs.verl.recorder import record
from jobs.verl.script import Script
from jobs.verl.tokens import ScriptError

ENVIRONMENT = {"HOME": "/home/me"}


def follow(text: str, **variables: str) -> Script:
    script = Script({**ENVIRONMENT, **variables})
    script.read(text)
    return script


def started(text: str, **variables: str) -> list[str]:
    return verl(follow(text, **variables))


def verl(script: Script) -> list[str]:
    """The arguments of verl's module, with the source of what is unknown."""
    (command,) = [command for command in script.commands if "verl" in command.arguments]
    texts = [script.shown(argument) for argument in command.arguments]
    return texts[texts.index("verl") + 1 :]


def reasons(text: str) -> dict[str, str]:
    """Why arguments are unknown, by what stands in the script."""
    script = follow(text)
    arguments = [argument for command in script.commands for argument in command.arguments]
    return {script.shown(argument): "; ".join(script.why(argument)) for argument in arguments if script.why(argument)}


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
    "splitting": """MORE="data.x=1   data.y=2 "
python3 -m verl data.a=1 $MORE data.b=3 pre$MORE"post" """,
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
  data.a=${DATA[0]} data.b=${#MORE[@]} \\
  ${DATA[@]} "data.c=${DATA[*]}" "data.${NONE[*]}" "<${DATA[@]}>" """,
    "arithmetic": """A=$((1024 * 4)); B=$(( (A + 7) / 3 - 2 )); C=$((-7 / 2)) D=$((-7 % 3)) E=$((A*$B+${C}))
python3 -m verl data.a=$A data.b=$B data.c=$C data.d=$D data.e=$E data.g=$(((1+2)*3))""",
    "lists": """python3 -m verl trainer.logger=['console','wandb'] trainer.x='["a","b"]' trainer.y="[a,b]" """,
    "redirections": """python3 -m verl data.a=1 2>&1 data.b=2 > /dev/null data.c=3 | tee /dev/null""",
    "appended text": """A=x; A+=y; B="$A"; B+=" z"
python3 -m verl data.a=$A "data.b=$B" """,
    "home": """A=~/models; B=$HOME/data
python3 -m verl data.a=$A data.b="$B" data.c=~/not data.d='~/not'""",
    "here-document": """cat > /dev/null <<EOF
python3 -m verl data.no=$(((
EOF
cat <<-'END' > /dev/null
\tdata.no="
\tEND
python3 -m verl data.a=1""",
    "prefixes": """set -euo pipefail; export X=1
Y=2 nohup python3 -m verl data.a=$X data.b=${Y:-none} || true""",
    "branches": """A=5; NAME=two_gpus
if [ "$A" -gt 4 ] && [[ $NAME == two* && -n $A ]]; then B=1; elif true; then B=2; else B=3; fi
case "$NAME" in one|three) C=1 ;; two*) C=2; echo "it's" ;; *) C=3 ;; esac
if ! false; then D=1; fi
[ -z "${NONE:-}" ] && E=yes || E=no
while false; do A=9; done
python3 -m verl data.a=$A data.b=$B data.c=$C data.d=$D data.e=$E""",
    "device": """DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case "${DEVICE}" in
  gpu) N=${NDEVICES:-8} ;;
  npu) N=16; EXTRA=(data.npu=1) ;;
  *) echo "no such device: ${DEVICE}" >&2; exit 1 ;;
esac
python3 -m verl data.n=$N "${EXTRA[@]}" """,
    "loops": """for a in 1 2; do for b in x y; do LIST+=(data.$a$b=$((a * 2))); done; done
python3 -m verl "${LIST[@]}" """,
    "functions": """launch() { local A=5; if [ $# -eq 0 ]; then return; fi; python3 -m verl data.a=$A data.n=$# "$@"; }
function name { echo "run_$1"; }
launch
launch data.b=2 "data.c=$(name x) y" """,
    "options of the script": """LR=1e-6
while getopts "l:n:" option; do case $option in l) LR=$OPTARG ;; *) exit 1 ;; esac; done
while [[ $# -gt 0 ]]; do case "$1" in --lr) LR=$2; shift 2 ;; *) shift ;; esac; done
python3 -m verl data.lr=$LR""",
    "local variables": """A=1; C=2
inner() { B=5; A+=x; }
outer() { local A=3 B; B=4; inner; declare C; C=$A$B; echo "$C"; }
D=$(outer); outer; python3 -m verl data.a=$A "data.b=${B:-none}" data.c=$C data.d=$D""",
    "groups": """{ (A=0); A=1; B=2; }
true && C=3 && (A=7; exit 0) && python3 -m verl data.a=$A data.b=$B data.c=$C""",
    "given as text": """CMD="python3 -m verl data.a=1"; CMD="$CMD data.b='two words'"
if [ -n "$CMD" ]; then eval "$CMD"; fi""",
    "folders": """HERE="$(cd -- "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null && pwd)"
python3 -m verl data.a="$HERE/y" data.b=$(basename "$0" .sh) data.c="$PWD" data.d=$(dirname /a/b/)""",
    "set": """set -- data.a=1 "data.b=x y"; shift
python3 -m verl "$@" data.c=$# """,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_scripts_are_read_as_bash_runs_them(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(HARMLESS[name])
    (expected,) = [entry.arguments for entry in record(path, ENVIRONMENT) if "verl" in entry.arguments]
    script = Script({**ENVIRONMENT, "PWD": os.getcwd()})
    script.read(HARMLESS[name], str(path))
    assert verl(script) == expected[expected.index("verl") + 1 :]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs", "Co"), exclude_characters="\0\r"), max_size=30))
def test_any_quoted_value_arrives_unchanged(value: str) -> None:
    found = started(f'A={shlex.quote(value)}\npython3 -m verl data.a="$A" data.b={shlex.quote(value)}')
    assert found == [f"data.a={value}", f"data.b={value}"]


@settings(deadline=None)
@given(st.text("ab01 \n\t'\"\\$`{}()[]<>|&;#=+-*/@!~.,:", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    check_read_or_refused(text)


WORDS = "if then elif else fi case in esac for do done while until { } ( ) [[ ]] [ ] ! && || | ; ;; & function f f() $X"
MORE = (
    "dirname basename cd eval exit return shift set -- unset read let export A=1 A+=(x) $(x) $((1)) ${X:-y} -c bash . <"
)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*WORDS.split(), *MORE.split(), "\n"]), max_size=14))
def test_any_words_are_read_or_refused(words: list[str]) -> None:
    check_read_or_refused(" ".join(words))


def check_read_or_refused(text: str) -> None:
    try:
        follow(text + "\npython3 -m verl data.a=1")
    except ScriptError as error:
        assert "line" in str(error)


def test_unknown_values_keep_source_and_reason() -> None:
    found = reasons(
        """A=$(nproc)
for lr in $(seq 3); do :; done
read -r B
((C++))
export D=${A}x
python3 -m verl trainer.a=$A trainer.b=$B trainer.c=$C trainer.d=$D trainer.lr=$lr trainer.e=$NOWHERE trainer.f=$1 \\
    trainer.g=${A##*/} trainer.h=`date` trainer.i=$((A * 2)) trainer.k=$((2 ** 3)) trainer.l={a,b}
FILES=(/data/*.parquet); printf -v P "%s" 1; let Q=1; ((R = 2))
python3 -m verl "trainer.m=$FILES" trainer.n=$P trainer.o=$Q trainer.p=$R
"""
    )
    assert {key.partition("=")[0].removeprefix("trainer."): reason for key, reason in found.items()} == {
        "a": "$(nproc) in line 1 is a command",
        "b": "$B is set by the shell in line 3",
        "c": "$C is set by the shell in line 4",
        "d": "$(nproc) in line 1 is a command",
        "lr": "$(seq 3) in line 2 is a command",
        "e": "$NOWHERE in line 6 is not assigned before; give NOWHERE=VALUE",
        "f": "$1 in line 6 is an argument of the script",
        "g": "${A##*/} in line 7 is an expansion that is not worked out",
        "h": "`date` in line 7 is a command",
        "i": "$((A * 2)) in line 7 cannot be computed, because $(nproc) in line 1 is a command",
        "k": "$((2 ** 3)) in line 7 is arithmetic that is not worked out",
        "l": "{a,b} in line 7 is a brace expansion",
        "m": "/data/*.parquet in line 8 stands for files",
        "n": "$P is set by the shell in line 8",
        "o": "$Q is set by the shell in line 8",
        "p": "$R is set by the shell in line 8",
    }


@pytest.mark.parametrize(
    "branch",
    [
        "if [ -f /x ]; then A=2; fi",
        "if [ -f /x ]; then :; else A=2; fi",
        "if [ -f /x ]; then :; elif true; then A=2; fi",
        "[[ -d $HOME/x ]] && A=2",
        "nvidia-smi || A=2",
        "case $(uname) in Linux) A=2 ;; esac",
        "case $(uname) in Linux) : ;; *) A=2 ;; esac",
        "while read -r line; do A=2; done",
        "for i in $(seq 3); do A=2; done",
        "if [ -f /x ]; then assign; fi",
        "[ -f /x ] && unset A",
    ],
)
def test_what_an_undecided_branch_assigns_is_unknown(branch: str) -> None:
    text = f"assign() {{ A=2; }}\nA=1\nB=3\n{branch}\npython3 -m verl data.a=$A data.b=$B"
    assert reasons(text) == {"data.a=$A": "$A depends on a branch in line 4 that only a run decides"}


def test_an_undecided_branch_keeps_what_an_array_held_before() -> None:
    text = 'A=(data.a=1)\nif [ -f /x ]; then A+=(data.b=2); fi\nA+=(data.c=3)\npython3 -m verl "${A[@]}"'
    assert started(text) == ["data.a=1", "$A", "data.c=3"]


def test_a_branch_that_may_end_the_script_is_not_the_one_that_starts_verl() -> None:
    text = "if [ ! -f /x ]; then echo no >&2; exit 1; fi\nmkdir -p y || exit 1\npython3 -m verl data.a=1"
    assert started(text) == ["data.a=1"] and follow(text).commands[-1].doubt is None
    assert [len(follow(f"exec {word}\npython3 -m verl").commands) for word in ("> log", "program x")] == [2, 1]
    assert not follow("exit 0\npython3 -m verl data.a=1").commands
    assert follow("if [ -f /x ]; then\n python3 -m verl\nfi").commands[0].doubt == 1


def test_files_that_are_not_read_are_named() -> None:
    notes = follow("source ./env.sh\n. other.sh\nexport $(cat .env)\nexport PATH").notes
    assert [note.partition(":")[0] for note in notes] == ["line 1", "line 2", "line 3"]
    assert "the file of `source ./env.sh` is not read" in notes[0] and "$(cat .env)" in notes[2]


def test_variables_of_the_caller_and_of_earlier_scripts() -> None:
    script = follow("A=${A:-1}\nLIST=(data.b=2)", A="7")
    script.read('python3 -m verl data.a=$A "${LIST[@]}"')
    assert script.commands[0].arguments[3:] == ["data.a=7", "data.b=2"]


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("\npython3 data.a='x", "line 2: the ' of"),
        ('python3 data.a="x', 'line 1: the " of'),
        ("python3 data.a=$(x", "line 1: the ) of"),
        ("A=(\n1\n", "line 1: the ) of"),
        ("if true; then\nx\n", "line 1: no `fi` ends"),
        ("x\n)\n", "line 2: nothing is open"),
        ("for i in 1; do break; done", "line 1: a `break` is not followed"),
        ("A=" + "$(" * 5000 + ")" * 5000, "nested too deeply"),
        ("f() { f; }\nf", "nested too deeply"),
        ("IFS=,\nA=($B)", "line 1: words that are split"),
        ("select x in a b; do A=$x; done", "line 1: 'select' is not followed"),
        ("[ -f /x ] && set -- data.a=1", "it depends on line 1 whether the arguments change"),
        ("if [ -f /x ]; then\nf() { A=1; }\nfi", "it depends on line 1 whether f is defined"),
    ],
)
def test_what_is_not_followed_is_refused_with_its_line(script: str, part: str) -> None:
    with pytest.raises(ScriptError) as caught:
        follow(script)
    assert part in str(caught.value)


def test_hostile_sizes_stay_small() -> None:
    doubling = "A=aaaaaaaaaaaaaaaa\n" + "A=$A$A$A$A\n" * 40
    (reason,) = reasons(doubling + "python3 -m verl data.a=$A").values()
    assert f"is longer than {MAX_TEXT} characters" in reason
    assert "arithmetic that is not worked out" in str(reasons(f"python3 -m verl data.a=$(({'9*' * 5000}9))"))
    ten = "for i in 1 2 3 4 5 6 7 8 9 0; do "
    with pytest.raises(ScriptError, match="more than 20000 commands"):
        follow(f"{ten * 6} true; {'done;' * 6}")


def test_odd_letters() -> None:
    assert started("A=1\r\npython3 -m verl \\\r\n  data.a=$A\r\n") == ["data.a=1"]
    assert reasons("python3 -m verl data.a=\ue0000\ue001") == {}


def test_a_script_that_is_run_starts_nothing_else(tmp_path: Path) -> None:
    """`--run`: programs are recorded, not found ones count as successes, and a deadline ends what does not end."""
    mark = tmp_path / "mark"
    path = tmp_path / "run.sh"
    path.write_text(
        f"set -e\nrm -rf {tmp_path}\ntouch {mark}\nray start --head\nuv sync\nwget x | tee {mark}\n"
        'uv run python3 -m verl data.a="$PWD/x" data.b=$(date +%Y | cut -c1)\nexec torchrun -m other\n'
    )
    commands = [command.arguments for command in record(path, ENVIRONMENT)]
    assert [arguments[0] for arguments in commands] == ["rm", "touch", "ray", "uv", "wget", "uv", "torchrun"]
    assert commands[5] == ["uv", "run", "python3", "-m", "verl", f"data.a={Path.cwd()}/x", "data.b=2"]
    assert path.exists() and not mark.exists()
    path.write_text("while true; do :; done")
    with pytest.raises(ScriptError, match="did not end within 0.5 s"):
        record(path, ENVIRONMENT, deadline=0.5)
    path.write_text("A=(\n")
    with pytest.raises(ScriptError, match="failed before it started anything"):
        record(path, ENVIRONMENT)
