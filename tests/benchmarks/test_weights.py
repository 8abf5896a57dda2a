"""The parts of the weight benchmark that need neither Ray nor vLLM."""

import numpy as np
import pytest
import ray
import torch

from benchmarks.weights import join, model, report, trainer_side
from pipeline.weights.load import parameters
from pipeline.weights.publish import WeightPublisher


def test_what_the_trainer_does_is_timed_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests of the session may have started it.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    module = model(layers=1, width=64, vocabulary=300)
    times, shard = trainer_side(WeightPublisher(0, torch.float32, 2**16, np.copy), module, repeats=2)
    times["join"] = join(shard, 2)
    assert all(len(values.part) == len(values.copy) == 2 for values in times.values())
    arrived = dict(parameters([shard], lambda refs: refs))
    assert all(torch.equal(arrived[name], p) for name, p in module.named_parameters())
    assert report(times, 1.0).row_count == 3
