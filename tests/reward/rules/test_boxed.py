r"""The last `\boxed{...}` of a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.reward.rules.boxed import MAX_BOXES, MAX_LENGTH, last_boxed, unboxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{42}", "42"), (r"so $\boxed{ 42 }$.", "42"), (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{a{b{c}}d}", "a{b{c}}d"), (r"\boxed {7}", "7"), (r"\boxed 7", "7"), (r"$\boxed 7$", "7"),
        (r"\boxed 7.", "7"), (r"\fbox{9}", "9"), (r"\boxed{1} \fbox{9}", "9"), (r"\boxed{}", ""),
        (r"\boxed{3} and then \boxed{4", "3"), (r"\boxed{3} \boxed", "3"), (r"\boxed{1\}", None),
        (r"\boxed{" + "x" * (MAX_LENGTH + 1) + "}", None), (r"\boxed{" + "x" * MAX_LENGTH + "}", "x" * MAX_LENGTH),
        (r"\boxed", None), ("boxed{4}", None), ("", None), ("no box", None),
    ],
)  # fmt: skip
def test_cases(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@given(st.recursive(st.text("ab1,+", max_size=5), lambda inner: st.builds("{{{}}}".format, inner), max_leaves=5))
def test_a_box_keeps_its_balanced_content(content: str) -> None:
    assert last_boxed(f"first \\boxed{{0}}, then \\boxed{{{content}}} and {{more}}") == content.strip()


def test_only_so_many_boxes_are_tried() -> None:
    assert last_boxed(r"\boxed{1}" + r"\boxed{" * (MAX_BOXES - 1)) == "1"
    assert last_boxed(r"\boxed{1}" + r"\boxed{" * MAX_BOXES) is None


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\boxed{5}}", "5"), (r"\boxed{6\boxed{5}}", r"6\boxed{5}"), (r"\boxed{6} \boxed{5}", "5"),
        (r"\boxed{\boxed{\boxed{5}}}", "5"), (r"\boxed{6 \boxed{\boxed{5}}}", r"6 \boxed{\boxed{5}}"),
        (r"-\boxed{5}", "-5"), (r"3-\boxed{5}", "5"), (r"\boxed{5} million", "5 million"), (r"\boxed{5} apples", "5"),
        (r"-\boxed{x}", "x"), (r"\boxed{x} million", "x"), (r"\boxed 5 million", "5 million"),
    ],
)  # fmt: skip
def test_boxes_inside_each_other_and_what_stands_beside_a_number(text: str, content: str) -> None:
    assert last_boxed(text) == content


def test_a_box_is_opened_where_it_stands() -> None:
    assert unboxed(r"$x = -\boxed{5} + 1$") == "$x = -5 + 1$"
    assert unboxed(r"\boxed{6} or \boxed 5.") == r"\boxed{6} or 5"
    assert unboxed(r"\boxed{5") == r"\boxed{5"
