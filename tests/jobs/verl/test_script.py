"""What scripts pass to verl, against bash itself where the script is harmless."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.verl.script import Argument, Launch, Script
from jobs.verl.values import MAX_TEXT
from jobs.verl.words import ScriptError


def read(text: str) -> Script:
    script = Script()
    script.read(text, "run.sh")
    return script


def arguments(text: str) -> list[Argument]:
    (launch,) = read(text).launches
    return list(launch.arguments)


def reasons(text: str) -> dict[str, str]:
    """Why arguments are unknown, by what stands in the script."""
    return {argument.text: "; ".join(argument.unknown) for argument in arguments(text) if argument.unknown}


HARMLESS = {
    "quotes": """python3 -m verl data.a=1 data.b='x y' data.c="x y" data.d=x\\ y data.e='a'"b"c \\
  data.f=$'a\\tb' data.g="" """,
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
  data.f=${NONE:-"a b"} data.g=${NONE:-${OTHER:-deep}} data.h=${ONE:=six} data.j=${1:-7} \\
  data.i="${NONE:-'[\\"it is\\"]'}" """,
    "arrays": """N=4
DATA=(
  data.n=$N   # four
  data.files="['a','b']"
  "data.text=two words"
)
NONE=()
MORE=("${DATA[@]}" data.more=1)
MORE+=(data.last=2)
LAUNCH=(python3 -m verl)
"${LAUNCH[@]}" "${MORE[@]}" "${NONE[@]}" ${NONE[@]+"${NONE[@]}"} ${DATA[@]+"${DATA[@]}"} data.first=${DATA[0]}""",
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
Y=2 env Z=3 python3 -m verl data.a=$X || true""",
    "certain branches": """if true; then A=1; python3 -m verl data.a=$A; fi""",
    "function": """launch() { local A=5; python3 -m verl data.a=$A "$@"; }
launch""",
    "group": """{ A=1; B=2; }
true && C=3 && python3 -m verl data.a=$A data.b=$B data.c=$C""",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_scripts_are_read_as_bash_runs_them(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    # The command that would start verl writes down what it gets instead.
    stub = tmp_path / "python3"
    stub.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" >> {shlex.quote(str(log))}\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "${oc.env:HOME}"}
    subprocess.run(["bash", "-c", HARMLESS[name]], env=environment, check=True, capture_output=True, timeout=20)
    expected = log.read_text().split("\0")[:-1]
    found = arguments(HARMLESS[name])
    texts = [argument.text for argument in found]
    assert not any(argument.unknown for argument in found)
    assert texts[texts.index("verl") :] == expected[expected.index("verl") :]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs", "Co"), exclude_characters="\0\r"), max_size=30))
def test_any_quoted_value_arrives_unchanged(value: str) -> None:
    found = arguments(f'A={shlex.quote(value)}\npython3 -m verl data.a="$A" data.b={shlex.quote(value)}')
    assert [argument.text for argument in found[3:]] == [f"data.a={value}", f"data.b={value}"]


@settings(deadline=None)
@given(st.text("ab01 \n\t'\"\\$`{}()[]<>|&;#=+-*/@!~.,:", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    script = Script()
    try:
        script.read(text + "\npython3 -m verl data.a=1", "run.sh")
    except ScriptError as error:
        assert "run.sh, line" in str(error)


def test_unknown_values_keep_source_and_reason() -> None:
    found = reasons(
        """A=$(nproc)
for lr in 1e-6 2e-6; do
  read -r B
  ((C++))
  export D=${A}x
  python3 -m verl trainer.a=$A trainer.b=$B trainer.c=$C trainer.d=$D trainer.lr=$lr trainer.e=$NOWHERE trainer.f=$1 \\
    trainer.g=${A##*/} trainer.h=`date` trainer.i=$((A * 2)) trainer.j="x-${lr}-y" trainer.k=$((2 ** 3)) trainer.l=${#A}
done"""
    )
    assert found == {
        "trainer.a=$(nproc)": "`$(nproc)` in line 1 is a command",
        "trainer.b=$B": "`$B` is read in line 3",
        "trainer.c=$C": "`$C` is computed in line 4",
        "trainer.d=$(nproc)x": "`$(nproc)` in line 1 is a command",
        "trainer.lr=$lr": "`$lr` is set by the loop in line 2",
        "trainer.e=$NOWHERE": "`$NOWHERE` in line 6 is not assigned in run.sh",
        "trainer.f=$1": "`$1` in line 6 is an argument of the script",
        "trainer.g=${A##*/}": "`${A##*/}` in line 7 is an expansion that is not worked out",
        "trainer.h=`date`": "`date` in line 7 is a command",
        "trainer.i=$((A * 2))": "`$((A * 2))` in line 7 cannot be computed: `$(nproc)` in line 1 is a command",
        "trainer.j=x-$lr-y": "`$lr` is set by the loop in line 2",
        "trainer.k=$((2 ** 3))": "`$((2 ** 3))` in line 7 is arithmetic that is not worked out",
        "trainer.l=${#A}": "`${#A}` in line 7 is an expansion that is not worked out",
    }


def launch(text: str) -> Launch:
    (found,) = read(text).launches
    return found


def test_a_value_under_a_condition_is_unknown_or_noted() -> None:
    script = """A=1
if [ -n "$X" ]; then A=2; B=2; else B=3; fi
[[ -n $X && ( $Y || $Z ) ]] && C=4
case "$X" in
  a|b) D=5 ;;
  *) D=6; echo "it's" ;;
esac
while read -r line; do E=7; done
(F=8)
python3 -m verl data.a=$A data.b=$B data.c=$C data.d=$D data.e=$E data.f=$F"""
    found = launch(script)
    assert {a.text: a.unknown for a in found.arguments[3:]} == {
        "data.a=1": (),
        "data.b=$B": ("`$B` is assigned under a condition (line 2)",),
        "data.c=$C": ("`$C` is assigned under a condition (line 3)",),
        "data.d=$D": ("`$D` is assigned under a condition (lines 5 and 6)",),
        "data.e=$E": ("`$E` is assigned under a condition (line 8)",),
        "data.f=$F": ("`$F` is assigned under a condition (line 9)",),
    }
    (note,) = found.notes
    assert note.startswith("`$A` is what line 1 of run.sh gives it; line 2 may give it another value")
    # What nothing passes on to verl is nobody's concern.
    assert launch("A=1\nif x; then A=2; fi\necho $A\npython3 -m verl data.b=1").notes == ()


def test_a_caution_follows_the_value_through_other_variables() -> None:
    (note,) = launch('A=1\nif x; then A=2; fi\nB=$((A * 2))\nC=(data.c=$B)\npython3 -m verl "${C[@]}"').notes
    assert "`$A` is what line 1" in note


def test_scripts_share_their_variables() -> None:
    script = Script()
    script.read("A=1\nLIST=(data.b=2)", "env.sh")
    script.read('python3 -m verl data.a=$A "${LIST[@]}"', "run.sh")
    assert [argument.text for argument in script.launches[0].arguments[3:]] == ["data.a=1", "data.b=2"]


def test_settings_behind_a_comment_are_no_part_of_the_command() -> None:
    script = read("python3 -m verl data.a=1 \\\n  # data.b=2 \\\n  data.c=3 \\\n  data.d=4\n")
    assert [argument.text for argument in script.launches[0].arguments[3:]] == ["data.a=1"]
    assert "line 3 of run.sh is a setting outside any command" in script.notes[0]


def test_arguments_of_the_script_are_none() -> None:
    assert [argument.text for argument in arguments('python3 -m verl data.a=1 "$@" $* "${@:2}"')][3:] == ["data.a=1"]


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("\npython3 data.a='x", "line 2: the single quote that opens here is never closed"),
        ('python3 data.a="x', "line 1: the double quote that opens here is never closed"),
        ("python3 data.a=$(x", "line 1: the bracket that opens here is never closed"),
        ("python3 data.a=`x", "line 1: the backquote that opens here is never closed"),
        ("A=(\n1\n", "line 1: the bracket that opens here is never closed"),
        ("A=" + "$(" * 5000 + ")" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_bash_is_refused_with_its_line(script: str, part: str) -> None:
    with pytest.raises(ScriptError, match="run.sh") as caught:
        read(script)
    assert part in str(caught.value)


def test_variables_that_double_each_other_stay_small() -> None:
    doubling = "A=aaaaaaaaaaaaaaaa\n" + "A=$A$A$A$A\n" * 40
    (reason,) = reasons(doubling + "python3 -m verl data.a=$A").values()
    assert f"is longer than {MAX_TEXT} characters" in reason
    assert "arithmetic that is not worked out" in str(reasons(f"python3 -m verl data.a=$(({'9*' * 5000}9))"))


def test_carriage_returns_are_no_part_of_values() -> None:
    assert [a.text for a in arguments("A=1\r\npython3 -m verl \\\r\n  data.a=$A\r\n")[3:]] == ["data.a=1"]


def test_marks_in_a_script_are_no_marks() -> None:
    (argument,) = arguments("python3 -m verl data.a=\ue0000\ue001")[3:]
    assert argument.text == "data.a=0" and not argument.unknown
