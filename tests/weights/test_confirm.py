"""An engine's word on what it has read: planted faults are found by name, and nothing else is called a fault."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import FinalError
from pipeline.weights.checkpoint_names import as_in_checkpoint, skeleton
from pipeline.weights.confirm import Confirmation, Watch, check
from pipeline.weights.load import parameters
from pipeline.weights.publish import pack, parts

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
QUERIES, VALUES = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts whose router has a bias that is a buffer."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("confirm")
    lm: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **SIZES))
    lm.get_buffer(BIAS).normal_()
    lm.save_pretrained(place)
    return place


class Engine(nn.Module):
    """An engine's model with a float32 parameter for each tensor; `change` stands for the faults of its loader."""

    def __init__(self, names: Iterable[str], change: Callable[[str, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.held = nn.ParameterDict()
        self.names, self.change = set(names), change

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name not in self.names:
                raise KeyError(name)
            taken = self.change(name, tensor)
            if taken is not None:
                self.held[name.replace(".", "-")].data.copy_(taken.float().t().contiguous().t())


def whole(name: str, tensor: Tensor) -> Tensor | None:
    return tensor


def sent(folder: Path, without: str = "") -> Iterator[tuple[str, Tensor]]:
    """What arrives of the trainer's model."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    weights = (part for part in parts(lm, 0, torch.bfloat16) if part.name != without)
    yield from parameters([pack(weights, 0, 4000, lambda buffer: buffer)], lambda refs: refs)


def confirmed(
    folder: Path, change: Callable[[str, Tensor], Tensor | None] = whole, without: str = "", extra: str = ""
) -> Confirmation:
    """What an engine confirms of a version that lacks the tensor `without`; it has the parameter `extra` more."""
    lm = skeleton(str(folder), trust_remote_code=False)
    arrived = dict(sent(folder, without))
    assert not arrived or arrived.get(BIAS, torch.zeros(1)).dtype == torch.float32
    converted = dict(as_in_checkpoint(lm, sent(folder)))
    engine = Engine(converted, change)
    for name, tensor in converted.items():
        engine.held[name.replace(".", "-")] = nn.Parameter(torch.zeros(tensor.shape))
    if extra:
        engine.held[extra] = nn.Parameter(torch.zeros(3))
    watch = Watch(engine, dict(engine.named_parameters()))
    watch.load(as_in_checkpoint(lm, iter(arrived.items())))
    return watch.confirmation(lm, set(arrived))


def said(*found: Confirmation) -> str:
    with pytest.raises(FinalError) as error:
        check(found, "glm4_moe (models/base)")
    assert "glm4_moe (models/base)" in str(error.value) and "use a model of another family" in str(error.value)
    return str(error.value)


def test_a_complete_version_is_confirmed(folder: Path) -> None:
    check([confirmed(folder)], "glm4_moe")


@pytest.mark.parametrize("name", [BIAS, VALUES, "model.layers.1.mlp.experts.down_proj"])
def test_a_tensor_that_is_not_sent_is_found(folder: Path, name: str) -> None:
    text = said(confirmed(folder, without=name))
    assert f"{name}: not published" in text
    assert "parameters of the engine that received no weights" in text


@pytest.mark.parametrize("name", [BIAS, "model.layers.1.mlp.experts.3.up_proj.weight", "model.norm.weight"])
def test_a_tensor_that_is_not_read_is_found(folder: Path, name: str) -> None:
    text = said(confirmed(folder, lambda n, tensor: None if n == name else tensor))
    assert f"{name}: published and not read by the engine" in text and "not published" not in text


def test_a_tensor_of_which_other_numbers_are_written_is_not_read(folder: Path) -> None:
    text = said(confirmed(folder, lambda name, tensor: torch.ones(tensor.shape) if name == VALUES else tensor))
    assert f"{VALUES}: published and not read by the engine" in text


def test_a_parameter_of_the_engine_that_nothing_is_written_to_is_found(folder: Path) -> None:
    assert "held.sink: parameters of the engine that received no weights" in said(confirmed(folder, extra="sink"))


def test_a_parameter_that_the_engine_has_for_loading_alone_is_not_needed() -> None:
    engine = Engine([], whole)
    engine.held["scale"] = nn.Parameter(torch.ones(1))
    lm: Any = nn.Module()
    lm._weight_conversions = []
    assert Watch(engine, ["held.scale"]).confirmation(lm, set()).left == {"held.scale"}
    assert not Watch(engine, []).confirmation(lm, set()).left


def test_many_names_are_counted(folder: Path) -> None:
    text = said(confirmed(folder, lambda name, tensor: None if "experts" in name else tensor))
    assert "and 11 more: published and not read" in text and text.count("model.layers.1.mlp.experts") == 4


def test_workers_read_their_own_experts_alone(folder: Path) -> None:
    def own(experts: str) -> Confirmation:
        def read(name: str, tensor: Tensor) -> Tensor | None:
            others = set("0123") - set(experts)
            return None if any(f"experts.{number}." in name for number in others) else tensor

        return confirmed(folder, read)

    parts = [own("01"), own("23")]
    assert all(part.unread for part in parts)
    check([Confirmation(part.unsent, part.unread, set()) for part in parts], "glm4_moe")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in said(own("01"), own("12"))


def test_a_buffer_that_follows_from_the_configuration_need_not_be_read(folder: Path, tmp_path: Path) -> None:
    lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    lm.get_buffer(BIAS).zero_()
    lm.save_pretrained(tmp_path)
    found = confirmed(tmp_path, lambda n, tensor: None if n == BIAS else tensor)
    assert not found.unread and not found.unsent


def test_a_name_that_the_loader_refuses_is_told(folder: Path) -> None:
    watch = Watch(Engine(["a"], whole), ())
    with pytest.raises(FinalError, match=r"the engine's Engine cannot load b.c as it is trained \(KeyError: 'b.c'\)"):
        watch.load([("b.c", torch.ones(2))])


def test_what_fails_on_the_way_is_no_fault_of_the_loader() -> None:
    def arriving() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(2)
        raise ValueError("weights bucket 1 arrived damaged")

    watch = Watch(Engine(["a"], lambda name, tensor: None), ())
    with pytest.raises(ValueError, match="arrived damaged"):
        watch.load(arriving())


def test_writes_to_weights_without_memory_are_none() -> None:
    """vLLM's layers have none while they wait for all of their tensors."""
    engine = Engine(["direct"], whole)
    engine.held["direct"] = nn.Parameter(torch.empty(2, 2, device="meta"))
    watch = Watch(engine, dict(engine.named_parameters()))
    watch.load([("direct", torch.ones(2, 2))])
    assert set(watch.unread) == {"direct"}
