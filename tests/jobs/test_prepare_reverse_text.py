"""`python -m jobs.prepare reverse_text`: texts that occur once, with answers that the rule finds right."""

from pathlib import Path

import pytest

from jobs.prepare.__main__ import main
from pipeline.reward.rules import rule_of
from tests.jobs.prepared import contents, read

OPTIONS = ("--train", "30", "--test", "8", "--sft", "40")


def prepare(out: Path, *options: str) -> Path:
    assert main(["reverse_text", "--out", str(out), *OPTIONS, *options]) == 0
    return out


def test_answers_of_the_warm_start_are_right_and_texts_occur_once(tmp_path: Path) -> None:
    out = prepare(tmp_path, "--words", "3")
    files = {name: read(out / f"{name}.parquet") for name in ("train", "test", "sft_train", "sft_test")}
    assert {name: len(rows) for name, rows in files.items()} == {"train": 30, "test": 8, "sft_train": 40, "sft_test": 2}
    texts = []
    for split in ("train", "test"):
        for index, row in enumerate(files[split]):
            system, question = row["prompt"]
            assert system["role"] == "system" and "<reversed_text>" in system["content"]
            assert row["reward_model"]["ground_truth"] == question["content"][::-1]
            assert row["extra_info"] == {"split": split, "index": index}
            assert 1 <= len(question["content"].split()) <= 3
            texts.append(question["content"])
    for row in files["sft_train"] + files["sft_test"]:
        _, question, solution = row["messages"]
        assert rule_of("reverse_text")(solution["content"], question["content"][::-1])["acc"] == 1
        texts.append(question["content"])
    assert len(set(texts)) == len(texts)


def test_the_seed_decides(tmp_path: Path) -> None:
    same, again, other = (contents(prepare(tmp_path / name, "--seed", name[0])) for name in ("3a", "3b", "4"))
    assert same == again and same != other


def test_more_texts_than_there_are_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reverse_text", "--out", str(tmp_path), "--words", "1", "--sft", "100"]) == 2
    assert "--test, --train and --sft need 4,305 texts, but at most" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
