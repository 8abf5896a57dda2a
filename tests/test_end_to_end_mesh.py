"""Whole PPO runs whose two train workers see the same rows, beside the session's run with rows for each of them."""

import pytest
import torch
from safetensors.torch import load_file

from pipeline.track.trajectories import read_trajectories
from tests.chaos.checks import comparable, differing
from tests.runs import Training, starter

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

ROUNDING = 1e-5
"""Absolute, for losses, whose terms cancel."""
MESHES = {name: f"actor.parallel.{name}=2" for name in ("tensor", "sequence")}


@pytest.mark.parametrize("name", MESHES)
def test_a_run_is_the_same_on_any_mesh(training: Training, name: str) -> None:
    alone, last = training.continued, training.last + 1
    run = starter(training.settings)(f"mesh-{name}", f"trainer.total_training_steps={last}", MESHES[name])
    for iteration in range(1, last + 1):
        ours, theirs = (comparable(side.records[iteration]) for side in (run, alone))
        assert ours.keys() == theirs.keys()
        # Each worker's share of the tokens.
        keys = [key for key in differing(ours, theirs) if not key.startswith("global_seqlen/")]
        different = [key for key in keys if abs(ours[key] - theirs[key]) > ROUNDING]
        assert different == [], {key: (ours.get(key), theirs.get(key)) for key in different}
        assert ours["global_seqlen/min"] == pytest.approx(2 * theirs["global_seqlen/mean"])
        if iteration > 1:  # the first one trains the critic alone
            assert run.records[iteration]["training/rollout_log_probs_diff_max"] < 1e-4
        rows, same = (read_trajectories(str(side.folder), iteration) for side in (run, alone))
        assert rows["response_ids"].equals(same["response_ids"])
    ours, theirs = (load_file(side.folder / "model" / "model.safetensors") for side in (run, alone))
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        # A tenth of the largest step.
        torch.testing.assert_close(weight, theirs[key], rtol=0, atol=1e-3, msg=key)
