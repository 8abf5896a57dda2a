"""Each kind of run with a real model: the cases of `benchmarks.real_model`, which measures them."""

from pathlib import Path

import pytest

from benchmarks.real_model import CASES, run_case

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_a_real_model(name: str, smollm2: Path, tmp_path: Path) -> None:
    run_case(name, smollm2, tmp_path, 3000.0)
