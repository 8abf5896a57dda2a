"""Weights through shared memory: the reader's model has the writer's tensors, and each fault is reported."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.weights import shared
from pipeline.weights.shared import SharedBuffer, aligned, buckets


class Model(nn.Module):
    """An engine's model that skips names that it does not know, as SGLang's loaders do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(5))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in dict(self.named_parameters()):
                self.get_parameter(name).data.copy_(tensor)


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedBuffer]:
    monkeypatch.setattr(shared, "_needed", set())
    monkeypatch.setattr(shared, "_watch", None)
    made = SharedBuffer(256)
    yield made
    made.close()


A, B = torch.arange(6.0).view(3, 2), torch.arange(5, dtype=torch.bfloat16)


def test_tensors_arrive_and_a_buffer_serves_again(buffer: SharedBuffer) -> None:
    model = Model()
    for factor in (1, 2):
        manifest = buffer.write([("a", A * factor), ("b", B)], check=False, first=True).encode()
        assert buffer.report() is None, "the last one is of an earlier manifest"
        shared.load(model, manifest)
        report = buffer.report()
        assert report is not None and not report.error
        assert torch.equal(model.a, A * factor) and torch.equal(model.b, B.float())


def test_half_a_model_and_unknown_names_are_reported(buffer: SharedBuffer) -> None:
    model = Model()
    shared.load(model, buffer.write([("a", A)], check=True, first=True).encode())
    shared.load(model, buffer.write([("c", B)], check=True, first=False).encode())
    report = buffer.report()
    assert report is not None and (report.unread, report.left) == (["c"], ["b"])


def test_a_wrong_shape_is_an_error_that_leaves_the_engine_alive(buffer: SharedBuffer) -> None:
    model = Model()
    shared.load(model, buffer.write([("a", B)], check=True, first=True).encode())
    report = buffer.report()
    assert report is not None and report.final and "cannot load a as it is trained" in report.error
    shared.load(model, buffer.write([("a", B)], check=False, first=True).encode())
    report = buffer.report()
    assert report is not None and not report.final and report.error.startswith("RuntimeError: ")


def test_buckets_hold_what_fits_and_larger_tensors_alone(buffer: SharedBuffer) -> None:
    tensors = [(str(size), torch.ones(size)) for size in (10, 10, 100, 10)]
    found = list(buckets(tensors, 2 * aligned(tensors[0][1])))
    assert [[name for name, _ in bucket] for bucket in found] == [["10", "10"], ["100"], ["10"]]
    buffer.grow(aligned(tensors[2][1]))
    model = Model()
    shared.load(model, buffer.write([tensors[2], ("a", A)][1:], check=False, first=True).encode())
    assert torch.equal(model.a, A)


def test_the_memory_has_no_name(buffer: SharedBuffer) -> None:
    assert json.loads(buffer.write([], False, True).encode())["path"].startswith("/proc/")
    assert "(deleted)" in str(Path(buffer.path).readlink())
