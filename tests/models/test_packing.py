import itertools
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.models.batch import TrainBatch
from pipeline.models.micro_batches import minimum_parts, split_micro_batches
from pipeline.models.packing import collate
from pipeline.rows import ADVANTAGE, PROMPT, ROLLOUT

COLUMNS = ("uid", "sample", "prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "advantages", "returns")
SCHEMA = pa.schema([field for field in (*PROMPT, *ROLLOUT, *ADVANTAGE) if field.name in COLUMNS])


def table(rows: list[tuple[list[int], list[int]]], **changes) -> pa.Table:
    """Rows of (prompt, response); the other columns are numbers that tell row and token."""
    made = []
    for i, (prompt, response) in enumerate(rows):
        marks = [i + t / 100 for t in range(len(response))]
        row = {
            "uid": f"u{i}",
            "sample": 0,
            "prompt_ids": prompt,
            "response_ids": response,
            "response_mask": [int(t % 3 != 1) for t in range(len(response))],
            "rollout_log_probs": [-m for m in marks],
            "advantages": [10 + m for m in marks],
            "returns": [20 + m for m in marks],
        }
        made.append(row | {name: values[i] for name, values in changes.items()})
    return pa.Table.from_pylist(made, schema=SCHEMA)


ROWS = [([1, 2], [3, 0, 5]), ([6], []), ([7, 8, 9], [4])]


def test_collate_by_hand():
    rows = TrainBatch.from_table(table(ROWS))
    padded = collate(rows, [[2], [0]], pad_token_id=99)
    assert padded.input_ids.tolist() == [[7, 8, 9, 99], [1, 2, 3, 0]]
    assert padded.logit_index.tolist() == [2, 5, 7] and padded.packing is None
    batch = collate(rows, [[2], [0]], pad_token_id=99, packed=True)
    assert batch.input_ids.tolist() == [[7, 8, 9, 1, 2, 3, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert batch.lengths.tolist() == [3, 4]
    # The second token of the first row does not train, and nothing predicts it.
    assert batch.logit_index.tolist() == [2, 4, 6]
    assert batch.targets.tolist() == [4, 3, 5]
    assert batch.row_index.tolist() == [0, 1, 1]
    assert batch.loss_mask.tolist() == [1, 1, 1]
    assert batch.advantages.tolist() == pytest.approx([12, 10, 10.02])
    assert batch.returns.tolist() == pytest.approx([22, 20, 20.02])
    assert batch.rollout_log_probs.tolist() == pytest.approx([-2, 0, -0.02])
    assert batch.token_index.tolist() == [3, 0, 2]
    assert batch.sequences == 2
    assert batch.loss_mask.dtype == torch.float32 and batch.input_ids.dtype == torch.int64


def test_random_keys_belong_to_the_token_wherever_it_is():
    rows, part = TrainBatch.from_table(table(ROWS)), TrainBatch.from_table(table(ROWS).slice(2))
    assert rows.trained_tokens([2, 0]).tolist() == [3, 0, 2]  # the middle token of row 0 is masked
    keys = rows.random_keys([2, 0], seed=1, step=5)
    assert len(keys) == len(set(keys)) == 3 and ((keys >= 0) & (keys < 1)).all()
    assert rows.random_keys([0], 1, 5).tolist() == keys[1:].tolist()
    # A table of row 2 alone; its uid tells it.
    assert part.random_keys([0], 1, 5).tolist() == TrainBatch.from_table(table(ROWS)).random_keys([2], 1, 5).tolist()
    assert rows.random_keys([2, 0], 1, 6).tolist() != keys.tolist() != rows.random_keys([2, 0], 2, 5).tolist()
    assert rows.random_keys([1], 1, 5).tolist() == [] == rows.trained_tokens([]).tolist()


def test_empty_responses_and_the_dummy():
    rows = TrainBatch.from_table(table(ROWS))
    alone = collate(rows, [[1]])
    assert alone.input_ids.tolist() == [[6]] and alone.logit_index.numel() == 0
    assert collate(rows, [[1], [0]]).row_index.tolist() == [1, 1]
    assert collate(rows, [[1], [0]], packed=True).input_ids.tolist() == [[6, 1, 2, 3, 0]]
    dummy = collate(rows, [], pad_token_id=7)
    packed = collate(rows, [], pad_token_id=7, packed=True)
    assert packed.input_ids.tolist() == [[7]] and packed.positions.tolist() == [[0]] and packed.packing is not None
    assert dummy.input_ids.tolist() == [[7]] and dummy.lengths.tolist() == [1] and dummy.logit_index.numel() == 0
    # A layer runs forward and backward on it and gets an exact zero gradient.
    layer = torch.nn.Embedding(10, 4)
    layer(dummy.input_ids).flatten(0, 1)[dummy.logit_index].sum().backward()
    assert layer.weight.grad.abs().sum() == 0


ragged_rows = st.lists(
    st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.lists(st.integers(0, 50), max_size=8)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=50)
@given(ragged_rows, st.integers(13, 60), st.randoms(use_true_random=False))
def test_order_split_and_padding_keep_what_each_token_computes(made, budget, random):
    """A small causal model gives every token the same number however its row is batched."""
    rows = TrainBatch.from_table(table(made))
    torch.manual_seed(0)
    embed = torch.randn(51, 3, dtype=torch.float64)

    def per_token(batches: list[list[int]], pad: int) -> np.ndarray:
        out = np.full(len(rows.mask), np.nan)
        for index in batches:
            batch = collate(rows, [[i] for i in index], pad)
            hidden = embed[batch.input_ids].cumsum(dim=1).flatten(0, 1)  # position t sees positions up to t
            out[batch.token_index] = (hidden[batch.logit_index] * embed[batch.targets]).sum(-1) + batch.advantages
        return out

    expected = per_token([[row] for row in range(len(made))], pad=0)
    shuffled = list(range(len(made)))
    random.shuffle(shuffled)
    assert np.allclose(per_token([shuffled], pad=50), expected, equal_nan=True)
    assert np.allclose(per_token(split_micro_batches(rows.lengths, budget), pad=3), expected, equal_nan=True)
    assert np.array_equal(np.isfinite(expected), rows.mask > 0)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 40), max_size=25), st.integers(40, 120), st.integers(0, 30))
def test_split_keeps_its_promises(lengths, budget, extra):
    fewest = minimum_parts(lengths, budget)
    parts = fewest + extra
    batches = split_micro_batches(lengths, budget, parts)
    assert len(batches) == parts
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[row] for row in batch) <= budget for batch in batches if batch)
    assert sum(bool(batch) for batch in batches) == min(parts, len(lengths))
    assert batches == split_micro_batches(list(lengths), budget, parts)
    assert len(split_micro_batches(lengths, budget)) == fewest


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(9, 30))
def test_minimum_is_the_minimum(lengths, budget):
    """Against every assignment of rows to batches."""
    fewest = minimum_parts(lengths, budget)
    assume(fewest > 1)
    for assignment in itertools.product(range(fewest - 1), repeat=len(lengths)):
        groups = [[n for n, a in zip(lengths, assignment, strict=True) if a == g] for g in range(fewest - 1)]
        assert any(len(group) * max(group) > budget for group in groups if group)


def test_split_by_hand():
    assert split_micro_batches([5, 1, 1, 1, 9, 2], 10) == [[4], [0], [5, 1, 2, 3]]
    assert split_micro_batches([4, 4, 4, 4], 16, 2) == [[0, 1], [2, 3]]  # balanced, not 16 and 0
    assert split_micro_batches([3, 3], 10, 4) == [[0], [1], [], []]
    assert split_micro_batches([], 10) == [] and split_micro_batches([], 10, 2) == [[], []]
    assert split_micro_batches([10, 1, 1, 1], 10, 3) == [[0], [1], [2, 3]]


@settings(max_examples=200)
@given(st.lists(st.integers(1, 40), max_size=25), st.integers(40, 120), st.integers(0, 30))
def test_packed_split_keeps_its_promises(lengths, budget, extra):
    fewest = minimum_parts(lengths, budget, packed=True)
    assert -(-sum(lengths) // budget) <= fewest <= minimum_parts(lengths, budget)
    batches = split_micro_batches(lengths, budget, fewest + extra, packed=True)
    assert len(batches) == fewest + extra
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    sizes = [sum(lengths[row] for row in batch) for batch in batches]
    assert all(size <= budget for size in sizes) and sizes == sorted(sizes, reverse=True)
    assert sum(map(bool, batches)) == min(fewest + extra, len(lengths))
    assert batches == split_micro_batches(list(lengths), budget, fewest + extra, packed=True)
    assert len(split_micro_batches(lengths, budget, packed=True)) == fewest


@pytest.mark.parametrize("packs", [[[2], [0]], [[1]], []])
def test_ranks_have_equal_shares_of_the_positions_and_each_prediction_once(packs):
    """Pad tokens fill the last share, and are a context of their own, so that every position attends to something."""
    rows, ranks = TrainBatch.from_table(table(ROWS)), 4
    whole = collate(rows, packs, packed=True)
    predicted = []
    for rank in range(ranks):
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        batch = collate(rows, packs, packed=True, sequence=group)
        count = batch.input_ids.shape[1]
        assert count % ranks == 0 and 0 <= count - whole.input_ids.shape[1] < ranks
        assert batch.input_ids[0, : whole.input_ids.shape[1]].tolist() == whole.input_ids[0].tolist()
        assert batch.logit_index.tolist() == whole.logit_index.tolist()
        assert batch.packing.query_ends[-1] == batch.packing.key_ends[-1] == count
        assert sorted(batch.packing.answers.tolist()) == sorted(set(batch.packing.answers.tolist()))
        share = batch.packing.share
        assert share.cut(batch.input_ids).shape == (1, count // ranks)
        assert all(rank * count // ranks <= at < (rank + 1) * count // ranks for at in batch.logit_index[share.own])
        predicted += share.own.tolist()
    assert sorted(predicted) == list(range(len(whole.logit_index)))


def test_packed_split_by_hand():
    assert minimum_parts([5, 1, 1, 1, 9, 2], 10, packed=True) == 2  # 9 + 1, 5 + 2 + 1 + 1; padded it takes three
    assert split_micro_batches([5, 1, 1, 1, 9, 2], 10, packed=True) == [[3, 4], [0, 1, 2, 5]]
    assert split_micro_batches([4, 4, 4, 4], 16, 2, packed=True) == [[0, 2], [1, 3]]
    assert split_micro_batches([3, 3], 10, 4, packed=True) == [[0], [1], [], []]
    assert split_micro_batches([], 10, 2, packed=True) == [[], []]
    # Each where there is most room: 5 + 4, 5 + 3, and the last one fits in neither. First fit has it.
    assert split_micro_batches([5, 5, 4, 3, 3], 10, packed=True) == [[0, 1], [2, 3, 4]]
    assert split_micro_batches([4, 1, 2, 5, 1, 3], 16, 2, [2, 1, 3], packed=True) == [[3, 4, 5], [0, 1, 2]]


def test_sentences():
    with pytest.raises(ValueError, match=r"row 1 has 30 tokens .* 10 more than the 20 .* to at least 30$"):
        split_micro_batches([5, 30], 20, packed=True)
    with pytest.raises(
        ValueError, match=r"a row has 3 contexts .* together, with 25 tokens .* to at least 25, or choose"
    ):
        minimum_parts([5, 9, 9, 7], 20, [1, 3], packed=True)
    with pytest.raises(ValueError, match=r"row 1 has 30 tokens .* 10 more than the 20 .*ppo_max_token_len_per_gpu"):
        split_micro_batches([5, 30], 20)
    with pytest.raises(ValueError, match=r"ppo_max_token_len_per_gpu to at least 30"):
        minimum_parts([5, 30], 20)
    with pytest.raises(ValueError, match="at least 2 micro-batches, but 1"):
        split_micro_batches([20, 20], 20, 1)
    with pytest.raises(ValueError, match="row of uid u2 has 2 entries in 'advantages' but 1 response tokens"):
        TrainBatch.from_table(table(ROWS, advantages=[[1, 2, 3], [], [1, 2]]))
    with pytest.raises(ValueError, match=r"row 0 \(uid u0\) has an advantage that is not a finite"):
        TrainBatch.from_table(table(ROWS, advantages=[[1, 2, float("nan")], [], [1]]))
    with pytest.raises(ValueError, match=r"row 1 \(uid u1\) has an empty prompt"):
        TrainBatch.from_table(table([([1], []), ([], [2])]))
    with pytest.raises(ValueError, match="'response_ids' is null in row 1"):
        TrainBatch.from_table(table(ROWS, response_ids=[[3, 0, 5], None, [4]]))
