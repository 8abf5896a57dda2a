"""A model's state, as its checkpoint holds it."""

import torch
from torch import nn

from pipeline.models.state import is_weight, tensors
from tests.weights.model import Model


def test_parameters_and_persistent_buffers_come_module_by_module() -> None:
    model = Model()
    found = dict(tensors(model))
    assert list(found) == list(model.state_dict()) and "frequencies" not in found
    assert all(found[name] is tensor for name, tensor in model.named_parameters()), "themselves, not copies"
    assert {name for name, tensor in found.items() if not is_weight(tensor)} == {"flags", "norm.counts", "bias"}


def test_a_tied_tensor_comes_once_under_its_first_name() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embedding"].weight
    model["head"].scale = nn.Buffer(torch.ones(1))
    model["embedding"].scale = model["head"].scale
    assert [name for name, _ in tensors(model)] == ["embedding.weight", "embedding.scale"]
