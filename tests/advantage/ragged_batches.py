"""Rows as plain lists, for tests that reorder, cut and compare them; flat arrays only at the estimator's door."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from pipeline.advantage.estimators import EstimatorInput, get_adv_estimator
from pipeline.catalogue import ESTIMATORS
from pipeline.config.algorithm import AlgorithmConfig

NAMES = sorted(name for name, known in ESTIMATORS.items() if known.built_in)
"""The built-in estimators."""
KEYS = ["score", "format"]


@dataclass
class Row:
    """One response; lists hold a number for each of its tokens, those of a token-free field are filled up."""

    score: float
    group: int = 0
    mask: list[int] = field(default_factory=lambda: [1])
    penalties: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sum_pi_squared: list[float] = field(default_factory=list)
    baseline: float = 0.0
    format: float = 0.0
    turns: list[int] = field(default_factory=list)
    """The answer of each token, also where the mask is 0."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """By turn; what is left of the score is on the last token."""

    def __post_init__(self):
        for name, fill in (
            *(("penalties", 0.0), ("values", 0.0), ("log_probs", -1.0), ("sum_pi_squared", 0.5), ("turns", 0)),
        ):
            setattr(self, name, getattr(self, name) or [fill] * len(self.mask))

    @property
    def token_rewards(self) -> list[float]:
        rewards = [-p if m else 0.0 for p, m in zip(self.penalties, self.mask, strict=True)]
        rest = self.score
        for turn, reward in self.turn_rewards.items():
            tokens = [t for t, m in enumerate(self.mask) if m and self.turns[t] == turn]
            if tokens:
                rewards[tokens[-1]] += reward
                rest -= reward
        if any(self.mask):
            rewards[max(t for t, m in enumerate(self.mask) if m)] += rest
        return rewards

    @property
    def reward(self) -> float:
        return sum(self.token_rewards) if any(self.mask) else self.score

    def without_masked_tokens(self) -> "Row":
        kept = {
            name: [x for x, m in zip(getattr(self, name), self.mask, strict=True) if m]
            for name in ("mask", "penalties", "values", "log_probs", "sum_pi_squared", "turns")
        }
        return replace(self, **kept)


def rows_of(scores: Sequence[float], group: Sequence[int] | None = None, lengths: Sequence[int] | None = None):
    """Rows of scores alone: one group and one token each, unless told otherwise."""
    group = [0] * len(scores) if group is None else group
    lengths = [1] * len(scores) if lengths is None else lengths
    return [Row(float(s), g, [1] * n) for s, g, n in zip(scores, group, lengths, strict=True)]


def flat(rows: list[Row]) -> EstimatorInput:
    def tokens(name: str, dtype: type = float) -> np.ndarray:
        return np.array([x for row in rows for x in getattr(row, name)], dtype=dtype)

    def each(name: str) -> np.ndarray:
        return np.array([getattr(row, name) for row in rows], dtype=float)

    return EstimatorInput(
        rewards=each("reward"),
        group=np.array([row.group for row in rows], dtype=np.int64),
        offsets=np.cumsum([0, *(len(row.mask) for row in rows)]),
        mask=tokens("mask", bool),
        token_rewards=tokens("token_rewards"),
        log_probs=tokens("log_probs"),
        values=tokens("values"),
        baselines=each("baseline"),
        sum_pi_squared=tokens("sum_pi_squared"),
        parts={key: each(key) for key in KEYS},
        turns=tokens("turns", np.int64),
    )


def by_row(rows: list[Row], tokens: np.ndarray) -> list[list[float]]:
    return [part.tolist() for part in np.split(tokens, np.cumsum([len(row.mask) for row in rows])[:-1])] if rows else []


def estimate(name: str, rows: list[Row], **config) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and returns of each token of each row."""
    got = get_adv_estimator(name).function(flat(rows), AlgorithmConfig(**{"gdpo_reward_keys": KEYS} | config))
    assert got.advantages.dtype == got.returns.dtype == np.float64
    return by_row(rows, got.advantages), by_row(rows, got.returns)


def advantages(name: str, rows: list[Row], **config) -> list[list[float]]:
    return estimate(name, rows, **config)[0]


def spread(rows: list[Row], numbers: Sequence[float]) -> list[list[float]]:
    """One number per row on its trained tokens, 0 on the others."""
    return [[x if m else 0.0 for m in row.mask] for row, x in zip(rows, numbers, strict=True)]


def assert_close(got: list[list[float]], expected: list[list[float]], tolerance: float = 1e-8) -> None:
    assert [len(row) for row in got] == [len(row) for row in expected]
    np.testing.assert_allclose(np.concatenate([[], *got]), np.concatenate([[], *expected]), tolerance, tolerance)


@st.composite
def ragged_rows(draw: st.DrawFn, min_size: int = 0) -> list[Row]:
    """Rows of a few groups, some of one row; scores that often agree; masks with holes; rows without a token."""
    shape = st.tuples(st.integers(-4, 4), st.integers(0, 3), st.lists(st.booleans(), max_size=6), st.integers(0, 2))
    shapes = draw(st.lists(shape, min_size=min_size, max_size=9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    penal = draw(st.sampled_from([0.0, 0.1]))
    rows = []
    for score, group, mask, form in shapes:
        n = len(mask)
        turns = np.cumsum(rng.integers(0, 2, n)).tolist()
        pi = rng.uniform(0.02, 0.98, n)
        rows.append(
            Row(
                score / 4,
                group,
                [int(m) for m in mask],
                (penal * rng.normal(size=n)).tolist(),
                rng.normal(size=n).tolist(),
                np.log(pi).tolist(),
                (pi**2 + rng.uniform(0, 1, n) * (1 - pi) ** 2).tolist(),
                float(rng.normal()),
                float(form),
                turns,
                {turn: float(rng.integers(-2, 3)) for turn in set(turns) if rng.integers(0, 2)},
            )
        )
    return rows
