"""The command line that shows one recorded row."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.show import main
from pipeline.config import Config, save_yaml
from pipeline.models.tokenizer import load_tokenizer
from tests.track.conversations import PLAYED, PROMPT, episode, programmed, single, write

ROOT = Path(__file__).resolve().parents[2]
EPISODE = """\
── system · prompt
Be brief.

── user · prompt
Guess.

── user · prompt
A number from 1 to 63.

── assistant · answer 1 of 3 · 4 tokens · version 4 · mean log-prob -0.500
reasoning: Halve it.
Let me see.
→ calc {"expression": "32 / 2"}

── tool calc · 2 tokens
16

── assistant · answer 2 of 3 · 1 token · version 4 · mean log-prob -0.500 · reward 0.25
16

── user · 3 tokens
higher

── assistant · answer 3 of 3 · 2 tokens · version 5 · mean log-prob -0.500 · reward 0.5
40

── user · not in the response
right

truth     {"target": 0, "numbers": [1, 2]}
score     0.75
parts     acc 1
ended     done: the environment ended it
tokens    prompt 3, 3 answers 7, replies 5
versions  4 (10 tokens), 5 (2 tokens)
numbers   calls {"calc": 1}, episode_s 2.0, engine_s 1.4, env_s 0.6
"""


def test_an_episode_with_its_rewards_and_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "game", episode(iteration=5))
    assert main([str(tmp_path / "game")]) == 0
    printed = capsys.readouterr()
    title, text = printed.out.split("\n\n", 1)
    assert title == "game, iteration 5: uid 0-0, sample 0, countdown" and printed.err == ""
    shown, _, file = text.partition("file      ")
    assert shown == EPISODE and file.endswith("iteration=000005/chunk-000000.parquet, row 0\n")


def test_a_new_conversation_begins_with_its_own_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, programmed())
    assert main([str(tmp_path)]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("── ")]
    assert [head.removeprefix("── ").split(" · ")[:2] for head in heads] == [
        ["user", "prompt"],
        ["assistant", "answer 1 of 3"],
        ["tool calc", "2 tokens"],
        ["assistant", "answer 2 of 3"],
        ["user", "prompt of sequence 2"],
        ["assistant", "prompt of sequence 2"],
        ["user", "prompt of sequence 2"],
        ["assistant", "answer 3 of 3"],
        ["user", "not in the response"],
    ]
    assert " · sequence 2 · " in heads[-2]


def test_a_single_response_of_validation_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine, failed = (single(0, sample, 7, split="val", chunk=-1, response="word " * 60) for sample in (0, 1))
    write(tmp_path, fine, failed | {"reward_error": "ValueError: boom", "finish_reason": "length"})
    assert main([str(tmp_path), "--split", "val", "--failed"]) == 0
    out = capsys.readouterr().out
    assert "validation of version 7: uid 0-0, sample 1" in out and "── user · prompt\nquestion 0\n" in out
    assert "── assistant · answer 1 of 1 · " in out and f"\n{'word ' * 60}\n" in out, "a pipe gets lines whole"
    assert "error     ValueError: boom\n" in out and "score" not in out
    assert "ended     length: it reached the limit of its length\n" in out


def test_nothing_that_was_generated_reaches_the_terminal_as_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "\x1b[2J\x1b]8;;http://evil\x1b\\\u202e[red]\x9b"
    call = {"name": evil, "arguments": {evil: evil}}
    messages = [{"role": "user", "content": evil}, PLAYED[0] | {"content": evil, "reasoning": evil, "calls": [call]}]
    messages += [{"role": "tool", "name": evil, "content": evil}, {"role": evil, "content": [evil]}, *PLAYED[2:]]
    hostile = {"reward_parts": json.dumps({evil: evil}), "ended": evil, "data_source": evil, "uid": evil}
    write(tmp_path, episode(prompt=json.dumps(messages[:1]), messages=json.dumps(messages), **hostile))
    monkeypatch.setenv("FORCE_COLOR", "1")
    for colours in (True, False):
        if not colours:
            monkeypatch.setenv("NO_COLOR", "1")
        assert main([str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert ("\x1b[36m" in out) == colours, "the colour of user messages"
        assert "\x1b[2J" not in out and "\x1b]" not in out and "\u202e" not in out and "\x9b" not in out
        assert out.count("\\x1b[2J") >= 9 and "[red]" in out


def test_raw_shows_control_tokens_apart_from_text_that_looks_like_them(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config()
    config.model.path = str(tiny_model)
    tokenizer = load_tokenizer(config.model)
    control = tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)
    prompt = tokenizer("one\ntwo", add_special_tokens=False)["input_ids"]
    spelled = tokenizer(control, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    answer = [*tokenizer("yes", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ids = [*answer, *spelled, *answer]
    spans = [
        {"kind": kind, "tokens": len(part), "reward": None} for kind, part in ((1, answer), (0, spelled), (1, answer))
    ]
    mask, log_probs = [1] * len(ids), [0.0] * len(ids)
    said = {"role": "assistant", "content": "yes"}
    lists = {"advantages": log_probs, "returns": log_probs, "response_mask": mask, "rollout_log_probs": log_probs}
    messages = json.dumps([*PROMPT, said, {"role": "user", "content": control}, said])
    row = episode(prompt_ids=prompt, response_ids=ids, spans=spans, messages=messages, **lists)
    # The second answer begins a sequence of its own, whose prompt has the reply.
    answered = [{"prompt": None, "tokens": len(answer)}, {"prompt": [*prompt, *prompt], "tokens": len(answer)}]
    pair = {"response_ids": [*answer, *answer], "spans": [spans[0], spans[2]], "contexts": answered, "sample": 1}
    pair |= {name: lists[name][: 2 * len(answer)] for name in lists}
    pair["version_runs"] = [{"version": 0, "tokens": 2 * len(answer)}]
    write(tmp_path, row | {"version_runs": [{"version": 0, "tokens": len(ids)}], "contexts": None}, row | pair)
    assert main([str(tmp_path), "--raw"]) == 2
    assert "config.yaml is missing" in capsys.readouterr().err
    save_yaml(config, tmp_path / "config.yaml")
    assert main([str(tmp_path), "--raw"]) == 0
    out = capsys.readouterr().out
    assert f"── prompt · {len(prompt)} tokens\none⏎\ntwo\n" in out
    assert f"answer 1 of 2 · {len(answer)} tokens · version 0 · mean log-prob 0.000\nyes⟦{control}⟧\n" in out
    assert f"── reply · {len(spelled)} tokens\n{control}\n" in out
    assert main([str(tmp_path), "--raw", "--sample", "1"]) == 0
    out = capsys.readouterr().out
    second = out.partition(f"── prompt of sequence 2 · {2 * len(prompt)} tokens\none⏎\ntwoone⏎\ntwo\n")[2]
    assert f"answer 2 of 2 · {len(answer)} tokens · sequence 2 · version 0" in second and "answer 1" not in second


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere is not a folder; give the folder of a run, such as runs/NAME"),
        (["run", "--iteration", "3"], "no rows of iteration 3; there are iterations 1 to 1"),
        (["run", "--split", "val"], "has no rows in validation/"),
        (["run", "--uid", "1-0"], "no row of uid '1-0'; did you mean 0-0?"),
        (["run", "--failed"], "none of the 1 rows of iteration 1 failed"),
    ],
)
def test_refusals_are_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write(tmp_path / "run", single())
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and sentence in error and len(error.splitlines()) == 1


def test_the_command_needs_no_model_library(tmp_path: Path) -> None:
    write(tmp_path, single())
    code = (
        f"import sys; from jobs.__main__ import main; main(['show', {str(tmp_path)!r}])\n"
        "print([name for name in ('torch', 'transformers', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, env=dict(os.environ)
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
