"""Log-probs within the part of the vocabulary that the engine sampled from."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.models.batch import TokenBatch, TrainBatch
from pipeline.models.head import LogitRule, token_log_probs
from pipeline.models.packing import pack
from pipeline.models.support import Support, SupportWriter
from pipeline.rows import FLOATS, INTS, UNKNOWN

V = 11
KEPT = [[1, 4, 7], None, [2], list(range(V)), [0, 1, 2, 3, 4, 5, 6, 7, 8], None]
"""The support of each of six tokens; None is the whole vocabulary."""
TARGETS = [4, 9, 2, 10, 8, 0]


def columns(kept: list[list[int] | None] = KEPT, most: int = 100) -> tuple[np.ndarray, np.ndarray]:
    writer = SupportWriter(V, most)
    for ids in kept:
        writer.whole() if ids is None else writer.inside(np.array(ids[::-1]))
    made = writer.columns()
    assert made is not None
    return made


def support(kept: list[list[int] | None] = KEPT) -> Support:
    ids, sizes = columns(kept)
    rows = TokenBatch.of([[0]], [[0] * len(kept)])
    rows.support_ids, rows.support_sizes = ids, sizes
    made = rows.supports(np.arange(len(kept)))
    assert made is not None
    return made


def test_the_shorter_side_is_written() -> None:
    ids, sizes = columns()
    assert sizes.tolist() == [3, 0, 1, 0, -2, 0]
    assert ids.tolist() == [1, 4, 7, 2, 9, 10]
    writer = SupportWriter(V, 100)
    writer.outside(np.array([7, 1]))
    writer.outside(np.arange(9))
    made = writer.columns()
    assert made is not None
    assert (made[0].tolist(), made[1].tolist()) == ([1, 7, 9, 10], [-2, 2])


def test_a_support_above_the_limit_is_unknown() -> None:
    ids, sizes = columns(most=2)
    assert sizes.tolist() == [UNKNOWN, 0, 1, 0, -2, 0]
    assert ids.tolist() == [2, 9, 10]


def test_nothing_is_written_if_every_token_could_be_sampled() -> None:
    writer = SupportWriter(V, 4)
    writer.whole()
    writer.inside(np.arange(V))
    assert writer.columns() is None


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_renormalised_log_probs_are_those_of_the_masked_softmax(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(6, 4, generator=generator), torch.randn(V, 4, generator=generator) * scale
    given = torch.randn(6, generator=generator)
    mask = torch.zeros(6, V, dtype=torch.bool)
    for row, ids in enumerate(KEPT):
        mask[row, ids if ids is not None else slice(None)] = True

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        logits = (x.double() @ w.double().t() / 0.7).masked_fill(~mask, -torch.inf)
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(TARGETS)[:, None])[:, 0]

    def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        found = token_log_probs(
            *(x, w, None, torch.tensor(TARGETS), LogitRule(temperature=0.7), 4, False, None),
            *(own.inside, own.outside),
        )
        assert found.listed is not None and found.kept is not None
        return own.renormalise(found.log_probs, found.listed, found.kept)

    own, results = support(), []
    for function in (plain, fused):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value = function(x, w)
        (value * given).sum().backward()
        results.append([value.detach().double(), x.grad, w.grad])
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None and theirs is not None
        assert bool(ours.isfinite().all())
        assert torch.allclose(ours.double(), theirs.double(), rtol=1e-4, atol=1e-5 * scale)


def test_cut_keeps_the_support() -> None:
    left = support().cut(torch.zeros(6, V)).isfinite()
    for row, ids in enumerate(KEPT):
        assert left[row].nonzero()[:, 0].tolist() == sorted(range(V) if ids is None else ids)


def rows_of(responses: list[list[int]], kept: list[list[list[int] | None] | None]) -> pa.Table:
    written = [None if one is None else columns(one) for one in kept]
    count = len(responses)
    return pa.table(
        {
            "uid": [f"u{row}" for row in range(count)],
            "sample": list(range(count)),
            "prompt_ids": pa.array([[3, 4]] * count, INTS),
            "response_ids": pa.array(responses, INTS),
            "response_mask": pa.array([[1] * len(ids) for ids in responses], pa.list_(pa.int8())),
            **{
                name: pa.array([[0.0] * len(ids) for ids in responses], FLOATS)
                for name in ("rollout_log_probs", "advantages", "returns")
            },
            "support": pa.array([one and one[0] for one in written], INTS),
            "support_sizes": pa.array([one and one[1] for one in written], INTS),
        }
    )


def test_rows_with_and_without_supports_in_any_order_of_packs() -> None:
    table = rows_of([[4, 9], [5, 6, 7], [2]], [[[1, 4, 7], None], None, [[2, 3]]])
    rows = TrainBatch.from_table(table)
    batch = pack(rows, [[2], [0], [1]])
    assert batch.support is not None
    assert batch.support.inside.counts.tolist() == [2, 3, 0, 0, 0, 0]
    assert batch.support.inside.ids.tolist() == [2, 3, 1, 4, 7]
    assert not batch.support.outside.counts.any()
    # Parts without supports are joined with others.
    first, second = TrainBatch.from_table(table.slice(1, 1)), TrainBatch.from_table(table.slice(2, 1))
    assert first.support_sizes is None
    joined = TrainBatch.concat([first, second])
    assert joined.support_sizes is not None and joined.support_sizes.tolist() == [0, 0, 0, 2]
    assert pack(first, [[0]]).support is None


def test_a_part_without_tokens_is_joined_with_others() -> None:
    table = rows_of([[4, 9], []], [None, None])
    for name, kind in (("teacher_top_ids", INTS), ("teacher_top_log_probs", FLOATS)):
        table = table.append_column(name, pa.array([[1, 2, 3, 4], []], kind))
    parts = [TrainBatch.from_table(table.slice(row, 1)) for row in (1, 0, 1)]
    joined = TrainBatch.concat(parts)
    assert joined.teacher_top_ids is not None and joined.teacher_top_ids.tolist() == [[1, 2], [3, 4]]


def test_unknown_supports_count_as_the_whole_vocabulary() -> None:
    table = rows_of([[4]], [[[4]]])
    place = table.schema.get_field_index("support_sizes")
    table = table.set_column(place, "support_sizes", pa.array([[UNKNOWN]], INTS))
    table = table.set_column(place - 1, "support", pa.array([[]], INTS))
    found = TokenBatch.from_table(table).supports(np.array([0]))
    assert found is not None and not found.inside.counts.any() and not found.outside.counts.any()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("support", [1, 7, 2], "u0.* token 0 of its response, 4, outside of the support"),
        ("support_sizes", [-3, 0], "token 0 of its response, 4, outside of the support"),
        ("support_sizes", [3], "1 entries in 'support_sizes' for 2 response tokens"),
        ("support_sizes", [2, 0], "3 ids in 'support' for 2 that they name"),
        ("support", None, "0 ids in 'support' for 3"),
    ],
)
def test_columns_that_do_not_fit_the_response_are_refused(name: str, value: list[int] | None, words: str) -> None:
    table = rows_of([[4, 9]], [[[1, 4, 7], None]])
    table = table.set_column(table.schema.get_field_index(name), name, pa.array([value], INTS))
    with pytest.raises(ValueError, match=words):
        TokenBatch.from_table(table)
