import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.train.losses import AGG_MODES, agg_loss, get_policy_loss, policy_loss, register_policy_loss

LOW, HIGH, C = 0.2, 0.3, 3.0


def one(advantage: float, ratio: float) -> tuple[float, float, dict[str, float]]:
    """Loss, its derivative by the log-prob, and metrics of a single token."""
    log_prob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    loss, sums = policy_loss(
        log_prob,
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones(1),
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=C,
    )
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    return loss.item(), gradient.item(), {name: float(total) for name, (total, _) in sums.items()}


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "clipped", "dual"),
    [
        (2.0, 1.0, -2.0, -2.0, 0, 0),  # on-policy: the plain policy gradient
        (2.0, 1.2, -2.4, -2.4, 0, 0),
        (2.0, 1.5, -2.6, 0.0, 1, 0),  # above 1 + high: held at 2 * 1.3
        (2.0, 0.5, -1.0, -1.0, 0, 0),  # a good token became rarer: not clipped
        (-2.0, 0.9, 1.8, 1.8, 0, 0),
        (-2.0, 0.5, 1.6, 0.0, 1, 0),  # below 1 - low: held at 2 * 0.8
        (-2.0, 2.5, 5.0, 5.0, 0, 0),  # a bad token became likelier: full force up to c
        (-2.0, 4.0, 6.0, 0.0, 0, 1),  # dual clip: held at 2 * 3
        (0.0, 4.0, 0.0, 0.0, 0, 0),
    ],
)
def test_each_branch_of_the_clip(advantage, ratio, loss, gradient, clipped, dual):
    got_loss, got_gradient, sums = one(advantage, ratio)
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx(gradient)
    assert (sums["pg_clipfrac"], sums["pg_clipfrac_lower"]) == (clipped, dual)
    assert sums["ppo_kl"] == pytest.approx(-math.log(ratio))


@pytest.mark.parametrize(("advantage", "log_prob"), [(1.0, 500.0), (-1.0, 500.0), (1.0, -500.0), (-1.0, -500.0)])
def test_huge_log_ratios_stay_finite(advantage, log_prob):
    x = torch.tensor([log_prob], requires_grad=True)
    loss, sums = policy_loss(x, torch.zeros(1), torch.tensor([advantage]), torch.ones(1))
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(x.grad).all()
    assert float(sums["ppo_kl"][0]) == math.copysign(20.0, -log_prob)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_matches_the_written_out_formula_and_its_derivative(data):
    n = data.draw(st.integers(1, 12))
    number = st.floats(-3, 3, allow_nan=False)
    draw = lambda: torch.tensor(data.draw(st.lists(number, min_size=n, max_size=n)), dtype=torch.float64)  # noqa: E731
    new, old, advantages = draw().requires_grad_(), draw(), draw()
    loss, _ = policy_loss(new, old, advantages, torch.ones(n), clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=C)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    for i in range(n):
        a, r = advantages[i].item(), math.exp(new[i].item() - old[i].item())
        # Independent of the code: which side of the bounds the ratio is on decides both value and derivative.
        if a >= 0:
            expected, free = -a * min(r, 1 + HIGH), r < 1 + HIGH
        else:
            expected, free = -a * min(max(r, 1 - LOW), C), 1 - LOW < r < C
        assert loss[i].item() == pytest.approx(expected, abs=1e-9)
        if min(abs(r - b) for b in (1 + HIGH, 1 - LOW, C)) > 1e-9:
            assert gradient[i].item() == pytest.approx(-a * r if free else 0.0, abs=1e-9)


def test_nan_behind_the_mask_reaches_neither_loss_nor_gradient():
    new = torch.tensor([-1.0, float("nan")], requires_grad=True)
    old = torch.tensor([-1.0, float("inf")])
    mask = torch.tensor([1.0, 0.0])
    per_token, sums = policy_loss(new, old, torch.tensor([1.0, float("nan")]), mask)
    for mode in AGG_MODES:
        loss = agg_loss(
            torch.where(mask > 0, per_token, torch.nan),
            mask,
            mode,
            global_tokens=1,
            global_sequences=1,
            segment=torch.tensor([0, 0]),
            scale_factor=1.0,
        )
        assert loss.item() == pytest.approx(-1.0)
    per_token.sum().backward()
    assert new.grad.tolist() == [-1.0, 0.0]
    assert all(math.isfinite(float(total)) and int(count) == 1 for total, count in sums.values())


LOSSES = torch.tensor([1.0, 2.0, 3.0, 10.0, 7.0, 99.0])
MASK = torch.tensor([1, 1, 1, 1, 0, 0])
SEGMENT = torch.tensor([0, 0, 0, 1, 1, 2])  # sequence 2 is masked as a whole: two sequences count


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8),
        ("seq-mean-token-mean", (2 + 10) / 2),
    ],
)
def test_aggregation_by_hand(mode, expected):
    for sequences in (3, None):
        loss = agg_loss(
            LOSSES,
            MASK,
            mode,
            global_tokens=4,
            global_sequences=2,
            segment=SEGMENT,
            sequences=sequences,
            scale_factor=8,
        )
        assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("size", [0, 3])
def test_nothing_to_train_gives_zero_and_a_graph(mode, size):
    new = torch.zeros(size, requires_grad=True)
    mask = torch.zeros(size)
    segment = torch.zeros(size, dtype=torch.int64)
    per_token, sums = policy_loss(new, torch.ones(size), torch.ones(size), mask, segment)
    loss = agg_loss(per_token, mask, mode, global_tokens=0, global_sequences=0, segment=segment, scale_factor=4)
    loss.backward()
    assert loss.item() == 0.0
    assert new.grad.tolist() == [0.0] * size
    assert all(int(count) == 0 and float(total) == 0.0 for total, count in sums.values())


@st.composite
def mini_batches(draw):
    """Sequences (lists of (old log-prob, advantage, masked in)), and a part (rank, micro-batch) for each."""
    token = st.tuples(st.floats(-2, 0), st.floats(-2, 2), st.booleans())
    rows = draw(st.lists(st.lists(token, max_size=6), min_size=1, max_size=7))
    parts = draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    return rows, parts


def share(rows, counts, weight, mode):
    """Policy loss and entropy bonus of one micro-batch made of `rows`."""
    tokens = [(s, *token) for s, row in enumerate(rows) for token in row]
    column = lambda i, dtype: torch.tensor([token[i] for token in tokens], dtype=dtype)  # noqa: E731
    segment, old, advantages = column(0, torch.int64), column(1, torch.float64), column(2, torch.float64)
    mask = column(3, torch.float64)
    new = torch.tanh(weight * (old + 0.5)) - 0.7
    per_token, sums = policy_loss(new, old, advantages, mask, segment)
    how = {"global_tokens": counts[0], "global_sequences": counts[1], "segment": segment, "sequences": len(rows)}
    loss = agg_loss(per_token, mask, mode, scale_factor=5.0, **how)
    entropy = agg_loss(-new * new.exp(), mask, mode, scale_factor=5.0, **how)
    return loss - 0.01 * entropy, {name: (float(a), int(b)) for name, (a, b) in sums.items()}


@settings(max_examples=60, deadline=None)
@given(mini_batches(), st.sampled_from(AGG_MODES))
def test_any_split_gives_the_same_loss_gradient_and_metrics(batch, mode):
    rows, parts = batch
    counts = sum(t[2] for row in rows for t in row), sum(any(t[2] for t in row) for row in rows)
    whole_weight = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    whole, whole_sums = share(rows, counts, whole_weight, mode)
    whole.backward()

    split_weight = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    total, sums = 0.0, dict.fromkeys(whole_sums, (0.0, 0))
    for part in range(4):  # parts without rows run as dummies
        loss, part_sums = share([r for r, p in zip(rows, parts, strict=True) if p == part], counts, split_weight, mode)
        loss.backward()
        total += loss.item()
        sums = {name: (a + part_sums[name][0], b + part_sums[name][1]) for name, (a, b) in sums.items()}
    assert total == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)
    assert split_weight.grad.item() == pytest.approx(whole_weight.grad.item(), rel=1e-9, abs=1e-12)
    for name, (value, count) in whole_sums.items():
        assert sums[name][0] == pytest.approx(value, rel=1e-9, abs=1e-12) and sums[name][1] == count


def test_bad_arguments_get_sentences():
    token = torch.zeros(1)
    with pytest.raises(ValueError, match="clip_ratio_c must be above 1"):
        policy_loss(token, token, token, token, clip_ratio_c=1.0)
    with pytest.raises(ValueError, match="must not be negative"):
        policy_loss(token, token, token, token, clip_ratio_low=-0.1)
    with pytest.raises(ValueError, match=r"loss_agg_mode 'token_mean' is unknown.*token-mean"):
        agg_loss(token, token, "token_mean", global_tokens=1, global_sequences=1)
    with pytest.raises(ValueError, match="positive actor.loss_scale_factor"):
        agg_loss(token, token, "seq-mean-token-sum-norm", global_tokens=1, global_sequences=1)
    with pytest.raises(ValueError, match="segment"):
        agg_loss(token, token, "seq-mean-token-mean", global_tokens=1, global_sequences=1)


def test_registry():
    assert get_policy_loss("vanilla") is policy_loss
    with pytest.raises(ValueError, match=r"'vanila' is unknown. Did you mean 'vanilla'\?"):
        get_policy_loss("vanila")
    with pytest.raises(ValueError, match="registered twice"):
        register_policy_loss("vanilla")(lambda *args, **kwargs: None)
