"""Rows of several contexts become sequences: what the model sees, what stays one row, and what is refused."""

from itertools import accumulate, chain
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.batch import TokenBatch, TrainBatch
from pipeline.models.micro_batches import minimum_parts, split_micro_batches
from pipeline.models.packing import collate, pack
from pipeline.models.policy import Policy
from pipeline.models.sharing import enable, pack_rows
from pipeline.rows import CONTEXTS, prompt_tokens
from pipeline.track.performance import sequence_balance
from tests.models.test_packing import ROWS, table
from tests.models.test_policy import build

Context = tuple[list[int], list[int]]

tokens = st.lists(st.integers(0, 50), min_size=1, max_size=5)
row_of_contexts = st.lists(st.tuples(tokens, st.lists(st.integers(0, 50), max_size=6)), min_size=1, max_size=4)
many_rows = st.lists(row_of_contexts, min_size=1, max_size=6)


def listed(contexts: list[Context]) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt if place else None, "tokens": len(answer)} for place, (prompt, answer) in enumerate(contexts)
    ]


def episodes(rows: list[list[Context]], column: list[Any] | None = None) -> pa.Table:
    """Rows of these contexts (prompt, response tokens); rows of one context have an empty list or null."""
    made = table([(row[0][0], list(chain(*(answer for _, answer in row)))) for row in rows])
    if column is None:
        column = [listed(row) if len(row) > 1 else [None, []][number % 2] for number, row in enumerate(rows)]
    return made.append_column("contexts", pa.array(column, CONTEXTS))


THREE: list[Context] = [([1, 2], [3, 4]), ([5], [6]), ([7, 8, 9], [10, 11, 12])]
TWO: list[Context] = [([1, 2], []), ([9], [13])]


def test_layout_by_hand() -> None:
    rows = TrainBatch.from_table(episodes([THREE, [([1, 2], [20])], TWO]))
    assert len(rows) == 3 and rows.context_offsets.tolist() == [0, 3, 4, 6]
    assert rows.prompt_ids.tolist() == [1, 2, 5, 7, 8, 9, 1, 2, 1, 2, 9]
    assert rows.prompt_offsets.tolist() == [0, 2, 3, 6, 8, 10, 11]
    assert rows.response_offsets.tolist() == [0, 2, 3, 6, 7, 7, 8] and rows.row_offsets.tolist() == [0, 6, 7, 8]
    assert rows.lengths == [4, 2, 6, 3, 2, 2]

    batch = pack(rows, [[4], [5], [0], [1], [2]])
    assert batch.input_ids.tolist() == [
        [1, 2, 0, 0, 0],
        [9, 0, 0, 0, 0],
        [1, 2, 3, 0, 0],
        [5, 0, 0, 0, 0],
        [7, 8, 9, 10, 11],
    ]
    assert batch.targets.tolist() == [13, 3, 4, 6, 10, 11, 12]
    assert batch.logit_index.tolist() == [5, 11, 12, 15, 22, 23, 24]
    assert batch.row_index.tolist() == [0, 1, 1, 1, 1, 1, 1] and batch.sequences == 2
    assert batch.token_index.tolist() == [7, 0, 1, 2, 3, 4, 5]
    assert batch.positions is None
    packed = pack(rows, [[4], [5], [0], [1], [2]], packed=True)
    assert packed.input_ids.tolist() == [[1, 2, 9, 1, 2, 3, 5, 7, 8, 9, 10, 11]]
    assert packed.logit_index.tolist() == [2, 4, 5, 6, 9, 10, 11]
    for name in ("targets", "row_index", "token_index"):
        assert getattr(packed, name).tolist() == getattr(batch, name).tolist(), name

    # Of the tokens that the mask leaves out, which are the second and the fifth of each row, nothing is predicted.
    trained = collate(rows, [[4], [5], [0], [1], [2]])
    assert trained.input_ids.equal(batch.input_ids)
    for name in ("targets", "logit_index", "row_index", "token_index"):
        assert getattr(trained, name).tolist() == getattr(batch, name)[[0, 1, 3, 4, 6]].tolist(), name


def test_numbers_of_rows_are_those_of_whole_responses() -> None:
    """Counts, choices and random keys do not see where a context ends."""
    cut, whole = (
        TrainBatch.from_table(episodes([THREE, TWO])),
        TrainBatch.from_table(episodes([THREE, TWO], [None] * 2)),
    )
    assert cut.mask_counts([0, 1]) == whole.mask_counts([0, 1]) == (5, 2)
    assert cut.trained_tokens([1, 0]).tolist() == whole.trained_tokens([1, 0]).tolist() == [6, 0, 2, 3, 5]
    assert cut.random_keys([1, 0], 1, 5).tolist() == whole.random_keys([1, 0], 1, 5).tolist()
    cut.advantages[:6] = 0
    assert cut.with_advantages([0, 1]) == [1]


@settings(max_examples=60)
@given(many_rows, st.integers(0, 5), st.integers(0, 5))
def test_contexts_are_as_good_as_rows_of_their_own(rows: list[list[Context]], first: int, cut: int) -> None:
    whole = episodes(rows)
    sliced = pa.concat_tables([whole.slice(0, cut), whole.slice(cut)]).slice(first)
    alone = table(list(chain(*rows[first:])))
    got, wanted = TokenBatch.from_table(sliced), TokenBatch.from_table(alone)
    for name in ("prompt_ids", "prompt_offsets", "response_ids", "response_offsets"):
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name), err_msg=name)
    assert np.diff(got.context_offsets).tolist() == [len(row) for row in rows[first:]]
    assert prompt_tokens(sliced) == len(got.prompt_ids)
    seqlen = sequence_balance(sliced)["global_seqlen/mean"].values
    assert seqlen == (len(got.prompt_ids) + len(got.response_ids), 1)


@pytest.mark.parametrize(
    "column", [[None] * 3, [[]] * 3, [None, [], None], [[{"prompt": None, "tokens": 3}], [], None]]
)
def test_rows_of_one_context_are_those_without_the_column(column: list[Any]) -> None:
    rows = table(ROWS)
    cut = TrainBatch.from_table(rows.append_column("contexts", pa.array(column, CONTEXTS)))
    for name, value in vars(TrainBatch.from_table(rows)).items():
        np.testing.assert_array_equal(getattr(cut, name), value, err_msg=name)


def test_joined_parts_are_the_whole() -> None:
    rows = episodes([THREE, [([1, 2], [20])], TWO, THREE])
    whole = TrainBatch.from_table(rows)
    joined = TrainBatch.concat([TrainBatch.from_table(rows.slice(0, 3)), TrainBatch.from_table(rows.slice(3))])
    for name, value in vars(joined).items():
        np.testing.assert_array_equal(value, getattr(whole, name), err_msg=name)


# packs and micro-batches


def test_packs_share_prompts_of_rows_that_are_one_context_or_may_be_split() -> None:
    group = [[([1, 2, 3, 4, 5, 6], [10 + n])] for n in range(2)]
    cut = [[([1, 2, 3, 4, 5, 6], [20 + n]), ([7 + n], [30 + n])] for n in range(2)]
    rows = TokenBatch.from_table(episodes([group[0], cut[0], group[1], cut[1]]))
    assert pack_rows(rows, [0, 1, 2, 3], 99, True, whole=True) == ([[0, 3], [1], [2], [4], [5]], [1, 2, 2])
    assert pack_rows(rows, [0, 1, 2, 3], 99, True, whole=False) == ([[0, 1, 3, 4], [2], [5]], None)
    assert pack_rows(rows, [3, 2], 99, False, whole=True) == ([[3], [4], [5]], [1, 2])
    assert pack_rows(rows, [], 99, False, whole=True) == ([], [])
    shared = pack(rows, [[0, 1, 3, 4], [2], [5]], packed=True)
    assert shared.row_index.tolist() == [0, 1, 2, 3, 4, 5]  # pieces of rows
    # Of rows without contexts the packs are those of before, in the same order.
    plain = TokenBatch.from_table(episodes(group))
    for whole in (True, False):
        assert pack_rows(plain, [1, 0], 99, True, whole) == ([[1, 0]], None)


unit_lengths = st.lists(st.lists(st.integers(1, 10), min_size=1, max_size=4), max_size=12)


@settings(max_examples=200)
@given(unit_lengths, st.integers(40, 120), st.integers(0, 15), st.booleans())
def test_units_stay_together_and_in_order(lengths: list[list[int]], budget: int, extra: int, packed: bool) -> None:
    flat, sizes = list(chain(*lengths)), list(map(len, lengths))
    fewest = minimum_parts(flat, budget, sizes, packed)
    batches = split_micro_batches(flat, budget, fewest + extra, sizes, packed)
    assert len(batches) == fewest + extra
    assert len(split_micro_batches(flat, budget, None, sizes, packed)) == fewest
    assert sorted(chain(*batches)) == list(range(len(flat)))
    for batch in filter(None, batches):
        tokens = [flat[i] for i in batch]
        assert (sum(tokens) if packed else len(batch) * max(tokens)) <= budget
    assert sum(bool(batch) for batch in batches) == min(fewest + extra, len(sizes))
    for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        (home,) = [batch for batch in batches if start in batch]
        place = home.index(start)
        assert home[place : place + size] == list(range(start, start + size))
    ones = [1] * len(flat)
    assert split_micro_batches(flat, budget, None, ones, packed) == split_micro_batches(flat, budget, packed=packed)


def test_units_by_hand() -> None:
    # 3 x 5 and 2 x 4 do not fit into 20 together (5 x 5), nor with the single one in between.
    assert split_micro_batches([4, 1, 2, 5, 1, 3], 20, None, [2, 1, 3]) == [[3, 4, 5], [0, 1, 2]]
    assert split_micro_batches([2, 2, 2, 2], 100, 3, [2, 2]) == [[0, 1], [2, 3], []]
    message = r"3 contexts of up to 5 tokens .* 3 x 5 = 15 tokens, more than the 14 .* to at least 15, or choose"
    with pytest.raises(ValueError, match=message):
        minimum_parts([9, 4, 5, 1], 14, [1, 3])


# numbers


def test_log_probs_are_those_of_each_context_alone() -> None:
    torch.manual_seed(0)
    policy: Any = Policy(build("qwen2-tied").lm)
    rows = TokenBatch.from_table(episodes([THREE, [([1, 2], [20])], TWO]))
    assert enable(policy.decoder) is None
    together, _ = pack_rows(rows, [0, 1, 2], 99, True, whole=False)
    for packs in ([[0], [1], [2], [3], [4], [5]], together, [[5], [2], [4], [0], [3], [1]]):
        batch = pack(rows, packs, packed=True)
        found, *_ = policy(
            batch.input_ids, batch.logit_index, batch.targets, positions=batch.positions, packing=batch.packing
        )
        given_ = dict(zip(batch.token_index.tolist(), found.tolist(), strict=True))
        place = 0
        for prompt, answer in [*THREE, ([1, 2], [20]), *TWO]:
            logits = policy.lm(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            for at, token in enumerate(answer, len(prompt) - 1):
                assert given_[place] == pytest.approx(logits[at, token].item(), abs=1e-5)
                place += 1
        assert place == len(given_) == len(rows.response_ids)


# refusals


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            [[(None, 2), ([5], 3)]],
            r"row 0 \(uid u0\) has 6 response tokens, but 5 in its 2 contexts; every token must",
        ),
        ([[([1, 2], 5), ([5], 1)]], r"row 0 \(uid u0\), context 1 of 2: it has a prompt of its own; .* `prompt_ids`"),
        ([[(None, 3), ([5], 1), ([], 2)]], r"context 3 of 3: it has no prompt"),
        ([[(None, 6), (None, 0)]], r"context 2 of 2: it has no prompt"),
        ([[(None, 7), ([5], -1)]], r"context 2 of 2: it has -1 response tokens; their number is at least 0"),
        ([[(None, 6), ([5], None)]], r"context 2 of 2: it has -1 response tokens; .* null is none"),
        ([[(None, 0)]], r"has 6 response tokens, but 0 in its 1 contexts"),
    ],
)
def test_what_cannot_be_is_refused(column: list[Any], message: str) -> None:
    lists = [[{"prompt": prompt, "tokens": count} for prompt, count in row] for row in column]
    with pytest.raises(ValueError, match=message):
        TokenBatch.from_table(episodes([THREE], lists))
    # The row's number is that of the table.
    behind = episodes([TWO, THREE], [listed(TWO), lists[0]])
    with pytest.raises(ValueError, match=message.replace("row 0", "row 1").replace("u0", "u1")):
        TokenBatch.from_table(behind)


def test_an_empty_first_prompt_is_refused_where_tokens_stand_behind_it() -> None:
    assert len(TokenBatch.from_table(episodes([[([], []), ([9], [13])]]))) == 1
    with pytest.raises(ValueError, match=r"row 1 \(uid u1\) has an empty prompt"):
        TokenBatch.from_table(episodes([TWO, [([], [1]), ([9], [13])]]))
