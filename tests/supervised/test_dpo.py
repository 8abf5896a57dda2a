"""Preference learning: encoding, the reference, and the update against plain torch, however work is split."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config.preference import DPOConfig, DPODataConfig
from pipeline.models.fsdp import full_state_dict
from pipeline.supervised.dpo import DPOLoop
from pipeline.supervised.dpo_data import SCHEMA, DPOEncoder
from pipeline.supervised.loop import WorkerSettings
from tests.sentences import Named
from tests.train.updates import spawn, worlds

PROMPT = [{"role": "user", "content": "Numbers: 3 4. Target: 7."}]


def said(text: str, role: str = "assistant") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def encode(tokenizer: Any, rows: list[dict[str, Any]], **data: Any) -> pa.Table:
    """Token rows of the rows of a file `f.parquet`."""
    config = DPODataConfig(**data)
    encoder = DPOEncoder(tokenizer, config)
    table = pa.Table.from_pylist(rows)
    DPOEncoder.check(table.schema, "f.parquet", config)
    table = encoder.whole(table, SimpleNamespace(first=100))  # type: ignore[arg-type]
    return encoder.encode(table, [f"f.parquet, row {row}" for row in range(len(rows))])


def pair(chosen: Any = "7 = 3 + 4", rejected: Any = "3 - 4", **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "chosen": chosen, "rejected": rejected, **more}


# Encoding.


def test_sides_follow_the_prompt_as_generated_and_end_with_the_end_of_turn(tokenizer: Any) -> None:
    table = encode(tokenizer, [pair(), pair("a", "b")])
    assert table.schema == SCHEMA and table["row"].to_pylist() == [100, 101]
    prompt = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True)["input_ids"]
    assert table["prompt_ids"].to_pylist() == [prompt, prompt]
    for side, text in (("chosen", "7 = 3 + 4"), ("rejected", "3 - 4")):
        ids, mask = (np.array(table[f"{side}_{kind}"][0].as_py()) for kind in ("ids", "mask"))
        whole = tokenizer.apply_chat_template([*PROMPT, *said(text)], tokenize=False)
        assert tokenizer.decode([*prompt, *ids]) == whole
        assert tokenizer.decode(ids[mask > 0]) == f"{text}<|im_end|>"


def test_texts_that_spell_special_tokens_are_text(tokenizer: Any) -> None:
    mark, end = "<|im_end|>\n<|im_start|>assistant\n", tokenizer.eos_token_id
    prompt = said(f"x{mark}y", "user")
    rows = [pair(said(f"a{mark}b"), [*said(mark), *said("more", "user"), *said("c")], prompt=prompt)]
    rows.append(pair(said("a"), said("b")))
    for row, (chosen, rejected) in zip(encode(tokenizer, rows).to_pylist(), [(1, 3), (1, 1)], strict=True):
        assert row["prompt_ids"].count(end) == 1
        assert row["chosen_ids"].count(end) == chosen and row["rejected_ids"].count(end) == rejected
    row = encode(tokenizer, rows).to_pylist()[0]
    whole = tokenizer.apply_chat_template([*prompt, *said(f"a{mark}b")], tokenize=False)
    assert tokenizer.decode(row["prompt_ids"] + row["chosen_ids"]) == whole
    learnt = [token for token, on in zip(row["chosen_ids"], row["chosen_mask"], strict=True) if on]
    assert tokenizer.decode(learnt) == f"a{mark}b<|im_end|>"


def test_answers_behind_an_answer_are_no_prompt(tokenizer: Any, named: Named) -> None:
    begun = [*PROMPT, *said("So")]
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, [pair(prompt=begun)])
    named(refused.value, "0 'prompt'")
    # Whole conversations part where an answer begins, not within several messages of it.
    sides = [[*begun, *said(text)] for text in "ab"]
    (row,) = encode(tokenizer, [{"chosen": sides[0], "rejected": sides[1]}]).to_pylist()
    assert tokenizer.decode(row["prompt_ids"]).count("assistant") == 1


def test_text_prompts_whole_conversations_and_several_turns_mean_the_same(tokenizer: Any) -> None:
    wanted = encode(tokenizer, [pair(said("x y"), said("z"))])
    text = {"prompt": PROMPT[0]["content"], "chosen": "x y", "rejected": "z"}
    whole = {"chosen": [*PROMPT, *said("x y")], "rejected": [*PROMPT, *said("z")]}
    assert encode(tokenizer, [text]) == wanted and encode(tokenizer, [whole]) == wanted
    # The sides part after the answer "no": it belongs to the prompt. Where they part at a user's turn, it does not.
    shared = [*PROMPT, *said("no"), *said("Again.", "user")]
    later = {"chosen": [*shared, *said("x")], "rejected": [*shared, *said("z")]}
    prompt = tokenizer.apply_chat_template(shared, add_generation_prompt=True)["input_ids"]
    assert encode(tokenizer, [later])["prompt_ids"][0].as_py() == prompt
    parted = {
        "chosen": [*PROMPT, *said("no"), *said("A", "user"), *said("x")],
        "rejected": [*PROMPT, *said("no"), *said("B", "user"), *said("x")],
    }
    table = encode(tokenizer, [parted])
    assert table["prompt_ids"] == wanted["prompt_ids"]
    ids, mask = (np.array(table[f"chosen_{kind}"][0].as_py()) for kind in ("ids", "mask"))
    assert tokenizer.decode(ids[mask > 0]) == "no<|im_end|>x<|im_end|>"


def test_what_a_template_leaves_out_is_refused_with_side_and_row(tokenizer: Any, named: Named) -> None:
    for side in ("chosen", "rejected"):
        with pytest.raises(ValueError) as refused:
            encode(tokenizer, [pair(said("a"), said("b")) | {side: [said("c")[0] | {"thinking": "hm"}]}])
        named(refused.value, f"f.parquet 0 {side} 1")
    asked = [PROMPT[0], {**said("x")[0], "reasoning": "hm"}, PROMPT[0]]
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, [pair() | {"prompt": asked}])
    named(refused.value, "f.parquet 0 1")


def test_answers_without_their_thinking_are_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, named: Named
) -> None:
    template = tokenizer.chat_template.replace("message['content'] or ''", "message['content'].split('</think>')[-1]")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, [pair(said("a"), said("<think>hm</think>b"))])
    named(refused.value, "f.parquet 0")


def test_json_text_of_messages_is_read(tokenizer: Any) -> None:
    wanted = encode(tokenizer, [pair(said("x"), said("z"))])
    texts = {"prompt": json.dumps(PROMPT), "chosen": json.dumps(said("x")), "rejected": "z"}
    assert encode(tokenizer, [texts]) == wanted


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (pair(None, "b"), "f.parquet, row 0, column 'chosen': the answer is empty"),
        (pair("a", ""), "f.parquet, row 0, column 'rejected': the answer is empty"),
        (pair(said("a"), said("")), "f.parquet, row 0, column 'rejected': the assistant's answer is empty"),
        (pair("a", "a"), "f.parquet, row 0: the columns 'chosen' and 'rejected' are equal"),
        (pair(said("a"), said("b", "user")), "row 0, column 'rejected': the last message is of role 'user'"),
        (pair([*PROMPT, *said("a")], [*PROMPT, *said("b")]), "'chosen': the answer begins with a message of role 'us"),
        (
            {"chosen": said("a"), "rejected": said("b")},
            "row 0: the columns 'chosen' and 'rejected' do not begin with the same",
        ),
        ({"prompt": PROMPT, "chosen": "a"}, "f.parquet has no column 'rejected', but prompt, chosen"),
    ],
)
def test_bad_pairs_are_refused_with_their_place(tokenizer: Any, row: dict[str, Any], sentence: str) -> None:
    rows = [row, pair()] if row.get("chosen", "") is None else [row]
    with pytest.raises(ValueError, match=sentence):
        encode(tokenizer, rows)


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"chosen": None}, "'chosen'"),
        ({"rejected": ""}, "'rejected'"),
        ({"rejected": "7 = 3 + 4"}, "'chosen' 'rejected'"),
        ({"prompt": ""}, "'prompt'"),
        ({"prompt": None}, "'prompt'"),
    ],
)
def test_bad_pairs_are_found_before_anything_starts(
    tmp_path: Path, row: dict[str, Any], keys: str, named: Named
) -> None:
    rows = [{"prompt": f"{number}", "chosen": "7 = 3 + 4", "rejected": "3"} for number in range(9)]
    rows[7] |= row
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "f.parquet", row_group_size=4)
    data = DPODataConfig()
    with pytest.raises(ValueError) as refused:
        DPOEncoder.find_row_groups(str(tmp_path), "data.val_files", data)
    named(refused.value, f"data.val_files f.parquet 7 1 {keys}")


def test_a_column_needs_a_name(tmp_path: Path, named: Named) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "chosen": ["x"], "rejected": ["y"]}), tmp_path / "f.parquet")
    with pytest.raises(ValueError) as refused:
        DPOEncoder.find_row_groups(str(tmp_path), "data.train_files", DPODataConfig(chosen_key=""))
    named(refused.value, "data.chosen_ke")


def test_long_rows_are_refused_cut_or_left_out(tokenizer: Any, named: Named) -> None:
    rows = [pair("1 2 3 4 5 6 7 8 9", "1"), pair("1", "2")]
    full = encode(tokenizer, rows)
    length = len(full["prompt_ids"][0]) + len(full["chosen_ids"][0])
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, rows, max_length=length - 2)
    named(refused.value, f"0 {length}")
    left = encode(tokenizer, rows, max_length=length - 2, truncation="left")
    assert left["prompt_ids"][0].as_py() == full["prompt_ids"][0].as_py()[2:]
    assert left["chosen_ids"] == full["chosen_ids"] and left["prompt_ids"][1] == full["prompt_ids"][1]
    dropped = encode(tokenizer, rows, max_length=length - 2, truncation="drop")
    assert [len(dropped[f"{name}_ids"][0]) for name in ("prompt", "chosen", "rejected")] == [0, 0, 0]
    assert dropped.slice(1) == full.slice(1)
    with pytest.raises(ValueError) as refused:
        encode(tokenizer, rows, max_length=4, truncation="left")
    named(refused.value, "0")


# The update.


def rows_of(count: int = 7, seed: int = 0) -> pa.Table:
    """Rows of random tokens."""
    random = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return random.integers(5, 300, random.integers(low, high)).tolist()

    rows = []
    for number in range(count):
        row: dict[str, Any] = {"row": number, "prompt_ids": tokens(1, 12)}
        for side in ("chosen", "rejected"):
            ids = tokens(1, 9)
            mask = (random.random(len(ids)) < 0.8).astype(int)
            mask[-1] = 1
            row |= {f"{side}_ids": ids, f"{side}_mask": mask.tolist()}
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def worker(folder: Path, tables: list[pa.Table], rank: int = 0, world: int = 1, **changes: Any) -> DPOLoop:
    """One rank of a run over `tables`, one per step; `changes` are settings of loss, data, trainer or model."""
    config = DPOConfig(out=str(folder.parent / "out"))
    config.model.path, config.data.train_batch_size, config.optim.lr = str(folder), len(tables[0]) * world, 1e-2
    config.loss.beta = 0.3
    for name, value in changes.items():
        section = next(part for part in (config.loss, config.data, config.trainer, config.model) if hasattr(part, name))
        setattr(section, name, value)
    shard = SimpleNamespace(iter_batches=lambda **_: iter(tables))
    progress = SimpleNamespace(post=SimpleNamespace(remote=lambda event: None))
    context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: world)
    with (
        patch.object(ray.train, "get_context", return_value=context),
        patch.object(ray.train, "get_dataset_shard", return_value=shard),
        patch.object(ray.train.torch, "get_device", return_value=torch.device("cpu")),
    ):
        return DPOLoop(WorkerSettings(DPOLoop, config, len(tables), [], progress))


def shifted(loop: DPOLoop, amount: float = 0.05) -> None:
    """Move the policy away from the reference, the same way on any number of ranks."""
    state = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in loop.model.parameters():
            noise = torch.randn(parameter.shape, generator=state) * amount
            parameter.copy_(torch.distributed.tensor.distribute_tensor(noise, parameter.device_mesh) + parameter)


def plain_sums(lm: Any, rows: pa.Table, side: str) -> list[Tensor | None]:
    """Sum of the log-probs of one side's learnt tokens, one conversation at a time, by the model itself."""
    sums: list[Tensor | None] = []
    for row in rows.to_pylist():
        ids, prompt = row["prompt_ids"] + row[f"{side}_ids"], len(row["prompt_ids"])
        if not row[f"{side}_ids"]:
            sums.append(None)
            continue
        log_probs = lm(input_ids=torch.tensor(ids)[None]).logits[0].log_softmax(-1)
        chosen = log_probs[torch.arange(prompt - 1, len(ids) - 1), torch.tensor(ids[prompt:])]
        sums.append((chosen * torch.tensor(row[f"{side}_mask"])).sum())
    return sums


def plain_loss(folder: Path, state: dict[str, Tensor], rows: pa.Table, name: str) -> tuple[Any, Tensor]:
    """The model with gradients of the loss, and the loss, from their formulas."""
    lm, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    lm.load_state_dict({key.removeprefix("lm."): value for key, value in state.items()}, strict=False)
    lm.tie_weights()
    ratios, sums = {}, {}
    for side in ("chosen", "rejected"):
        with torch.no_grad():
            before = plain_sums(reference, rows, side)
        sums[side] = plain_sums(lm, rows, side)
        ratios[side] = [a - b for a, b in zip(sums[side], before, strict=True) if a is not None and b is not None]
    tokens = {side: torch.tensor([sum(mask) for mask in rows[f"{side}_mask"].to_pylist() if mask]) for side in ratios}
    chosen, rejected = torch.stack(ratios["chosen"]), torch.stack(ratios["rejected"])
    beta = 0.3
    if name == "ipo":
        loss = ((chosen / tokens["chosen"] - rejected / tokens["rejected"] - 1 / (2 * beta)) ** 2).mean()
    else:
        loss = -logsigmoid(beta * (chosen - rejected)).mean()
    loss.backward()
    return lm, loss.detach()


def assert_gradients(loop: DPOLoop, lm: Any) -> None:
    wanted = dict(lm.named_parameters())
    for name, parameter in loop.model.named_parameters():
        grad = wanted[name.removeprefix("lm.")].grad
        torch.testing.assert_close(parameter.grad.full_tensor(), grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("share", ["never", "always"])
@pytest.mark.parametrize("budget", [42, 60, 4096])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_loss_and_gradient_are_those_of_plain_torch(tiny_model: Path, loss: str, budget: int, share: str) -> None:
    rows = rows_of()
    loop = worker(tiny_model, [rows], type=loss, max_token_len_per_gpu=budget, grad_clip=1e9, share_prompts=share)
    loop.keep_reference()
    shifted(loop)
    parts = len(loop.micro_batches(loop.lengths(rows)))
    assert parts > 1 if budget < 4096 else parts == 1
    with patch.object(loop.optimizer, "step"):
        metrics = loop.step(rows)
    lm, wanted = plain_loss(tiny_model, full_state_dict(loop.model), rows, loss)
    assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-5) and metrics["dropped"] == 0
    assert_gradients(loop, lm)


@pytest.mark.usefixtures("one_rank")
def test_metrics_are_those_of_the_answers(tiny_model: Path) -> None:
    rows = rows_of()
    loop = worker(tiny_model, [rows], max_token_len_per_gpu=60)
    loop.keep_reference()
    reference = loop.reference
    start = loop._with_reference(rows, reference)
    metrics = loop.validate(start)
    assert metrics["rewards/margins"] == 0 and metrics["rewards/accuracies"] == 0.5
    assert metrics["logps/chosen"] == pytest.approx(reference[:, 0].mean(), rel=1e-6)
    assert metrics["logps/rejected"] == pytest.approx(reference[:, 1].mean(), rel=1e-6)
    shifted(loop)
    after, moved = loop.validate(start), loop.score(rows) - reference
    for number, side in enumerate(("chosen", "rejected")):
        assert after[f"rewards/{side}"] == pytest.approx(0.3 * moved[:, number].mean(), rel=1e-4)
    assert after["rewards/margins"] == pytest.approx(0.3 * (moved[:, 0] - moved[:, 1]).mean(), rel=1e-4)
    assert after["rewards/accuracies"] == pytest.approx((moved[:, 0] > moved[:, 1]).mean())


@pytest.mark.usefixtures("one_rank")
def test_the_reference_stays_the_start_model_over_epochs(tiny_model: Path) -> None:
    rows = rows_of(6)
    order = [4, 0, 5, 2, 1, 3]
    loop = worker(tiny_model, [rows.slice(0, 3), rows.slice(3), rows.slice(0, 3)])  # row 0 to 2 come twice
    loop.keep_reference()
    assert loop.reference.shape == (6, 2)
    np.testing.assert_allclose(loop.reference, loop.score(rows), rtol=1e-6)
    kept = loop.reference.copy()
    for start in (0, 3, 0):
        loop.step(rows.take(order[start : start + 3]))
    assert np.array_equal(loop.reference, kept) and not np.allclose(loop.score(rows), kept, rtol=1e-3)
    with pytest.raises(RuntimeError, match="a row came that the first pass did not have"):
        loop.step(rows.set_column(0, "row", pa.array(np.arange(6) + 3)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_rows_left_out_are_counted_and_change_nothing(tiny_model: Path, loss: str) -> None:
    rows = rows_of()
    names = [name for name in rows.column_names if name != "row"]
    lines = rows.to_pylist()
    for number in (2, 5):
        lines[number] |= {name: [] for name in names}
    some = pa.Table.from_pylist(lines, schema=rows.schema)
    none = pa.Table.from_pylist([line | {name: [] for name in names} for line in lines], schema=rows.schema)
    loop = worker(tiny_model, [some], type=loss, grad_clip=1e9)
    loop.keep_reference()
    shifted(loop)
    with patch.object(loop.optimizer, "step"):
        metrics = loop.step(some)
    kept = pa.Table.from_pylist([line for line in lines if line["prompt_ids"]], schema=rows.schema)
    lm, wanted = plain_loss(tiny_model, full_state_dict(loop.model), kept, loss)
    assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-5) and metrics["dropped"] == 2
    assert_gradients(loop, lm)
    before = full_state_dict(loop.model)
    assert loop.step(none) == {"dropped": 9, "grad_norm": 0}
    for name, value in full_state_dict(loop.model).items():
        assert torch.equal(value, before[name])


def _on_ranks(rank: int, folder: str, model: str) -> None:
    for world in worlds(rank, folder):
        for loss in ("sigmoid", "ipo"):
            table = rows_of(8)
            # Each rank's block; the second batch has the same rows in another order, on other ranks.
            blocks = [table.slice(8 // world * rank, 8 // world), table.take([5, 0, 7, 2, 1, 3, 4, 6])]
            blocks[1] = blocks[1].slice(8 // world * rank, 8 // world)
            loop = worker(Path(model), blocks[:1], rank, world, type=loss, max_token_len_per_gpu=60)
            loop.config.optim.eps = 1e-2
            loop.optimizer.param_groups[0]["eps"] = loop.optimizer.param_groups[1]["eps"] = 1e-2
            loop.keep_reference()
            shifted(loop)
            metrics = [loop.step(block) for block in blocks]
            state = full_state_dict(loop.model)
            if rank == 0:
                torch.save((metrics, state, loop.reference), f"{folder}/{world}-{loss}.pt")
            dist.barrier()


@pytest.mark.slow
def test_two_ranks_give_the_same_steps_as_one(tmp_path: Path, tiny_model: Path) -> None:
    spawn(_on_ranks, str(tmp_path), str(tiny_model))
    for loss in ("sigmoid", "ipo"):
        one, two = (torch.load(tmp_path / f"{world}-{loss}.pt", weights_only=False) for world in (1, 2))
        np.testing.assert_allclose(one[2], two[2], rtol=1e-5)
        for a, b in zip(one[0], two[0], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
        for name, value in one[1].items():
            torch.testing.assert_close(value, two[1][name], rtol=1e-4, atol=1e-6)
