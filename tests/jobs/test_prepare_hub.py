"""Data sets of the hub: which files are read, in which formats, their rows, and bad input named by its place."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.reward.rules import rule_of
from tests.jobs.prepared import Rows, contents, prepare, read, write

GSM8K: Rows = [
    {"question": "Ada has 3 boxes of 400 nails. How many?", "answer": "3 * 400 = <<3*400=1200>>1,200\n#### 1,200"},
    {"question": "It is 5 \u00b0C and falls by 12. What is it?", "answer": "5 - 12 = <<5-12=-7>>-7 degrees\n#### -7"},
    {"question": "Half of 9?", "answer": "9 / 2 = <<9/2=4.5>>4.5\n#### 4.5"},
]
MATH: Rows = [
    {"problem": "What is $1+1$?", "solution": "$\\boxed{3}$, no, $\\boxed{2}$.", "level": "Level 1", "type": "Algebra"},
    {"problem": "Half of one?", "solution": "So $\\boxed{\\frac{1}{2}}$.", "level": "Level 2", "type": "Algebra"},
    {"problem": "Which one?", "solution": "$\\fbox{\\text{(B)}}$", "level": "Level ?", "type": "Geometry"},
]
STORY = {
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "label": "3",
    "endings": ["is using wrap.", "is ripping tiles.", "holds a cube.", "starts pulling up roofing."],
}
DIALOGUES = {"chosen": "\n\nHuman: 1+1?\n\nAssistant: 2", "rejected": "\n\nHuman: 1+1?\n\nAssistant: 3"}
# verl's words, so that its files and ours ask the same.
INSTRUCTIONS = {
    "gsm8k": 'Let\'s think step by step and output the final answer after "####".',
    "math": "Let's think step by step and output the final answer within \\boxed{}.",
}
EXAMPLES: dict[str, Rows] = {"gsm8k": GSM8K, "math": MATH, "hellaswag": [STORY], "hh_rlhf": [DIALOGUES]}
GOOD = json.dumps(GSM8K[0]).encode()


def verl_rows(data_set: str, split: str) -> Rows:
    """The rows of `GSM8K` or `MATH` in verl's format."""
    key, source, truths = {
        "gsm8k": ("question", "openai/gsm8k", ["1200", "-7", "4.5"]),
        "math": ("problem", "DigitalLearningGmbH/MATH-lighteval", ["2", "\\frac{1}{2}", "\\text{(B)}"]),
    }[data_set]
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{row[key]} {INSTRUCTIONS[data_set]}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index, **row},
        }
        for index, (row, truth) in enumerate(zip(EXAMPLES[data_set], truths, strict=True))
    ]


@pytest.mark.parametrize("data_set", ["gsm8k", "math"])
@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl.gz"),
        ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"),
        ("data/train.parquet", "data/README.parquet/test.parquet"),
    ],
)
def test_rows_in_verls_format_from_any_file(tmp_path: Path, data_set: str, names: tuple[str, str]) -> None:
    for name in names:
        write(tmp_path / "in" / name, EXAMPLES[data_set])
    (tmp_path / "in" / "README").write_text("not data")
    assert prepare(data_set, tmp_path / "in", out=tmp_path / "out") == 0
    assert sorted(contents(tmp_path / "out")) == ["test.parquet", "train.parquet"]
    for split in ("train", "test"):
        rows = read(tmp_path / "out" / f"{split}.parquet")
        assert rows == verl_rows(data_set, split)
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
            rule, truth = rule_of(row["data_source"]), row["reward_model"]["ground_truth"]
            solution = "answer" if data_set == "gsm8k" else "solution"
            assert rule(row["extra_info"][solution], truth)["score"] == 1.0  # type: ignore[index]
            assert rule(other["extra_info"][solution], truth)["score"] == 0.0  # type: ignore[index]


def test_math_as_a_file_for_each_problem(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name, row in zip(("algebra/2.json", "algebra/10.json", "geometry/1.json"), MATH, strict=True):
            file = tmp_path / "MATH" / split / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(row, indent=2))
    assert prepare("math", tmp_path / "MATH", out=tmp_path / "out") == 0
    assert read(tmp_path / "out" / "train.parquet") == verl_rows("math", "train")
    options = ("--data-source", "HuggingFaceH4/MATH-500")
    assert prepare("math", tmp_path / "MATH" / "test", out=tmp_path / "one", options=options) == 0
    assert list(contents(tmp_path / "one")) == ["test.parquet"]
    assert {row["data_source"] for row in read(tmp_path / "one" / "test.parquet")} == {"HuggingFaceH4/MATH-500"}


def test_level_and_subject_as_in_math_500(tmp_path: Path) -> None:
    row = {"problem": "P", "solution": "\\boxed{1}", "answer": "1", "subject": "Algebra", "level": 5}
    assert prepare("math", write(tmp_path / "test.jsonl", [row]), out=tmp_path) == 0
    (made,) = read(tmp_path / "test.parquet")
    assert (made["extra_info"]["level"], made["extra_info"]["type"]) == ("Level 5", "Algebra")


@pytest.mark.parametrize("template", ["letters", "verl"])
def test_hellaswag(tmp_path: Path, template: str) -> None:
    tags = {"ctx_a": "[header] How to sweep [title] Take a broom. [step]  Sweep.", "ctx_b": "", "label": 0}
    wiki = STORY | {"activity_label": "Home", "endings": ["[substeps] Start in a corner.", "Run."]} | tags
    write(tmp_path / "hellaswag_train.jsonl.gz", [wiki])
    write(tmp_path / "hellaswag_val.jsonl", [STORY])
    assert prepare("hellaswag", tmp_path, out=tmp_path / "out", options=("--template", template)) == 0
    queries = ["Roof shingle removal: A man is sitting on a roof. He", "Home: How to sweep. Take a broom.  Sweep."]
    asked = [
        "\nA. is using wrap.\nB. is ripping tiles.\nC. holds a cube.\nD. starts pulling up roofing.",
        "\nA. Start in a corner.\nB. Run.",
    ]
    for place, (split, label) in enumerate((("validation", 3), ("train", 0))):
        (row,) = read(tmp_path / "out" / f"{split}.parquet")
        question = f"{asked[place]}\nWhich ending fits best? Answer with its letter."
        assert row == {
            "data_source": "Rowan/hellaswag",
            "prompt": [{"role": "user", "content": queries[place] + (question if template == "letters" else "")}],
            "ability": "nlp",
            "reward_model": {
                "style": "rule" if template == "letters" else "model",
                "eval": "multiple_choice",
                "ground_truth": label,
                "choices": [" Start in a corner.", "Run."] if split == "train" else STORY["endings"],
            },
            "extra_info": {"split": split, "index": 0},
        }
        scores = [rule_of(row["data_source"])(letter, label)["score"] for letter in "ABCD"]  # type: ignore[index]
        assert scores == [int(place == label) for place in range(4)]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


START = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: How do I\n\nboil an egg?"
LONG = {"chosen": f"{START}\n\nAssistant: In water.", "rejected": f"{START}\n\nAssistant: No."}
SHORT = {
    "chosen": "\n\nHuman: 1+1?\n\nHuman: Now!\n\nAssistant: 2",
    "rejected": "\n\nHuman: 1+1?\n\nHuman: Now!\n\nAssistant: 3\n\nHuman: Sure?\n\nAssistant: Yes",
}
LEFT_OUT: Rows = [
    {"chosen": "\n\nHuman: A\n\nAssistant: ", "rejected": "\n\nHuman: A\n\nAssistant: B"},
    {"chosen": "\n\nHuman: A\n\nAssistant: B", "rejected": "\n\nHuman: A\n\nAssistant: B"},
    {"chosen": "\n\nHuman: A\n\nAssistant: B", "rejected": "\n\nHuman: X\n\nAssistant: B"},
    {"chosen": "\n\nHuman: A\n\nAssistant: B", "rejected": "\n\nHuman: A\n\nAssistant: C\n\nHuman: D"},
]
PROMPTS = [[user("Hi"), assistant("Hello."), user("How do I\n\nboil an egg?")], [user("1+1?\n\nNow!")]]
CHOSEN = [[assistant("In water.")], [assistant("2")]]
REJECTED = [[assistant("No.")], [assistant("3"), user("Sure?"), assistant("Yes")]]


def test_hh_rlhf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in" / "helpful-base" / "train.jsonl.gz", [LONG, *LEFT_OUT])
    write(tmp_path / "in" / "helpful-online" / "train.jsonl.gz", [SHORT])
    write(tmp_path / "in" / "red-team-attempts" / "red_team_attempts.jsonl", [{"transcript": "x"}])
    out = tmp_path / "out"
    assert prepare("hh_rlhf", tmp_path / "in", out=out) == 0
    assert read(out / "train.parquet") == [
        {
            "data_source": "Dahoas/full-hh-rlhf",  # verl's name
            "prompt": prompt,
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": chosen[-1]["content"]},
            "extra_info": {"split": "train", "index": index},
        }
        for index, (prompt, chosen) in enumerate(zip(PROMPTS, CHOSEN, strict=True))
    ]
    triples = list(zip(PROMPTS, CHOSEN, REJECTED, strict=True))
    assert read(out / "sft_train.parquet") == [{"messages": [*prompt, *chosen]} for prompt, chosen, _ in triples]
    names = ("prompt", "chosen", "rejected")
    assert read(out / "rm_train.parquet") == [dict(zip(names, triple, strict=True)) for triple in triples]
    assert "rm_train.parquet: 2 dialogues (4 left out)" in capsys.readouterr().out
    options = ("--template", "verl")
    assert prepare("hh_rlhf", tmp_path / "in" / "helpful-base", out=out, options=options) == 0
    assert [row["prompt"] for row in read(out / "train.parquet")] == [[user(f"{START}\n\nAssistant:")]]
    assert read(out / "rm_train.parquet")[0]["prompt"] == PROMPTS[0]


def test_output_in_the_folder_of_the_input_is_not_read_again(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", GSM8K)
    for _ in range(2):
        assert prepare("gsm8k", tmp_path, out=tmp_path) == 0
    assert len(read(tmp_path / "train.parquet")) == 3


BAD_LABEL = "'label' must be the index of the right ending, from 0 to 3"
BAD_ROWS: list[tuple[str, Any, str]] = [
    ("gsm8k", b"{", "line 3: not JSON"),
    ("gsm8k", b"[" * 100_000, "line 3: not JSON"),
    ("gsm8k", b"\xff", "line 3: not UTF-8"),
    ("gsm8k", [], "line 3: must be an object with 'question' and 'answer', not a list"),
    ("gsm8k", {"answer": None}, "line 3: 'answer' must be text, not 'None'"),
    ("gsm8k", {"question": " "}, "line 3: 'question' must be text"),
    ("gsm8k", {"question": "\ud800"}, "line 3: not UTF-8 text"),
    ("gsm8k", {"answer": "It is 1."}, "line 3: 'answer' has no number after ####"),
    ("gsm8k", {"answer": "#### 1.2.3"}, "line 3: 'answer' has no number after ####"),
    ("math", {"solution": "It is 1."}, "line 3: 'solution' has no \\boxed{...} with an answer"),
    ("math", {"solution": "\\boxed{}"}, "line 3: 'solution' has no \\boxed{...} with an answer"),
    ("hellaswag", {"ctx_a": None}, "line 3: 'ctx_a' must be text, not 'None'"),
    ("hellaswag", {"endings": None}, "line 3: 'endings' must be a list of endings, not 'None'"),
    ("hellaswag", {"endings": ["one"]}, "line 3: 'endings' must be a list of endings"),
    ("hellaswag", {"endings": ["a", "b", 7, "d"]}, "line 3: ending 2 must be text, not '7'"),
    ("hellaswag", {"endings": ["a", "b", " ", "d"]}, "line 3: ending 2 must be text"),
    *(("hellaswag", {"label": label}, f"line 3: {BAD_LABEL}") for label in (None, "", 4, -1, True, "A")),
    ("hh_rlhf", {"chosen": "Hello"}, "line 3: 'chosen' must begin with 'Human:'"),
    ("hh_rlhf", {"chosen": "\n\nAssistant: B"}, "line 3: 'chosen' must begin with 'Human:'"),
    ("hh_rlhf", {"chosen": "Human: A", "rejected": "x"}, "line 3: 'rejected' must begin with 'Human:'"),
]


@pytest.mark.parametrize(("data_set", "change", "part"), BAD_ROWS)
def test_a_malformed_row_is_named_and_nothing_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data_set: str, change: Any, part: str
) -> None:
    row = EXAMPLES[data_set][0]
    good = json.dumps(row).encode()
    bad = change if isinstance(change, bytes) else json.dumps(row | change if change else change).encode()
    write(tmp_path / "in" / "train.jsonl", [row])
    assert prepare(data_set, tmp_path / "in", out=tmp_path / "out") == 0
    before = contents(tmp_path / "out")
    (tmp_path / "in" / "train.jsonl").write_bytes(b"\n".join([good, b"", bad, good]))
    capsys.readouterr()
    assert prepare(data_set, tmp_path / "in", out=tmp_path / "out") == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith(f"python -m jobs.prepare {data_set}: ") and f"train.jsonl, {part}" in sentence
    assert contents(tmp_path / "out") == before


def cut(path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(GSM8K), path)
        path.write_bytes(path.read_bytes()[:-50])
    else:
        path.write_bytes(gzip.compress(GOOD * 1000)[:-20])


@pytest.mark.parametrize(
    ("make", "name", "part"),
    [
        (lambda path: None, "train.jsonl", "train.jsonl does not exist; get it with: hf download openai/gsm8k"),
        (lambda path: path.mkdir(), "folder", "folder has no .jsonl, .jsonl.gz, .parquet, .json file with train or"),
        (lambda path: path.write_bytes(GOOD), "train.csv", "train.csv has no"),
        (lambda path: path.write_bytes(b"\n"), "train.jsonl", "train.jsonl: no problems"),
        (lambda path: path.write_bytes(GOOD), "train.jsonl.gz", "train.jsonl.gz cannot be read after line 0"),
        (cut, "train.jsonl.gz", "train.jsonl.gz cannot be read after line"),
        (cut, "train.parquet", "train.parquet cannot be read after row 0"),
        (lambda path: write(path, [*GSM8K, {"question": "Q"}]), "train.parquet", "row 4: 'answer' must be text"),
        (lambda path: path.write_bytes(b"{"), "train.json", "train.json: not JSON"),
    ],
)
def test_bad_input_gives_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, name: str, part: str
) -> None:
    make(tmp_path / name)
    assert prepare("gsm8k", tmp_path / name, out=tmp_path / "out") == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert part in sentence
    assert not contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("data_set", "second", "refused"),
    [
        ("gsm8k", "main/train.jsonl.gz", True),
        ("gsm8k", "socratic/train.jsonl", True),
        ("gsm8k", "main/train-1.jsonl", False),
        ("math", "socratic/train.jsonl", False),
        ("math", "main/train.jsonl.gz", True),
    ],
)
def test_two_sources_for_one_split_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data_set: str, second: str, refused: bool
) -> None:
    for name in ("main/train.jsonl", second):
        write(tmp_path / "in" / name, EXAMPLES[data_set])
    assert prepare(data_set, tmp_path / "in", out=tmp_path / "out") == (2 if refused else 0)
    assert ("two sources for train: " in capsys.readouterr().err) == refused
    if not refused:
        assert [row["extra_info"]["index"] for row in read(tmp_path / "out" / "train.parquet")] == list(range(6))


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "train.jsonl", GSM8K)
    (tmp_path / "file").write_text("")
    assert prepare("gsm8k", source, out=tmp_path / "file") == 1
    assert "cannot write to" in capsys.readouterr().err
