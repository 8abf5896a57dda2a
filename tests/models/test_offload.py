"""Activations in host memory: the same gradients, and only what checkpointing keeps is moved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import graph

from pipeline.config.model import ModelConfig
from pipeline.models.policy import load_policy


class Counted(graph.saved_tensors_hooks):
    """Copies saved tensors as `save_on_cpu` does between a GPU and its host, and counts them."""

    shapes: list[tuple[int, ...]] = []
    back = 0

    def __init__(self, pin_memory: bool) -> None:
        assert not pin_memory

        def save(tensor: Tensor) -> Tensor:
            Counted.shapes.append(tuple(tensor.shape))
            return tensor.clone()

        def load(saved: Tensor) -> Tensor:
            Counted.back += 1
            return saved

        super().__init__(save, load)


def gradients(model: Path, **settings: Any) -> dict[str, Tensor]:
    policy = load_policy(ModelConfig(path=str(model), **settings))
    ids = torch.arange(24).reshape(2, 12) + 5
    log_probs, *_ = policy(ids, torch.tensor([3, 4, 17]), torch.tensor([9, 8, 7]))
    log_probs.sum().backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def test_gradients_are_the_same_and_each_layer_moves_its_input(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gradients(tiny_model)
    monkeypatch.setattr(graph, "save_on_cpu", Counted)
    Counted.shapes, Counted.back = [], 0
    kept = gradients(tiny_model, enable_gradient_checkpointing=True)
    assert not Counted.shapes
    moved = gradients(tiny_model, enable_gradient_checkpointing=True, activation_offload=True)
    # Two layers, and beside them small things: the last norm keeps its input, its scale and its weight.
    inputs = [shape for shape in Counted.shapes if shape == (2, 12, 64)]
    assert 2 <= len(inputs) <= 5 and Counted.back >= 2
    assert not [shape for shape in Counted.shapes if len(shape) == 2 and shape[0] >= 64], "no weights of layers"
    for name, gradient in plain.items():
        torch.testing.assert_close(moved[name], gradient, rtol=1e-5, atol=1e-7)
        assert torch.equal(moved[name], kept[name])


def test_the_decoder_keeps_its_signature(tiny_model: Path) -> None:
    import inspect

    policy = load_policy(ModelConfig(path=str(tiny_model), activation_offload=True))
    assert "attention_mask" in inspect.signature(policy.decoder.forward).parameters
