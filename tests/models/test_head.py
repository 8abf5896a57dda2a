"""The fused head against the plain softmax in double precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.models.head import LogitRule, TokenLists, VocabularyPart, token_log_probs
from tests.train.updates import spawn, worlds

N, HIDDEN, VOCABULARY = 13, 6, 37
COUNTS = [2, 0, 3, 1, 0, 5, 1, 1, 0, 0, 36, 1, 2]
"""Number of listed tokens at each position: from none to all but one of the vocabulary."""
RULES = [LogitRule(), LogitRule(temperature=0.7), LogitRule(0.3, None, 1.5), LogitRule(0.8, 2.5, 0.6)]


def inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    counts = torch.tensor(COUNTS)
    lists = [torch.randperm(VOCABULARY, generator=generator)[:count] for count in COUNTS]
    return {
        "hidden": normal(N, HIDDEN),
        "weight": normal(VOCABULARY, HIDDEN),
        "bias": normal(VOCABULARY),
        "targets": torch.randint(0, VOCABULARY, (N,), generator=generator),
        "of_log_probs": normal(N),
        "of_entropies": normal(N),
        "ids": torch.cat(lists),
        "counts": counts,
        "of_listed": normal(int(counts.sum())),
        "of_kept": normal(N),
    }


def plain(
    given: dict[str, Tensor], rule: LogitRule, bias: bool, log_probs: bool, entropy: bool, listed: bool = False
) -> list[Tensor]:
    """Log-probs, entropies, log-probs of the listed tokens and of all but them, and gradients, in double precision."""
    hidden, weight, offset = (given[name].double().requires_grad_() for name in ("hidden", "weight", "bias"))
    x = (hidden @ weight.t() + (offset if bias else 0)) * rule.scale
    if rule.softcap is not None:
        x = torch.tanh(x / rule.softcap) * rule.softcap
    logp = torch.log_softmax(x / rule.temperature, -1)
    chosen, entropies = logp.gather(-1, given["targets"][:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    named = logp[torch.arange(N).repeat_interleave(given["counts"]), given["ids"]]
    loss = (chosen * given["of_log_probs"]).sum() * log_probs + (entropies * given["of_entropies"]).sum() * entropy
    left = torch.zeros(N, VOCABULARY, dtype=torch.bool)
    left[torch.arange(N).repeat_interleave(given["counts"]), given["ids"]] = True
    kept = torch.where(given["counts"] > 0, logp.masked_fill(left, -torch.inf).logsumexp(-1), 0.0)
    loss = loss + ((named * given["of_listed"]).sum() + (kept * given["of_kept"]).sum()) * listed
    loss.backward()
    grads = [hidden.grad, weight.grad, *([offset.grad] if bias else [])]
    values = [chosen, entropies, named, kept]
    return [*(value.detach() for value in values), *(grad for grad in grads if grad is not None)]


def fused(
    given: dict[str, Tensor],
    rule: LogitRule,
    bias: bool,
    log_probs: bool,
    entropy: bool,
    chunk: int = 4,
    part: VocabularyPart | None = None,
    rows: slice = slice(None),
    listed: bool = False,
) -> list[Tensor]:
    hidden = given["hidden"].clone().requires_grad_()
    weight, offset = (given[name][rows].clone().requires_grad_() for name in ("weight", "bias"))
    lists = TokenLists(given["ids"], given["counts"])
    chosen, entropies, named, kept, _ = token_log_probs(
        hidden, weight, offset if bias else None, given["targets"], rule, chunk, True, part, lists, lists
    )
    assert entropies is not None and named is not None and kept is not None
    loss = (chosen * given["of_log_probs"]).sum() if log_probs else 0.0
    loss = loss + ((entropies * given["of_entropies"]).sum() if entropy else 0.0)
    if listed:
        loss = loss + (named * given["of_listed"]).sum() + (kept * given["of_kept"]).sum()
    loss.backward()  # type: ignore[union-attr]
    grads = [hidden.grad, weight.grad, *([offset.grad] if bias else [])]
    values = [chosen, entropies, named, kept]
    return [*(value.detach() for value in values), *(grad for grad in grads if grad is not None)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() <= 3e-6 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("log_probs", "entropy"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_equals_the_plain_softmax_with_gradients(
    rule: LogitRule, log_probs: bool, entropy: bool, bias: bool, listed: bool
) -> None:
    want = plain(inputs(), rule, bias, log_probs, entropy, listed)
    for chunk in (1, 4, 13, 100):
        assert_equal(fused(inputs(), rule, bias, log_probs, entropy, chunk, listed=listed), want)


def test_only_listed_tokens_have_a_gradient() -> None:
    assert_equal(
        fused(inputs(), LogitRule(), True, False, False, listed=True),
        plain(inputs(), LogitRule(), True, False, False, True),
    )


def test_lists_of_chosen_positions() -> None:
    given = inputs()
    lists, chosen = TokenLists(given["ids"], given["counts"]), torch.tensor([0, 1, 5, 12])
    ends = [0, *given["counts"].cumsum(0).tolist()]
    want = torch.cat([given["ids"][ends[place] : ends[place + 1]] for place in chosen.tolist()])
    assert torch.equal(lists.select(chosen).ids, want)
    assert lists.select(chosen).counts.tolist() == [2, 0, 5, 2]


def test_large_logits_stay_finite() -> None:
    given = inputs()
    given["weight"] *= 1e4
    values = fused(given, LogitRule(), False, True, True)
    assert all(bool(value.isfinite().all()) for value in values)
    assert_equal(values[:4], plain(given, LogitRule(), False, True, True)[:4])


def test_nothing_of_the_vocabularys_size_is_kept_but_the_weights() -> None:
    given, kept = inputs(), []
    weight = given["weight"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        token_log_probs(given["hidden"].requires_grad_(), weight, None, given["targets"], LogitRule(), 4, False)
    assert max(tensor.numel() for tensor in kept if tensor is not weight) == N * HIDDEN < N * VOCABULARY


def test_entropy_only_where_it_is_wanted_and_no_position() -> None:
    given = inputs()
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    got, *others = token_log_probs(hidden, weight, None, given["targets"], LogitRule(), 4, False)
    assert others == [None] * 4
    assert_equal([got.detach()], plain(inputs(), LogitRule(), False, True, True)[:1])
    none = TokenLists(given["ids"][:0], given["counts"][:0])
    got, *found, _ = token_log_probs(
        hidden[:0], weight, None, given["targets"][:0], LogitRule(), 4, True, lists=none, left_out=none
    )
    assert len(got) == 0 and all(value is not None and len(value) == 0 for value in found)
    got.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def split(rank: int, folder: str) -> None:
    """Two ranks with the vocabulary's halves, the second of which is the smaller one."""
    for world in worlds(rank, folder):
        if world == 1:
            continue
        rows = slice(0, 19) if rank == 0 else slice(19, None)
        part = VocabularyPart(19 * rank, dist.group.WORLD)
        for rule in RULES:
            options: Any = (rule, True, True, True)
            *values, hidden, weight, bias = plain(inputs(), *options, listed=True)
            ours = fused(inputs(), *options, part=part, rows=rows, listed=True)
            assert_equal(ours, [*values, hidden, weight[rows], bias[rows]])


def test_ranks_share_the_vocabulary(tmp_path: Path) -> None:
    spawn(split, str(tmp_path))
