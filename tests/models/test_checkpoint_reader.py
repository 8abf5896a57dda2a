"""Checkpoints are read without running the code that their files ask for."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict

from pipeline.models.checkpoint_reader import load_checkpoint


class Command:
    """Unpickled, it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def trained_state() -> dict[str, Any]:
    """A linear layer in bfloat16 and its AdamW state after one step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    return {"actor": {"model": weights, "optimizer": moments}}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    state = trained_state()
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    return state, tmp_path / "saved"


def test_tensors_and_plain_values_come_back(saved: tuple[dict[str, Any], Path]) -> None:
    expected, folder = saved
    state = trained_state()
    part = state["actor"]
    part["model"] = {name: torch.zeros_like(tensor) for name, tensor in part["model"].items()}
    part["optimizer"]["param_groups"][0] |= {"lr": 0.0, "betas": (0.0, 0.0)}
    load_checkpoint(state, folder, no_dist=True)
    for name, tensor in expected["actor"]["model"].items():
        assert torch.equal(part["model"][name], tensor)
    assert part["optimizer"]["param_groups"] == expected["actor"]["optimizer"]["param_groups"]
    assert part["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_an_index_runs_no_code(saved: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    state, folder = saved
    index = folder / ".metadata"
    target = tmp_path / "made by the checkpoint"
    metadata = pickle.loads(index.read_bytes())
    metadata.planner_data = Command(target)
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="posix.mkdir, which is not part of an index"):
        load_checkpoint(state, folder, no_dist=True)
    assert not target.exists()


def test_a_plain_value_runs_no_code(saved: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    state, folder = saved
    target = tmp_path / "made by the checkpoint"
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    content = io.BytesIO()
    torch.save(Command(target), content)
    (folder / "hostile.distcp").write_bytes(content.getvalue())
    entry = metadata.storage_data[MetadataIndex("actor.optimizer.param_groups.0.lr")]
    entry.relative_path, entry.offset, entry.length = "hostile.distcp", 0, len(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BaseException, match="weights_only|Unsupported|unpickl"):
        load_checkpoint(state, folder, no_dist=True)
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(3), pickle.dumps("text")[:-3]])
def test_a_damaged_index_is_named(saved: tuple[dict[str, Any], Path], content: bytes) -> None:
    state, folder = saved
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata cannot be read as the index of a checkpoint"):
        load_checkpoint(state, folder, no_dist=True)


def test_files_outside_of_the_folder_are_not_read(saved: tuple[dict[str, Any], Path]) -> None:
    state, folder = saved
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../other"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="names '../other', which is not a file in its folder"):
        load_checkpoint(state, folder, no_dist=True)
