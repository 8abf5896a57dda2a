import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.advantage.kl_controller import AdaptiveKL, FixedKL, kl_controller, kl_penalty
from pipeline.config.algorithm import AlgorithmConfig, KLControlConfig

positive = st.floats(1e-4, 100)


def test_an_impossible_token_costs_a_bounded_k3():
    assert kl_penalty(np.array([-1.0, -900.0]), np.array([-900.0, -1.0]), "k3") == pytest.approx([10, 10])


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 8))
def test_k1_and_k3_are_the_kl_on_average(seed, size):
    # Half uniform: no ratio is so large that k3 is held at its bound.
    p, q = 0.5 * np.random.default_rng(seed).dirichlet(np.full(size, 0.5), 2) + 0.5 / size
    kl = float((p * np.log(p / q)).sum())
    for kind in ("k1", "k3"):
        assert (p * kl_penalty(np.log(p), np.log(q), kind)).sum() == pytest.approx(kl, abs=1e-12)
    for kind in ("abs", "k2", "k3"):
        assert (kl_penalty(np.log(p), np.log(q), kind) >= 0).all()


def test_a_fixed_coefficient_stays():
    control = kl_controller(AlgorithmConfig().kl_ctrl)
    assert isinstance(control, FixedKL)
    control.update(1e9, 10**9)
    assert control.coef == 0.001


def test_adaptive_steps_worked_by_hand():
    control = kl_controller(KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=6.0, horizon=100))
    control.update(9.0, 10)  # 9 / 6 - 1 = 0.5, held at 0.2
    assert control.coef == pytest.approx(0.1 * 1.02)
    control.update(5.4, 50)  # -0.1
    assert control.coef == pytest.approx(0.1 * 1.02 * 0.95)
    control.update(-3.0, 100)  # k1 may be negative; held at -0.2
    assert control.coef == pytest.approx(0.1 * 1.02 * 0.95 * 0.8)
    control.coef = 0.5  # a checkpoint
    control.update(6.0, 1000)
    assert control.coef == 0.5


@given(coef=positive, target=positive, kl=st.floats(-10, 200), more=st.floats(0, 10), rows=st.integers(1, 10**7))
def test_it_steers_towards_the_target(coef, target, kl, more, rows):
    def after(current: float, count: int = rows) -> float:
        control = AdaptiveKL(coef, target, horizon=10_000)
        control.update(current, count)
        return control.coef

    assert after(target) == coef
    assert 0 < after(kl) <= after(kl + more)
    assert after(kl) >= coef if kl > target else after(kl) <= coef
    assert 0.8 * coef <= after(kl, min(rows, 10_000)) * (1 + 1e-12) and after(kl, min(rows, 10_000)) <= 1.2001 * coef


@settings(max_examples=20)
@given(coef=positive, target=st.floats(0.01, 10), rows=st.integers(1000, 20_000))
def test_a_loop_whose_kl_falls_with_the_coefficient_settles_at_the_target(coef, target, rows):
    """With twice the horizon of rows it swings about the target for ever: a step is as large as what it corrects."""
    control = AdaptiveKL(coef, target, horizon=10_000)
    for _ in range(3000):
        control.update(1.0 / control.coef, rows)
    # The error that is corrected at a time is at most 20 percent, and so is the swing.
    assert 1.0 / control.coef == pytest.approx(target, rel=0.01 if rows <= 18_000 else 0.25)


def test_more_rows_than_five_horizons_neither_pay_for_distance_nor_end_the_control():
    control = AdaptiveKL(1.0, target=1.0, horizon=10)
    control.update(0.0, 1000)
    assert control.coef == pytest.approx(0.1)
    control.update(2.0, 10)
    assert control.coef == pytest.approx(0.12)
