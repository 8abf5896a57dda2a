"""`python -m jobs.prepare hh_rlhf`: prompts, SFT and reward-model files, and bad input named by file and line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.prepare.__main__ import main

START = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: How do I\n\nboil an egg?"
LONG = {"chosen": f"{START}\n\nAssistant: In water.", "rejected": f"{START}\n\nAssistant: No."}
SHORT = {
    "chosen": "\n\nHuman: 1+1?\n\nAssistant: 2",
    "rejected": "\n\nHuman: 1+1?\n\nAssistant: 3\n\nHuman: Sure?\n\nAssistant: Yes",
}
LEFT_OUT = [
    {"chosen": "\n\nHuman: A\n\nAssistant: ", "rejected": "\n\nHuman: A\n\nAssistant: B"},
    {"chosen": "\n\nHuman: A\n\nAssistant: B", "rejected": "\n\nHuman: A\n\nAssistant: B"},
    {"chosen": "\n\nHuman: A\n\nAssistant: B", "rejected": "\n\nHuman: X\n\nAssistant: B"},
    {"chosen": "\n\nHuman: A\n\nAssistant: B", "rejected": "\n\nHuman: A\n\nAssistant: C\n\nHuman: D"},
]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


PROMPTS = [[user("Hi"), assistant("Hello."), user("How do I\n\nboil an egg?")], [user("1+1?")]]
CHOSEN = [[assistant("In water.")], [assistant("2")]]
REJECTED = [[assistant("No.")], [assistant("3"), user("Sure?"), assistant("Yes")]]


def write(path: Path, pairs: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(pair)}\n" for pair in pairs).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def prepare(*inputs: Path, out: Path, options: tuple[str, ...] = ()) -> int:
    return main(["hh_rlhf", "--input", *map(str, inputs), "--out", str(out), *options])


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def test_prompts_sft_and_reward_model_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "train.jsonl.gz", [LONG, *LEFT_OUT, SHORT])
    write(tmp_path / "test.jsonl.gz", [SHORT])
    out = tmp_path / "out"
    assert prepare(tmp_path, out=out) == 0
    assert sorted(file.name for file in out.iterdir()) == [
        f"{kind}{split}.parquet" for kind in ("rm_", "sft_", "") for split in ("test", "train")
    ]
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
    assert read(out / "sft_train.parquet") == [
        {"messages": [*prompt, *chosen]} for prompt, chosen in zip(PROMPTS, CHOSEN, strict=True)
    ]
    assert read(out / "rm_train.parquet") == [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt, chosen, rejected in zip(PROMPTS, CHOSEN, REJECTED, strict=True)
    ]
    assert [row["prompt"] for row in read(out / "rm_test.parquet")] == PROMPTS[1:]
    printed = capsys.readouterr().out
    assert "rm_train.parquet: 2 dialogues (4 without two different responses to one prompt left out)" in printed
    assert "rm_test.parquet: 1 dialogues\n" in printed


def test_verls_template_is_the_dialogue_as_one_message(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [LONG])
    assert prepare(tmp_path, out=tmp_path, options=("--template", "verl")) == 0
    (row,) = read(tmp_path / "train.parquet")
    assert row["prompt"] == [user(f"{START}\n\nAssistant:")]
    (pair,) = read(tmp_path / "rm_train.parquet")
    assert pair["prompt"] == PROMPTS[0]


def test_the_folders_of_the_data_set_are_read_one_after_the_other(tmp_path: Path) -> None:
    write(tmp_path / "hh" / "helpful-base" / "train.jsonl.gz", [SHORT])
    write(tmp_path / "hh" / "harmless-base" / "train.jsonl.gz", [LONG])
    (tmp_path / "hh" / "red-team-attempts").mkdir()
    assert prepare(tmp_path / "hh", out=tmp_path / "out") == 0
    rows = read(tmp_path / "out" / "train.parquet")
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert prepare(tmp_path / "hh" / "helpful-base", out=tmp_path / "one") == 0
    assert [row["prompt"] for row in read(tmp_path / "one" / "train.parquet")] == PROMPTS[1:]


def test_turns_of_one_speaker_are_one_message(tmp_path: Path) -> None:
    text = "\n\nHuman: A\n\nHuman: B\n\nAssistant: C"
    write(tmp_path / "train.jsonl", [{"chosen": text, "rejected": f"{text}!\n\nAssistant: D"}])
    assert prepare(tmp_path, out=tmp_path) == 0
    assert read(tmp_path / "rm_train.parquet") == [
        {"prompt": [user("A\n\nB")], "chosen": [assistant("C")], "rejected": [assistant("C!\n\nD")]}
    ]


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (b"{", "line 3: not JSON"),
        (b"[" * 100_000, "line 3: not JSON"),
        (b"\xff", "line 3: not UTF-8"),
        (b"[]", "line 3: must be an object with 'chosen' and 'rejected', not a list"),
        (b'{"chosen": "\\n\\nHuman: A\\n\\nAssistant: B"}', "line 3: 'rejected' must be text, not 'None'"),
        (b'{"chosen": "Hello", "rejected": "x"}', "line 3: 'chosen' must begin with 'Human:'"),
        (b'{"chosen": "\\n\\nAssistant: B", "rejected": "x"}', "line 3: 'chosen' must begin with 'Human:'"),
        (b'{"chosen": "Human: A", "rejected": "x"}', "line 3: 'rejected' must begin with 'Human:'"),
        (b'{"chosen": "\\ud800", "rejected": "x"}', "line 3: 'chosen' cannot be written as UTF-8"),
    ],
)
def test_a_malformed_line_is_named_and_nothing_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: bytes, part: str
) -> None:
    good = json.dumps(LONG).encode()
    write(tmp_path / "train.jsonl.gz", [LONG])
    assert prepare(tmp_path, out=tmp_path / "out") == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(b"\n".join([good, b"", bad, good])))
    capsys.readouterr()
    assert prepare(tmp_path, out=tmp_path / "out") == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("python -m jobs.prepare hh_rlhf: ") and f"test.jsonl.gz, {part}" in sentence
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("pairs.jsonl", b"{}", "pairs.jsonl must be named one of train.jsonl.gz"),
        ("train.jsonl", b"\n", "train.jsonl: no dialogues with two different responses"),
        ("train.jsonl", json.dumps(LEFT_OUT[0]).encode(), "no dialogues with two different responses"),
        ("train.jsonl.gz", b"not gzip", "train.jsonl.gz cannot be read after line 0"),
        ("train.jsonl.gz", gzip.compress(json.dumps(LONG).encode() * 99)[:-9], "cannot be read after line 0"),
    ],
)
def test_bad_input_gives_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, part: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert prepare(tmp_path / name, out=tmp_path / "out") == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert part in sentence
    assert not list((tmp_path / "out").glob("*"))


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert prepare(tmp_path / "empty", out=tmp_path / "out") == 2
    assert "empty holds none of train.jsonl.gz" in capsys.readouterr().err
