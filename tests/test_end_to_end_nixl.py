"""A whole run whose engine reads weights out of the train workers' memory, where NIXL is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.runs import TWO, starter, tiny_settings

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("nixl") is None, reason="needs the package nixl"),
]


def test_the_engine_generates_with_the_weights_of_every_version(
    tmp_path: Path, tiny_model: Path, prompt_files: Any, ray_session: None
) -> None:
    settings = tiny_settings(tmp_path, tiny_model, prompt_files)
    run = starter(settings)("nixl", *TWO, "trainer.total_training_steps=3", "trainer.weight_transport=nixl")
    # More versions than the train workers keep, so that their memory has been written over.
    trained = [run.records[iteration] for iteration in (1, 2, 3)]
    assert all(record["training/rollout_log_probs_diff_max"] < 1e-4 for record in trained)
