"""What scripts start, against bash itself where the script is harmless."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.verl.recorder import record
from jobs.verl.script import Script
from jobs.verl.words import MAX_TEXT, ScriptError

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


PIECES = r"""
x | $A | ${A} | "$B y" | ${C:-z} | ${N:-"a b"} | "${N:-q r}" | ${N:-$A/x y} | "${N:-$A $B}" | ${N:+k} |
${A:+"k $B"} | '$A "' | "it's" | " $A $B " | "\"q\"" | \$A | a\\b | ${L[@]} | "${L[@]}" | "p${L[@]}s" | p${L[*]} |
"${L[*]}" | "${E[@]}" | $M | ${M}x | "$M" | [a,"b"] | ~ | ~/x | "~" | a~ | $(echo $A "b c") | "$(echo h  i)" |
$((A+1)) | "$((A * 2))k" | {x} | "{a,b}" | a#b | s3://x/ | --x="$A" | x=$A | $'t\'n' | % | @ | + | : | - | "" |
"  "
"""
WORD = st.lists(st.sampled_from(re.split(r" \|\s", PIECES.strip())), min_size=1, max_size=3).map("".join)
KNOWN = "A=7 B=3 C=12 M=' m1  m2 ' L=(l1 \"l 2\" l3) E=()\n"
VERL = """verl() { printf '%s\\0' "$@"; }\n"""


@settings(deadline=None, max_examples=100)
@given(st.lists(WORD, max_size=5).map(" ".join))
def test_words_are_what_bash_makes_of_them(words: str) -> None:
    """Or the script is refused: the parser misreads some words, which must not go unnoticed."""
    text = f'{KNOWN}Q=({words}\n # {words}\n {words})\nQ+=("$A")\nS={words.partition(" ")[0]}\n'
    text += f'verl {words} "${{Q[@]}}" "$S" 2>&1 | cat'
    shown = subprocess.run(["bash", "-c", VERL + text], env=ENVIRONMENT, capture_output=True).stdout.decode()
    try:
        script = follow(text)
    except ScriptError:
        return
    # A default that has no end in S may take the rest in, up to the name of the command.
    commands = [command.arguments for command in script.commands if command.arguments[0] == "verl"]
    assert len(commands) == ("\0" in shown)
    for command in commands:
        known = not any(map(script.why, command))
        assert not known or [*command[1:], ""] == shown.split("\0")


@settings(deadline=None)
@given(st.text("ab01 \n\t'\"\\$`{}()[]<>|&;#=+-*/@!~.,:", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    check_read_or_refused(text)


WORDS = (
    "if then elif else fi case in esac for do done while until { } ( ) [[ ]] [ ] ! && || | ; ;; & function f f() $X \n"
)
MORE = (
    "cd eval exit return shift set -- unset read let export local A=1 A+=(x) $(x) $((1)) ${X:-y} echo -c bash . < <<E E"
)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*WORDS.split(" "), *MORE.split()]), max_size=14))
def test_any_words_are_read_or_refused(words: list[str]) -> None:
    check_read_or_refused(" ".join(words))


def check_read_or_refused(text: str) -> None:
    try:
        follow(text + "\npython3 -m verl data.a=1")
    except ScriptError as error:
        assert "line" in str(error)


UNKNOWN = {
    "$A": "A=$(nproc)",
    "$B": "read -r B",
    "$C": "((C++))",
    "$D": "A=`nproc`; export D=${A}x",
    "$E": "for E in $(seq 3); do :; done",
    "$F": "for ((F = 0; F < 2; F++)); do :; done",
    "$G": "FILES=(/data/*.parquet); G=$FILES",
    "$H": 'printf -v H "%s" 1',
    "$I": "let I=1",
    "$J": "f() { local J=1; }; f",
    "$K": "K[2]=x",
    "$L": "L=1; unset L",
    "$NOWHERE": "",
    "$1": "",
    "${HOME##*/}": "",
    "${HOME[1]}": "",
    "{a,b}": "",
    "$((-1 + 2))": "",
    "$((2 ** 3))": "",
    "$((NOWHERE + 3))": "",
}


@pytest.mark.parametrize("word", UNKNOWN)
def test_unknown_values_keep_their_source_and_a_reason_with_its_line(word: str) -> None:
    ((shown, reason),) = reasons(f"{UNKNOWN[word]}\npython3 -m verl trainer.a={word}").items()
    assert shown.startswith("trainer.a=") and "in line " in reason or "depends on line 1" in reason
    assert word != "$NOWHERE" or "give NOWHERE=VALUE" in reason


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
        "for ((i = 0; i < 3; i++)); do A=2; done",
        "select x in a b; do A=2; done",
        "until [ -f /x ]; do A=2; done",
        "nproc | while read -r line; do A=2; done",
    ],
)
def test_what_an_undecided_branch_assigns_is_unknown(branch: str) -> None:
    text = f"assign() {{ A=2; }}\nA=1\nB=3\n{branch}\npython3 -m verl data.a=$A data.b=$B"
    assert reasons(text) == {"data.a=$A": "$A depends on line 4, which only a run decides"}


def test_an_undecided_branch_keeps_what_an_array_held_before() -> None:
    text = 'A=(data.a=1)\nif [ -f /x ]; then A+=(data.b=2); fi\nA+=(data.c=3)\npython3 -m verl "${A[@]}"'
    assert started(text) == ["data.a=1", "$A", "data.c=3"]


def test_a_branch_that_may_end_the_script_is_not_the_one_that_starts_verl() -> None:
    text = "if [ ! -f /x ]; then echo no >&2; exit 1; fi\nmkdir -p y || exit 1\npython3 -m verl data.a=1"
    assert started(text) == ["data.a=1"] and follow(text).commands[-1].doubt is None
    assert [len(follow(f"exec {word}\npython3 -m verl").commands) for word in ("> log", "program x")] == [1, 1]
    assert not follow("exit 0\npython3 -m verl data.a=1").commands
    assert follow("if [ -f /x ]; then\n python3 -m verl\nfi").commands[0].doubt == 1


def test_the_folder_is_unknown_behind_a_change_to_one_that_may_not_exist() -> None:
    for change in ("cd /none", "cd $NONE/x", "pushd /none", "cd -", "if [ -d x ]; then cd /; fi"):
        (reason,) = reasons(f"{change}\npython3 -m verl data.a=$PWD").values()
        assert "line 1" in reason
    assert started("(cd /none; A=1)\npython3 -m verl data.a=$PWD data.b=$(pwd)", PWD="/w") == ["data.a=/w", "data.b=/w"]


def test_loops_that_end_early_or_run_long_are_unknown() -> None:
    long = "for a in 1 2 3 4 5 6 7 8 9; do " * 9 + "A=1; " + "done; " * 9
    for loop in (long, "for a in 1 2; do A=$a; break; done", "for a in $NONE; do A=$a; done", "for a; do A=$a; done"):
        (reason,) = reasons(f"A=0\n{loop}\npython3 -m verl data.a=$A").values()
        assert "depends on line 2, which only a run decides" in reason


def test_a_variable_that_must_be_given_is_asked_for() -> None:
    assert "give B=VALUE" in reasons("python3 -m verl data.a=${B:?no B}")["data.a=${B:?no B}"]
    assert started("python3 -m verl data.a=${B:?no B}", B="1") == ["data.a=1"]


def test_files_that_are_not_read_are_named() -> None:
    notes = follow("source ./env.sh\n. other.sh\nexport $(cat .env)\nexport PATH").notes
    assert [note.partition(":")[0] for note in notes] == ["line 1", "line 2", "line 3"]
    assert "the file of `source ./env.sh` is not read" in notes[0] and "$(cat .env)" in notes[2]


def test_variables_of_the_caller_and_of_earlier_scripts() -> None:
    script = follow("A=${A:-1}\nLIST=(data.b=2)", A="7")
    script.read('python3 -m verl data.a=$A "${LIST[@]}"')
    assert script.commands[0].arguments[3:] == ["data.a=7", "data.b=2"]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("\npython3 data.a='x", 2),
        ('python3 data.a="x', 1),
        ("python3 data.a=$(x", 1),
        ("A=(\n1\n", 2),
        ("if true; then\nx\n", 3),
        ("x\n)\n", 1),
        ("A=" + "$(" * 5000 + ")" * 5000, 1),
        ("f() { f; }\nf", 1),
        ("IFS=,\nA=($B)", 1),
        ("true\nset -- data.a=1", 2),
        ("f() {\nshift; }\nf x", 2),
        ("f() { [ -f /x ] &&\nreturn; }\nf x", 2),
        ("if [ -f /x ]; then\nf() { A=1; }\nfi", 2),
        ("case x in x) A=1 ;& y) A=2 ;; esac", 1),
        # The parser would overlook these.
        ("python3 -m verl \\  data.a=1", 1),
        ('python3 -m verl "data.a="\\$A', 1),
        ("A=$\npython3 -m verl", 2),
        ("python3 -m verl data.a=<(ls)", 1),
        ("cat <<E | python3 -m verl data.a=1\nE\n", 1),
        ("A=\nQ='${A:-$((1))}' B=${A:-$(((1 + 2) * 3))}", 2),
    ],
)
def test_what_is_not_followed_is_refused_with_its_line(script: str, line: int) -> None:
    with pytest.raises(ScriptError, match=f"line {line}: "):
        follow(script)


def test_hostile_sizes_stay_small() -> None:
    doubling = "A=aaaaaaaaaaaaaaaa\n" + "A=$A$A$A$A\n" * 40
    (reason,) = reasons(doubling + "python3 -m verl data.a=$A").values()
    assert f"is longer than {MAX_TEXT} characters" in reason
    with pytest.raises(ScriptError, match="nested too deeply"):
        follow(f"python3 -m verl data.a=$(({'9*' * 5000}9))")
    for opened, closed in (("{ ", "; }"), ("if true; then ", "; fi"), ("A=$(", ")"), ("A=${A:-", "}"), ("A=$((", "))")):
        with pytest.raises(ScriptError):
            follow(opened * 3000 + "echo" + closed * 3000)


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
