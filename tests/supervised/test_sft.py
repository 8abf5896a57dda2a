"""Supervised fine-tuning: encoding, row groups, and whole runs on a local Ray."""

import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs import sft as job
from pipeline.config import load
from pipeline.config.model import ModelConfig
from pipeline.config.supervised import SFTConfig, SFTDataConfig
from pipeline.models.fsdp import NotSavedError
from pipeline.models.policy import load_policy
from pipeline.models.tokenizer import load_tokenizer
from pipeline.supervised.sft import SFTLoop, collate
from pipeline.supervised.sft_data import SFTEncoder
from tests.sentences import Named


def conversation(i: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"Numbers: {i} {i + 1}. Target: {2 * i + 1}."},
        {"role": "assistant", "content": f"<answer> {i} + {i + 1} </answer>"},
    ]


def write(path: Path, count: int, row_group_size: int = 16) -> Path:
    pq.write_table(pa.table({"messages": [conversation(i) for i in range(count)]}), path, row_group_size=row_group_size)
    return path


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def encode(tokenizer: Any, conversations: list[Any], **data: Any) -> pa.Table:
    """Token rows of conversations of a file `f.parquet`."""
    places = [f"f.parquet, row {row}" for row in range(len(conversations))]
    return SFTEncoder(tokenizer, SFTDataConfig(**data)).encode(pa.table({"messages": conversations}), places)


def test_only_the_assistants_tokens_are_learnt(tokenizer: Any) -> None:
    messages = [*conversation(3), {"role": "user", "content": "Again?"}, {"role": "assistant", "content": "No, 7."}]
    table = encode(tokenizer, [messages])
    ids, mask = table["input_ids"][0].as_py(), table["loss_mask"][0].as_py()
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    learnt = tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])
    assert learnt == "<answer> 3 + 4 </answer><|im_end|>No, 7.<|im_end|>"
    # What the policy is given when it generates is exactly what precedes its first learnt token.
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert ids[: mask.index(1)] == prompt


def test_texts_that_spell_special_tokens_are_learnt_as_text(tokenizer: Any) -> None:
    """Also with masks, several answers, tools, and a conversation that is cut."""
    end, mark = tokenizer.eos_token_id, "<|im_end|>\n<|im_start|>user\n"
    messages = [
        {"role": "user", "content": f"What ends {mark}?"},
        {"role": "assistant", "content": f"This: {mark}."},
        {"role": "user", "content": mark},
        {"role": "assistant", "content": f"{mark} a {mark}"},
    ]
    (row,) = encode(tokenizer, [messages]).to_pylist()
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert row["input_ids"].count(end) == 4
    learnt = [token for token, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on]
    assert tokenizer.decode(learnt) == f"This: {mark}.<|im_end|>{mark} a {mark}<|im_end|>" and learnt.count(end) == 2
    masked = [messages[0], {**messages[1], "loss_mask": 0}, *messages[2:]]
    (other,) = encode(tokenizer, [masked], max_length=len(learnt) + 60, truncation="right").to_pylist()
    assert other["input_ids"] == row["input_ids"][: len(learnt) + 60]
    first = row["loss_mask"].index(0, row["loss_mask"].index(1))
    assert other["loss_mask"] == ([0] * first + row["loss_mask"][first:])[: len(learnt) + 60]


def test_messages_behind_the_last_answer_are_noted(tokenizer: Any) -> None:
    encoder = SFTEncoder(tokenizer, SFTDataConfig())
    rows = pa.table({"messages": [conversation(1), [*conversation(1), {"role": "user", "content": "Again?"}]]})
    first, second = encoder.encode(rows, ["row 0", "row 1"]).to_pylist()
    assert first == second
    assert [*encoder.omissions.notes] == ["messages after the last answer of a conversation are left out"]


@pytest.mark.parametrize(("behind", "learnt"), [("", 1), ("<|endoftext|>", 1), (" <|im_end|>", 1), ("x<|im_end|>", 3)])
def test_answers_are_learnt_to_the_end_of_the_turn(tokenizer: Any, behind: str, learnt: int) -> None:
    """Also where the tokenizer's end of sequence is another token, and where a template writes more ends."""
    plain = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    template = plain + f"{{% if not add_generation_prompt %}}{behind}{{% endif %}}"
    for eos in ("<|endoftext|>", "<|im_end|>"):
        tokenizer.eos_token, tokenizer.chat_template = eos, template
        table = encode(tokenizer, [conversation(1)])
        ids, mask = table["input_ids"][0].as_py(), table["loss_mask"][0].as_py()
        end = ids.index(2, mask.index(1))
        assert sum(mask[end:]) == learnt and all(mask[mask.index(1) : end + learnt])


def test_template_without_generation_markers(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, template = encode(tokenizer, [conversation(1)]), tokenizer.chat_template
    plain = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert plain != template
    monkeypatch.setattr(tokenizer, "chat_template", plain)
    assert encode(tokenizer, [conversation(1)]) == expected


def test_long_conversations(tokenizer: Any, named: Named) -> None:
    short = encode(tokenizer, [conversation(1)], max_length=5, truncation="right")
    assert len(short["input_ids"][0]) == len(short["loss_mask"][0]) == 5
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, [conversation(1)], max_length=5)
    named(refused.value, "0 'messages' data.max_length=5")


@pytest.mark.parametrize(
    ("bad", "keys"),
    [
        (None, ""),
        ([], ""),
        ([{"role": "user", "content": "x"}], ""),
        ([{"content": "x"}], ""),
    ],
)
def test_bad_conversations_name_the_row(tokenizer: Any, bad: Any, keys: str, named: Named) -> None:
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, [conversation(0), bad])
    named(refused.value, f"f.parquet 1 'messages' {keys}")


@pytest.mark.parametrize(
    ("column", "keys"),
    [({"text": ["x"]}, "'messages'"), ({"messages": [1]}, "int64")],
)
def test_files_without_conversations_are_refused(
    tmp_path: Path, column: dict[str, Any], keys: str, named: Named
) -> None:
    pq.write_table(pa.table(column), tmp_path / "a.parquet")
    with pytest.raises(ValueError) as refused:
        SFTEncoder.find_row_groups(str(tmp_path), "data.train_files", SFTDataConfig())
    named(refused.value, f"data.train_files a.parquet {keys}")
    with pytest.raises(ValueError, match="nowhere.* does not exist"):
        SFTEncoder.find_row_groups("nowhere.parquet", "data.train_files", SFTDataConfig())


def test_collate_points_at_the_predecessors() -> None:
    table = pa.table({"input_ids": [[5, 6, 7], [8, 9], [1]], "loss_mask": [[0, 1, 1], [1, 1], [1]]})
    batch, select, targets = collate(table, [0, 1, 2], packed=True)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 1]]
    assert select.tolist() == [0, 1, 3] and targets.tolist() == [6, 7, 9]
    batch, select, targets = collate(table, [0, 1, 2])
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0], [1, 0, 0]]
    assert select.tolist() == [0, 1, 3] and targets.tolist() == [6, 7, 9]
    for packed in (True, False):
        batch, select, targets = collate(table, [], packed)
        assert batch.input_ids.shape == (1, 1) and len(select) == len(targets) == 0


def test_the_command_has_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """The other refusals are those of every `Job` (`tests/jobs/test_reward_model.py`)."""
    assert job.main(["data.truncation=left"]) == 2
    assert "data.truncation=left must be one of error, right" in capsys.readouterr().err


def test_answers_without_their_thinking_are_context_alone(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, named: Named
) -> None:
    template = tokenizer.chat_template.replace("message['content'] or ''", "message['content'].split('</think>')[-1]")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    thought = {"role": "assistant", "content": "<think>hm</think>7."}
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, [[conversation(3)[0], thought]])
    named(refused.value, "0 'messages'")
    context = [conversation(3)[0], {**thought, "loss_mask": 0}, *conversation(3)]
    assert sum(encode(tokenizer, [context])["loss_mask"][0].as_py()) > 0


def test_rows_that_cannot_be_learnt_are_refused_before_anything_starts(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.supervised.start_ray", lambda config: pytest.fail("Ray was started"))
    rows = [{"messages": conversation(i), "system": "Short."} for i in range(16)]
    options = [f"out={tmp_path / 'out'}", f"model.path={tiny_model}", "data.train_batch_size=8"]
    options += [f"data.train_files={tmp_path / 'a.parquet'}"]
    rows[9]["messages"][1]["thinking"] = "9 + 10"  # type: ignore[index]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=16)
    assert job.main(options) == 2
    assert "a.parquet, row 9 (row group 0), column 'messages': the model's chat template leaves out `thinking`" in (
        capsys.readouterr().err
    )
    assert job.main([*options, "data.apply_chat_template_kwargs={shout: true}"]) == 2
    assert "the model's chat template does not read 'shout'" in capsys.readouterr().err


def test_adapters_that_cannot_be_are_refused(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"out={tmp_path / 'out'}", f"model.path={tiny_model}", "data.train_files=none", "model.lora.rank=4"]
    assert job.main([*options, "model.lora.target_modules=[query]", f"model.lora.path={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "query matches no linear layer inside of model.path=" in said and "holds no adapter_config.json" in said


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
def test_adapters_are_saved_merged_and_alone(
    tmp_path: Path, tiny_model: Path, ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    # As in a base model, in whose files the template's end of turn is none.
    tiny_model = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    (tiny_model / "generation_config.json").write_text('{"eos_token_id": 0}')
    files = write(tmp_path / "train.parquet", 44, row_group_size=10)
    options = [f"out={tmp_path / 'out'}", f"model.path={tiny_model}", f"data.train_files={files}", "optim.lr=1e-2"]
    options += [f"data.val_files={files}", "data.train_batch_size=8", "trainer.num_workers=2", "model.lora.rank=8"]
    options += ["trainer.logger=[console]"]
    found = job.run(load(SFTConfig, [*options, "trainer.total_epochs=3"], "sft"))
    assert found["val_loss"] < 5.5  # random weights give log(320) = 5.8
    assert "sft: answers end with <|endoftext|> (0) or <|im_end|> (2)" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.generation_config.eos_token_id == [0, 2]
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "out" / "adapter")
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.testing.assert_close(alone(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
def test_ranks_and_micro_batches_change_nothing(tmp_path: Path, tiny_model: Path, ray_session: None) -> None:
    files = write(tmp_path / "train.parquet", 44, row_group_size=10)
    options = [f"model.path={tiny_model}", f"data.train_files={files}", f"data.val_files={files}"]
    options += ["data.val_max_samples=37", "data.train_batch_size=8", "optim.lr=3e-3", "trainer.total_epochs=2"]
    options += ["trainer.logger=[console]"]
    results = {}
    for name, more in {
        "one": ["trainer.max_token_len_per_gpu=2048"],
        "two": ["trainer.num_workers=2", "trainer.max_token_len_per_gpu=70", "data.max_length=70"],
    }.items():
        results[name] = job.run(load(SFTConfig, [f"out={tmp_path / name}", *options, *more], "sft"))
    one, two = results["one"], results["two"]
    assert one["step"] == two["step"] == 11
    for key in ("loss", "grad_norm", "val_loss", "lr"):
        assert one[key] == pytest.approx(two[key], rel=1e-3), key
    assert one["val_loss"] < 4.5  # random weights give log(320) = 5.8

    # The number reported is that of the model saved, measured the plain way.
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "two")
    table = encode(tokenizer, [conversation(i) for i in range(37)])
    total, count = 0.0, 0
    for ids, mask in zip(table["input_ids"].to_pylist(), table["loss_mask"].to_pylist(), strict=True):
        labels = torch.from_numpy(np.where(mask, ids, -100))[None]
        with torch.no_grad():
            logits = trained(torch.tensor([ids])).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        count += sum(mask)
    assert total / count == pytest.approx(two["val_loss"], rel=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "train.parquet", "two"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("filled", [True, False], ids=["filled meanwhile", "its disk is full"])
def test_a_model_that_cannot_be_saved_in_out_is_saved_elsewhere(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: bool
) -> None:
    out, place = tmp_path / "full" / "out", tmp_path / "tmp"
    for folder in (out, place):
        folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    if filled:
        (out / "config.json").write_text("another model's")
    else:
        out.rmdir()
        out.parent.rmdir()
        out.parent.write_text("does not exist")
    loop = object.__new__(SFTLoop)
    model = ModelConfig(path=str(tiny_model))
    loop.model, loop.tokenizer = load_policy(model), load_tokenizer(model)
    loop.config, loop.ends = SFTConfig(out=str(out)), ()
    with pytest.raises(NotSavedError) as error:
        loop.save()
    (weights,) = tmp_path.glob("**/model.safetensors")
    assert weights.parent == (tmp_path / "full" if filled else place) / f"out-{os.getpid()}"
    assert str(error.value).endswith(f". The model is in {weights.parent} (on {socket.gethostname()})")
    if filled:
        assert [path.name for path in out.iterdir()] == ["config.json"]
