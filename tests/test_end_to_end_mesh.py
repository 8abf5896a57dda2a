"""Whole PPO runs whose two train workers see the same rows, beside the session's run with rows for each of them."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipeline.track.trajectories import read_trajectories
from tests.chaos.checks import comparable, differing
from tests.runs import Training, starter

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

ROUNDING = 1e-5
"""Absolute, for losses, whose terms cancel."""
DIFFERENCE = 1e-2
"""Of the movements of a tensor, relative to one of them; AdamW makes up to a whole step of a gradient near 0."""
MESHES = {name: f"actor.parallel.{name}=2" for name in ("tensor", "sequence")}


@pytest.mark.parametrize("name", MESHES)
def test_a_run_is_the_same_on_any_mesh(training: Training, tiny_model: Path, name: str) -> None:
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
    ours, theirs, before = (
        load_file(folder / "model.safetensors") for folder in (run.folder / "model", alone.folder / "model", tiny_model)
    )
    assert ours.keys() == theirs.keys() == before.keys()
    for key, start in before.items():
        moved = (theirs[key] - start).norm()
        assert moved > 0 and (ours[key] - theirs[key]).norm() / moved < DIFFERENCE, key
