"""Bounds stand beside the fields, and a value outside them is refused with its key."""

import math
from dataclasses import dataclass, field

import pytest

from pipeline.config import Config
from pipeline.config.bounds import Bounds, setting, violations
from pipeline.config.learner import KL_ESTIMATES
from pipeline.kl_estimate import NAMES


@dataclass
class Section:
    count: int = setting(1, at_least=1)
    share: float = setting(0.5, above=0, at_most=1)
    rest: float = 1.0
    limit: int = setting(-1, at_least=1, or_value=-1)
    most: float = setting(3.0, infinite=True)
    way: str | None = setting(None, choices=(None, "near", "far"))
    steps: int | None = setting(None, at_least=1)
    pair: tuple[float, float] = setting((0.9, 0.99), at_least=0, below=1)


@dataclass
class Tree:
    section: Section = field(default_factory=Section)


@pytest.mark.parametrize(
    ("name", "value", "keys"),
    [
        ("count", 0, "section.count=0"),
        ("share", 0.0, "section.share=0"),
        ("share", math.nan, "section.share=nan"),
        ("rest", math.inf, "section.rest=inf"),
        ("limit", 0, "section.limit=0"),
        ("most", -math.inf, "section.most=-inf"),
        ("way", "here", "section.way=here"),
        ("steps", 0, "section.steps=0"),
        ("pair", (0.5, 1.0), "section.pair=[0.5, 1.0]"),
        ("pair", (0.5,), "section.pair=[0.5]"),
    ],
)
def test_a_value_outside_its_bounds_is_refused(name, value, keys, named):
    tree = Tree()
    setattr(tree.section, name, value)
    (found,) = violations(tree)
    named(found, keys)


@pytest.mark.parametrize(
    ("name", "value"), [("limit", -1), ("most", math.inf), ("way", "far"), ("way", None), ("steps", None), ("share", 1)]
)
def test_a_value_within_its_bounds_passes(name, value):
    tree = Tree()
    setattr(tree.section, name, value)
    assert not list(violations(tree))


def test_defaults_lie_within_their_bounds():
    assert not list(violations(Config()))
    assert Bounds().allow(1.0)


def test_the_estimates_of_a_kl_are_those_that_are_implemented():
    assert set(KL_ESTIMATES) == set(NAMES)
