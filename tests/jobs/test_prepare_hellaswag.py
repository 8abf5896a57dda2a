"""`python -m jobs.prepare hellaswag`: rows in verl's format, both templates, and bad input named by file and line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.prepare.__main__ import main
from jobs.prepare.hellaswag import tidy
from pipeline.reward.rules import rule_of

ROOF = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "ctx": "A man is sitting on a roof. he",
    "split": "val",
    "split_type": "indomain",
    "label": 3,
    "endings": ["is using wrap.", "is ripping tiles.", "holds a cube.", "starts pulling up roofing."],
    "source_id": "activitynet~v_1",
}
WIKI = ROOF | {
    "activity_label": "Home",
    "ctx_a": "[header] How to sweep [title] Take a broom. [step]  Sweep.",
    "ctx_b": "",
    "label": "0",
    "endings": ["[substeps] Start in a corner.", "Run.", "Sit.", "Sleep [title] well."],
}
QUERIES = ["Roof shingle removal: A man is sitting on a roof. He", "Home: How to sweep. Take a broom.  Sweep."]
CHOICES = [ROOF["endings"], [" Start in a corner.", "Run.", "Sit.", "Sleep. well."]]


def write(path: Path, stories: list[dict[str, Any]]) -> Path:
    text = "".join(f"{json.dumps(story)}\n" for story in stories).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def prepare(source: Path, out: Path, *options: str) -> int:
    return main(["hellaswag", "--input", str(source), "--out", str(out), *options])


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("template", ["letters", "verl"])
def test_rows_in_verls_format(tmp_path: Path, template: str) -> None:
    write(tmp_path / "hellaswag_train.jsonl.gz", [WIKI])
    write(tmp_path / "hellaswag_val.jsonl", [ROOF])
    assert prepare(tmp_path, tmp_path / "out", "--template", template) == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["train.parquet", "validation.parquet"]
    for split, place, label in (("validation", 0, 3), ("train", 1, 0)):
        (row,) = read(tmp_path / "out" / f"{split}.parquet")
        lettered = "".join(f"\n{letter}. {one.strip()}" for letter, one in zip("ABCD", CHOICES[place], strict=True))
        asked = f"{lettered}\nWhich ending fits best? Answer with its letter." if template == "letters" else ""
        content = QUERIES[place] + asked
        assert row == {
            "data_source": "Rowan/hellaswag",
            "prompt": [{"role": "user", "content": content}],
            "ability": "nlp",
            "reward_model": {
                "style": "rule" if template == "letters" else "model",
                "eval": "multiple_choice",
                "ground_truth": label,
                "choices": CHOICES[place],
            },
            "extra_info": {"split": split, "index": 0},
        }


def test_the_rule_of_the_rows_scores_the_letter(tmp_path: Path) -> None:
    assert prepare(write(tmp_path / "hellaswag_val.jsonl", [ROOF]), tmp_path) == 0
    (row,) = read(tmp_path / "validation.parquet")
    scores = [rule_of(row["data_source"])(letter, row["reward_model"]["ground_truth"]) for letter in "ABCD"]
    assert [score["score"] for score in scores] == [0, 0, 0, 1]  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (" a [title] b", "a. b"),
        ("a [step] b", "a b"),
        ("[header] a", " a"),
        ("a [open", "a [open"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_marks_are_taken_out(text: str, result: str) -> None:
    assert tidy(text) == result


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (b"{", "line 3: not JSON"),
        (b"\xff", "line 3: not UTF-8"),
        (b"7", "line 3: must be an object with 'activity_label' and 'ctx_a' and 'ctx_b', not a int"),
        ({"ctx_a": None}, "line 3: 'ctx_a' must be text, not 'None'"),
        ({"endings": None}, "line 3: 'endings' must be a list of endings, not 'None'"),
        ({"endings": ["one"]}, "line 3: 'endings' must be a list of endings"),
        ({"endings": ["a", "b", 7, "d"]}, "line 3: ending 2 must be text, not '7'"),
        ({"endings": ["a", "b", " ", "d"]}, "line 3: ending 2 must be text"),
        ({"label": None}, "line 3: 'label' must be the place of the right ending, from 0 to 3, not 'None'"),
        ({"label": ""}, "line 3: 'label' must be"),
        ({"label": 4}, "line 3: 'label' must be"),
        ({"label": -1}, "line 3: 'label' must be"),
        ({"label": True}, "line 3: 'label' must be"),
        ({"label": "A"}, "line 3: 'label' must be"),
    ],
)
def test_a_malformed_line_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: bytes | dict[str, Any], part: str
) -> None:
    bad = change if isinstance(change, bytes) else json.dumps(ROOF | change).encode()
    good = json.dumps(ROOF).encode()
    (tmp_path / "hellaswag_val.jsonl").write_bytes(b"\n".join([good, b"", bad, good]))
    assert prepare(tmp_path, tmp_path / "out") == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("python -m jobs.prepare hellaswag: ") and f"hellaswag_val.jsonl, {part}" in sentence
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("hellaswag_test.jsonl", b"{}", "must be named one of hellaswag_train.jsonl"),
        ("hellaswag_val.jsonl", b"", "hellaswag_val.jsonl holds no stories"),
        ("hellaswag_val.jsonl.gz", gzip.compress(b"{}" * 999)[:-9], "cannot be read after line 0"),
    ],
)
def test_bad_input_gives_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, part: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert prepare(tmp_path / name, tmp_path / "out") == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert part in sentence
