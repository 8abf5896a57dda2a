"""The fused head against the plain softmax in double precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.models.head import LogitRule, VocabularyPart, token_log_probs
from tests.train.updates import spawn, worlds

N, HIDDEN, VOCABULARY = 13, 6, 37
RULES = [LogitRule(), LogitRule(temperature=0.7), LogitRule(0.3, None, 1.5), LogitRule(0.8, 2.5, 0.6)]


def inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "hidden": normal(N, HIDDEN),
        "weight": normal(VOCABULARY, HIDDEN),
        "bias": normal(VOCABULARY),
        "targets": torch.randint(0, VOCABULARY, (N,), generator=generator),
        "of_log_probs": normal(N),
        "of_entropies": normal(N),
    }


def plain(given: dict[str, Tensor], rule: LogitRule, bias: bool, log_probs: bool, entropy: bool) -> list[Tensor]:
    """Log-probs, entropies and gradients by autograd, in double precision."""
    hidden, weight, offset = (given[name].double().requires_grad_() for name in ("hidden", "weight", "bias"))
    x = (hidden @ weight.t() + (offset if bias else 0)) * rule.scale
    if rule.softcap is not None:
        x = torch.tanh(x / rule.softcap) * rule.softcap
    logp = torch.log_softmax(x / rule.temperature, -1)
    chosen, entropies = logp.gather(-1, given["targets"][:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    loss = (chosen * given["of_log_probs"]).sum() * log_probs + (entropies * given["of_entropies"]).sum() * entropy
    loss.backward()
    grads = [hidden.grad, weight.grad, *([offset.grad] if bias else [])]
    return [chosen.detach(), entropies.detach(), *(grad for grad in grads if grad is not None)]


def fused(
    given: dict[str, Tensor],
    rule: LogitRule,
    bias: bool,
    log_probs: bool,
    entropy: bool,
    chunk: int = 4,
    part: VocabularyPart | None = None,
    rows: slice = slice(None),
) -> list[Tensor]:
    hidden = given["hidden"].clone().requires_grad_()
    weight, offset = (given[name][rows].clone().requires_grad_() for name in ("weight", "bias"))
    chosen, entropies = token_log_probs(
        hidden, weight, offset if bias else None, given["targets"], rule, chunk, True, part
    )
    assert entropies is not None
    loss = (chosen * given["of_log_probs"]).sum() if log_probs else 0.0
    loss = loss + ((entropies * given["of_entropies"]).sum() if entropy else 0.0)
    loss.backward()  # type: ignore[union-attr]
    grads = [hidden.grad, weight.grad, *([offset.grad] if bias else [])]
    return [chosen.detach(), entropies.detach(), *(grad for grad in grads if grad is not None)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() <= 1e-6 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("log_probs", "entropy"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_plain_softmax_with_gradients(rule: LogitRule, log_probs: bool, entropy: bool, bias: bool) -> None:
    want = plain(inputs(), rule, bias, log_probs, entropy)
    for chunk in (1, 4, 100):
        assert_equal(fused(inputs(), rule, bias, log_probs, entropy, chunk), want)


def test_large_logits_stay_finite() -> None:
    given = inputs()
    given["weight"] *= 1e4
    values = fused(given, LogitRule(), False, True, True)
    assert all(bool(value.isfinite().all()) for value in values)
    assert_equal(values[:2], plain(given, LogitRule(), False, True, True)[:2])


def test_nothing_of_the_vocabularys_size_is_kept_but_the_weights() -> None:
    given, kept = inputs(), []
    weight = given["weight"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        token_log_probs(given["hidden"].requires_grad_(), weight, None, given["targets"], LogitRule(), 4, False)
    assert max(tensor.numel() for tensor in kept if tensor is not weight) == N * HIDDEN < N * VOCABULARY


def test_entropy_only_where_it_is_wanted_and_no_position() -> None:
    given = inputs()
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    got, entropies = token_log_probs(hidden, weight, None, given["targets"], LogitRule(), 4, False)
    assert entropies is None
    assert_equal([got.detach()], plain(inputs(), LogitRule(), False, True, True)[:1])
    got, entropies = token_log_probs(hidden[:0], weight, None, given["targets"][:0], LogitRule(), 4, True)
    assert entropies is not None and len(got) == len(entropies) == 0
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
            log_probs, entropies, hidden, weight, bias = plain(inputs(), *options)
            ours = fused(inputs(), *options, part=part, rows=rows)
            assert_equal(ours, [log_probs, entropies, hidden, weight[rows], bias[rows]])


def test_ranks_share_the_vocabulary(tmp_path: Path) -> None:
    spawn(split, str(tmp_path))
