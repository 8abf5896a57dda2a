"""Two ranks choose one checkpoint, whichever of them finds the damage."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipeline.storage.checkpoints import iterations
from pipeline.train import ranks, restore
from tests.storage.test_manifest import cut, flipped, whole
from tests.train.updates import spawn


def choose(rank: int, folder: str) -> None:
    """What a rank loads, and what it says."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    said: list[str] = []
    loaded: list[str] = []
    stand_in: Any = lambda folder, place, *_: loaded.append(place)  # noqa: E731
    restore._load = stand_in
    restore.restore([], None, folder, None, 0.0, said.append)  # type: ignore[arg-type]
    (Path(folder) / f"rank_{rank}.json").write_text(json.dumps([loaded, said]))
    ranks.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_choose_alike(tmp_path: Path) -> None:
    for iteration in (2, 4, 6, 8):
        whole(tmp_path, iteration)
    folder = tmp_path / "checkpoints"
    # Rank 1 alone reads this shard.
    flipped(folder / "iteration_000008")
    cut(folder / "iteration_000006")
    (folder / "iteration_000004" / "complete_1").unlink()
    spawn(choose, str(tmp_path))
    results = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    taken = f"{folder}/iteration_000002"
    assert [loaded for loaded, _ in results] == [[taken], [taken]]
    said = results[0][1]
    assert results[1][1] == [] and len(said) == 2
    assert "iteration_000008 is damaged: __1_0.distcp has another content than was written" in said[0]
    assert "iteration_000006 is damaged: __1_0.distcp has 3,000,000 of 6,000,000 bytes" in said[1]
    assert iterations(str(tmp_path)) == [2, 4]
    shutil.rmtree(folder)
