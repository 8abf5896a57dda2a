"""The arithmetic of docs/scaling.md."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
SHAPES = {  # layers, width
    "Qwen2.5-0.5B": (24, 896),
    "Qwen2.5-1.5B": (28, 1536),
    "Qwen2.5-7B": (28, 3584),
    "Qwen3-8B": (36, 4096),
    "Qwen3-14B": (40, 5120),
    "Qwen3-32B": (64, 5120),
    "Qwen2.5-72B": (80, 8192),
}
GIB = 2**30


@pytest.mark.parametrize("model", SHAPES)
def test_the_row_of_a_model_follows_from_its_parameters(model: str) -> None:
    found = re.search(rf"^\| {re.escape(model)} \| (.*) \|$", TEXT, re.MULTILINE)
    assert found
    billions, state, *ranks, inputs, engine = (float(cell) for cell in found[1].split(" | "))
    parameters, (layers, width) = billions * 1e9, SHAPES[model]
    assert state == pytest.approx(16 * parameters / GIB, abs=0.06)
    expected = [16 * parameters / GIB / count for count in (1, 2, 4, 8, 16, 32, 64)]
    assert ranks == pytest.approx(expected, abs=0.06)
    assert inputs == pytest.approx(2 * 16384 * width * layers / GIB, abs=0.06)
    assert engine == pytest.approx(2 * parameters / GIB, abs=0.06)
