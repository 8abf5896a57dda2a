"""Preference pairs: to token rows, the Bradley-Terry loss against a plain formula, and the train worker on one rank."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.train
import ray.train.torch
import torch
from transformers import AutoConfig, AutoTokenizer

from jobs.prepare import hh_rlhf
from pipeline.config.supervised import PreferenceConfig, PreferenceDataConfig
from pipeline.models.fsdp import NotSavedError
from pipeline.models.micro_batches import split_micro_batches
from pipeline.store.events import AttemptBegun, Event, IterationTrained, TrainingEnded
from pipeline.supervised.data import held_rows, read
from pipeline.supervised.loop import WorkerSettings
from pipeline.supervised.preference import MEASURED, PreferenceLoop, bradley_terry, collate
from pipeline.supervised.preference_data import SCHEMA, PreferenceEncoder
from tests.models.test_reward_model import build, ragged, theirs
from tests.sentences import Named

ASK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2 + 2?"}]
GOOD = [{"role": "assistant", "content": "<answer> 4 </answer>"}]
BAD = [
    {"role": "assistant", "content": "Well."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "5, I think."},
]
CHOSEN, REJECTED, MARGIN = [2.0, 0.5, -1.0], [1.0, 0.5, 3.0], [0.0, 0.25, 1.0]


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def encode(tokenizer: Any, rows: list[dict[str, Any]], **data: Any) -> list[dict[str, Any]]:
    encoder = PreferenceEncoder(tokenizer, PreferenceDataConfig(**data))
    table = pa.Table.from_pylist(rows)
    encoder.check(table.schema, "f.parquet", encoder.data)
    return encoder.encode(table, [f"f.parquet, row {row}" for row in range(len(rows))]).to_pylist()


def test_each_side_is_the_whole_conversation_without_an_opening_for_another_turn(tokenizer: Any) -> None:
    (row,) = encode(tokenizer, [{"prompt": ASK, "chosen": GOOD, "rejected": BAD, "extra": 1}])
    for name, side in (("chosen_ids", GOOD), ("rejected_ids", BAD)):
        assert row[name] == tokenizer.apply_chat_template([*ASK, *side])["input_ids"]
    assert tokenizer.decode(row["chosen_ids"]).endswith("</answer><|im_end|>\n")
    assert row["margin"] == 0


def test_whole_conversations_text_and_other_columns_give_the_same_tokens(tokenizer: Any) -> None:
    user = ASK[1:]
    want = encode(tokenizer, [{"prompt": user, "chosen": GOOD, "rejected": BAD}])
    whole = {"chosen": [*user, *GOOD], "rejected": [*user, *BAD]}
    assert encode(tokenizer, [whole]) == want
    # A prompt column beside whole conversations, as some data sets have it.
    assert encode(tokenizer, [{"prompt": user[0]["content"], **whole}], prompt_key=None) == want
    texts = {"question": user[0]["content"], "chosen": GOOD[0]["content"], "rejected": BAD}
    assert encode(tokenizer, [texts], prompt_key="question") == want
    other = {"prompt": user, "yes": GOOD, "no": BAD, "by": 2}
    (row,) = encode(tokenizer, [other], chosen_key="yes", rejected_key="no", margin_key="by")
    assert row == want[0] | {"margin": 2.0}


def test_texts_that_spell_special_tokens_are_text(tokenizer: Any) -> None:
    mark = "<|im_end|>\n<|im_start|>assistant\n"
    ask, good = [{"role": "user", "content": mark}], [{"role": "assistant", "content": f"x{mark}"}]
    first, second = encode(tokenizer, [{"prompt": ask, "chosen": good, "rejected": BAD}] * 2)
    encoder = PreferenceEncoder(tokenizer, PreferenceDataConfig())
    encoder.encode(pa.Table.from_pylist([{"prompt": ask, "chosen": good, "rejected": BAD}]), ["row 0"])
    assert [note for note in encoder.omissions.notes if "texts spell special tokens of the tokenizer (<|im_" in note]
    assert first == second and first["chosen_ids"].count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(first["chosen_ids"]) == tokenizer.apply_chat_template([*ask, *good], tokenize=False)


def test_an_answer_at_the_end_of_the_prompt_is_refused(tokenizer: Any, named: Named) -> None:
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, [{"prompt": [*ASK, *GOOD], "chosen": GOOD, "rejected": BAD}])
    named(refused.value, "0 'prompt'")


def test_template_arguments_reach_the_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + "{{ mood }}")
    pair = {"prompt": ASK, "chosen": GOOD, "rejected": BAD}
    (row,) = encode(tokenizer, [pair], apply_chat_template_kwargs={"mood": "calm"})
    assert tokenizer.decode(row["chosen_ids"]).endswith("<|im_end|>\ncalm")


def test_long_pairs(tokenizer: Any, named: Named) -> None:
    rows = [{"prompt": ASK, "chosen": GOOD, "rejected": side} for side in (BAD, GOOD)]
    whole = encode(tokenizer, rows)
    limit = len(whole[1]["chosen_ids"])
    assert len(whole[0]["rejected_ids"]) > limit
    left = encode(tokenizer, rows, max_length=limit, truncation="left")
    assert left[0]["rejected_ids"] == whole[0]["rejected_ids"][-limit:]
    assert left[0]["chosen_ids"] == whole[0]["chosen_ids"] and left[1] == whole[1]
    drop = encode(tokenizer, rows, max_length=limit, truncation="drop")
    assert drop[0]["chosen_ids"] == drop[0]["rejected_ids"] == [] and drop[1] == whole[1]
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, rows, max_length=limit)
    named(refused.value, f"f.parquet 0 'rejected' data.max_length={limit}")


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"chosen": None}, "'chosen'"),
        ({"rejected": []}, "'rejected'"),
        ({"prompt": None}, "'prompt'"),
        ({"chosen": [{"role": None, "content": "x"}]}, "'chosen' 0"),
        ({"chosen": [{"role": "assistant", "content": None}]}, "'chosen' 0"),
        ({"chosen": [*GOOD, *ASK[1:]]}, "'chosen' 'user'"),
        ({"rejected": [*ASK, *GOOD]}, "'rejected' 'system' data.prompt_key=null"),
        ({"by": None}, "'by'"),
        ({"by": float("inf")}, "'by'"),
    ],
)
def test_bad_rows_are_named(tokenizer: Any, change: dict[str, Any], keys: str, named: Named) -> None:
    good = {"prompt": ASK, "chosen": GOOD, "rejected": BAD, "by": 1.0}
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, [good, good | change], margin_key="by")
    named(refused.value, f"f.parquet 1 {keys}")


def test_a_missing_prompt_and_a_failing_template_are_named(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, named: Named
) -> None:
    pair = {"prompt": ASK, "chosen": GOOD, "rejected": ""}
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, [{"asked": ASK, "chosen": GOOD, "rejected": BAD}])
    named(refused.value, "0 'chosen'")
    for template, column in {
        "{{ raise_exception('no') }}": "'chosen'",
        "{% if messages[-1].content %}{{ messages | map(attribute='content') | join }}{% endif %}": "'rejected'",
    }.items():
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(ValueError) as refused:
            encode(tokenizer, [pair])
        named(refused.value, f"0 {column}")


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        ({"prompt": [ASK], "chosen": [GOOD]}, "'rejected' data.rejected_key"),
        ({"prompt": [ASK], "chosen": [1], "rejected": [GOOD]}, "'chosen' int64"),
        ({"prompt": [1], "chosen": [GOOD], "rejected": [GOOD]}, "'prompt' int64"),
        ({"chosen": [GOOD], "rejected": [GOOD]}, "'by' data.margin_key"),
        ({"chosen": [GOOD], "rejected": [GOOD], "by": ["1"]}, "'by'"),
    ],
)
def test_files_that_lack_a_column_are_named(tmp_path: Path, columns: dict[str, Any], keys: str, named: Named) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    data = PreferenceDataConfig(margin_key="by")
    with pytest.raises(ValueError) as refused:
        PreferenceEncoder.find_row_groups(str(tmp_path), "data.val_files", data)
    named(refused.value, f"data.val_files a.parquet {keys}")


def test_files_of_hh_rlhf_are_read_and_dealt_to_the_ranks(tmp_path: Path, tokenizer: Any) -> None:
    pairs = [{"prompt": ASK[1:], "chosen": GOOD, "rejected": [BAD[0] | {"content": "x" * i}]} for i in range(1, 8)]
    file = tmp_path / "rm_train.parquet"
    pq.write_table(pa.Table.from_pylist(pairs, schema=hh_rlhf.PAIRS), file, row_group_size=3)
    encoder = PreferenceEncoder(tokenizer, PreferenceDataConfig())
    groups = encoder.find_row_groups(str(file), "data.train_files", encoder.data)
    assert [(group.number, group.rows) for group in groups] == [(0, 3), (1, 3), (2, 1)]
    whole = pa.concat_tables(table for group in groups for table in read(group, encoder, None)).to_pylist()
    assert [len(row["rejected_ids"]) for row in whole] == sorted(len(row["rejected_ids"]) for row in whole)
    shares = [held_rows(groups, encoder, 5, rank, 2) for rank in range(2)]
    assert [share.to_pylist() for share in shares if share is not None] == [whole[0:5:2], whole[1:5:2]]
    assert held_rows([], encoder, -1, 0, 1) is None


def table(chosen: list[list[int]], rejected: list[list[int]], margin: list[float] | None = None) -> pa.Table:
    return pa.table([chosen, rejected, margin or [0.0] * len(chosen)], schema=SCHEMA)


def pairs(count: int = 7) -> pa.Table:
    lengths = [1 + (3 * i) % 8 for i in range(2 * count)]
    rows = ragged(lengths, seed=3)
    return table(rows[:count], rows[count:], [i / 4 for i in range(count)])


def test_loss_and_metrics_are_those_of_the_formula() -> None:
    rewards = [torch.tensor(side, requires_grad=True) for side in (CHOSEN, REJECTED)]
    sums = bradley_terry(*rewards, torch.tensor(MARGIN))
    both = list(zip(CHOSEN, REJECTED, MARGIN, strict=True))
    loss = sum(math.log(1 + math.exp(-(c - r - m))) for c, r, m in both)
    assert dict(zip(MEASURED, sums.tolist(), strict=True)) == pytest.approx(
        {"loss": loss, "accuracy": 1.5, "margin": -3.0, "chosen_reward": 1.5, "rejected_reward": 4.5}
    )
    sums[0].backward()
    slopes = [-1 / (1 + math.exp(c - r - m)) for c, r, m in both]
    assert rewards[0].grad.tolist() == pytest.approx(slopes)
    assert rewards[1].grad.tolist() == pytest.approx([-slope for slope in slopes])


def test_far_apart_rewards_stay_finite() -> None:
    far = torch.tensor([1e4], requires_grad=True)
    sums = bradley_terry(-far, far, torch.zeros(1))
    sums[0].backward()
    assert sums[0] == 2e4 and far.grad == 2


def test_collate_keeps_both_sides_of_a_pair_together() -> None:
    rows = table([[5, 6, 7], [], [8]], [[1, 2], [], [3, 4]], [0.5, 1.0, 2.0])
    layouts = {True: [[8, 5, 6, 7, 3, 4, 1, 2]], False: [[8, 0, 0], [5, 6, 7], [3, 4, 0], [1, 2, 0]]}
    for packed, ids in layouts.items():
        batch, margin = collate(rows, [2, 0, 1], packed)
        assert batch.input_ids.tolist() == ids
        assert batch.lengths.tolist() == [1, 3, 2, 2] and margin.tolist() == [2.0, 0.5]
        for index in ([], [1]):
            batch, margin = collate(rows, index, packed)
            assert batch.input_ids.tolist() == [[0]] and batch.lengths.tolist() == [1] and margin.shape == (0,)


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """A reward model with random weights, and the tiny model's tokenizer."""
    build("qwen3").lm.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def worker(folder: Path, tables: list[pa.Table], **changes: Any) -> tuple[PreferenceLoop, list[Event]]:
    """The only rank of a run over `tables`, one per step, and what it posts."""
    config = PreferenceConfig(out=str(folder.parent / "out"))
    config.model.path, config.data.train_batch_size, config.optim.lr = str(folder), len(tables[0]), 1e-2
    for name, value in changes.items():
        section = next(part for part in (config.data, config.trainer) if hasattr(part, name))
        setattr(section, name, value)
    posted: list[Event] = []
    progress = SimpleNamespace(post=SimpleNamespace(remote=posted.append))
    shard = SimpleNamespace(iter_batches=lambda **_: iter(tables))
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    with (
        patch.object(ray.train, "get_context", return_value=context),
        patch.object(ray.train, "get_dataset_shard", return_value=shard),
        patch.object(ray.train.torch, "get_device", return_value=torch.device("cpu")),
    ):
        return PreferenceLoop(WorkerSettings(PreferenceLoop, config, len(tables), [], progress)), posted


@pytest.mark.usefixtures("one_rank")
def test_the_end_is_tried_before_the_first_step(folder: Path) -> None:
    (folder.parent / "out").write_text("does not exist")
    with pytest.raises(NotSavedError, match="out at the end: it is a file"):
        worker(folder, [pairs()])
    (folder.parent / "out").unlink()
    worker(folder, [pairs()])
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def plain(rows: pa.Table) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss and its gradients, one conversation at a time, by the model itself."""
    model = build("qwen3").lm
    rewards = [theirs(model, [ids for ids in rows[side].to_pylist() if ids]) for side in ("chosen_ids", "rejected_ids")]
    margin = torch.tensor([m for m, ids in zip(rows["margin"].to_pylist(), rows[0].to_pylist(), strict=True) if ids])
    loss = torch.log1p(torch.exp(-(rewards[0] - rewards[1] - margin))).mean()
    loss.backward()
    return loss.detach(), {f"lm.{name}": p.grad for name, p in model.named_parameters()}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("budget", [16, 40, 4096])
def test_micro_batches_change_neither_loss_nor_gradients(folder: Path, budget: int) -> None:
    rows = pairs()
    loop, _ = worker(folder, [rows], max_token_len_per_gpu=budget, grad_clip=1e9)
    assert len(split_micro_batches(loop.lengths(rows), budget, packed=loop.packed)) == {16: 5, 40: 2, 4096: 1}[budget]
    with patch.object(loop.optimizer, "step"):
        metrics = loop.step(rows)
    loss, grads = plain(rows)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5) and metrics["dropped"] == 0
    for name, parameter in loop.model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), grads[name], atol=1e-6, rtol=1e-4, msg=name)
    assert loop.validate(rows)["loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_pairs_left_out_are_counted_and_change_nothing(folder: Path) -> None:
    rows = pairs()
    chosen, rejected, margin = rows.to_pydict().values()
    chosen[1] = rejected[1] = chosen[4] = rejected[4] = []
    some, none = table(chosen, rejected, margin), table([[]] * 7, [[]] * 7)
    loop, _ = worker(folder, [some], grad_clip=1e9)
    with patch.object(loop.optimizer, "step"):
        metrics = loop.step(some)
        loss, grads = plain(some)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5) and metrics["dropped"] == 2
        for name, parameter in loop.model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), grads[name], atol=1e-6, rtol=1e-4, msg=name)
    before = loop.model.lm.score.weight.full_tensor().clone()
    assert loop.step(none) == {"dropped": 9, "grad_norm": 0} and torch.equal(
        loop.model.lm.score.weight.full_tensor(), before
    )
    assert loop.validate(none) == {"dropped": 7}


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_saved_where_every_pair_was_left_out(folder: Path) -> None:
    loop, _ = worker(folder, [table([[]], [[]])], max_length=9)
    with (
        patch("ray.get", return_value=False),
        pytest.raises(RuntimeError, match="all pairs were left out: none fits .*max_length=9"),
    ):
        loop.run()
    assert not (folder.parent / "out").exists()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("ends_with_padding", [False, True])
def test_a_pad_token_is_saved_unless_conversations_end_with_it(folder: Path, ends_with_padding: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    last = tokenizer.pad_token_id if ends_with_padding else tokenizer.eos_token_id
    loop, posted = worker(folder, [table([[5, last], []], [[7, 8, last], []])])
    with patch("ray.get", return_value=False):
        loop.run()
    begun, trained, ended = posted
    assert begun == AttemptBegun(0) and ended == TrainingEnded(1, False)
    assert isinstance(trained, IterationTrained) and trained.iteration == 1 and trained.metrics["dropped"] == 1
    assert trained.metrics["perf/total_num_tokens"] == 5 and trained.metrics["perf/throughput"] > 0
    assert loop.state() == {"dropped": 1, "last_tokens": [last]}
    loop.load_state({"dropped": 3, "last_tokens": [1]})
    assert loop.state() == {"dropped": 3, "last_tokens": [1]}
    config = AutoConfig.from_pretrained(folder.parent / "out")
    assert config.pad_token_id == (None if ends_with_padding else tokenizer.pad_token_id) and config.num_labels == 1
    assert AutoTokenizer.from_pretrained(folder.parent / "out").chat_template == tokenizer.chat_template


@pytest.mark.usefixtures("one_rank")
def test_a_model_with_too_few_positions_is_refused(folder: Path, named: Named) -> None:
    build("gpt2").lm.save_pretrained(folder)
    with pytest.raises(ValueError) as refused:
        worker(folder, [pairs()], max_length=25)
    named(refused.value, "data.max_length=25 24")
    worker(folder, [pairs()], max_length=24)


def test_columns_of_json_and_text_that_is_json_of_messages(tokenizer: Any, named: Named) -> None:
    want = encode(tokenizer, [{"prompt": ASK, "chosen": GOOD, "rejected": BAD}])
    cells = {"prompt": ASK, "chosen": GOOD, "rejected": BAD}
    assert encode(tokenizer, [{name: json.dumps(cell) for name, cell in cells.items()}]) == want
    whole = {"chosen": json.dumps([*ASK, *GOOD]), "rejected": json.dumps([*ASK, *BAD])}
    assert encode(tokenizer, [whole]) == want
    kind = pa.json_()
    table = {name: pa.ExtensionArray.from_storage(kind, pa.array([json.dumps(cell)])) for name, cell in cells.items()}
    encoder = PreferenceEncoder(tokenizer, PreferenceDataConfig())
    assert encoder.encode(pa.table(table), ["f.parquet, row 0"]).to_pylist() == want
    # An answer that looks like JSON is an answer.
    for text in ("[1, 2]", "42", '[{"a": 1}]'):
        (row,) = encode(tokenizer, [{"prompt": "Q", "chosen": text, "rejected": "no"}])
        assert f"{text}<|im_end|>" in tokenizer.decode(row["chosen_ids"])
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, [{"chosen": "a", "rejected": "b"}])
    named(refused.value, "0 'chosen'")


def test_answers_without_their_thinking_are_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, named: Named
) -> None:
    template = tokenizer.chat_template.replace("message['content'] or ''", "message['content'].split('</think>')[-1]")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    thought = [{"role": "assistant", "content": "<think>hm</think>4"}]
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, [{"prompt": ASK, "chosen": thought, "rejected": BAD}])
    named(refused.value, "0 'chosen'")


def test_what_a_template_leaves_out_of_a_side_is_refused(tokenizer: Any, named: Named) -> None:
    thought = [GOOD[0] | {"thinking": "2 and 2"}]
    for side in ("chosen", "rejected"):
        pair = {"prompt": ASK, "chosen": GOOD, "rejected": BAD} | {side: thought}
        with pytest.raises(ValueError) as refused:
            encode(tokenizer, [pair])
        named(refused.value, f"0 '{side}' 2")
