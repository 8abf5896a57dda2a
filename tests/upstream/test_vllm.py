"""Private interfaces of vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.upstream import vllm


def test_layers_that_the_model_does_not_have() -> None:
    manager = SimpleNamespace(modules={"a": 1}, get_adapter=lambda number: SimpleNamespace(loras={"a": 1, "b": number}))
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager)))
    assert vllm.unused_layers(worker, 1) == {"b"}
    del manager.modules
    with pytest.raises(ImportError, match="has no modules in SimpleNamespace, .* install the version of requirements/"):
        vllm.unused_layers(worker, 1)
    del worker.model_runner.lora_manager._adapter_manager
    with pytest.raises(ImportError, match=r"has no model_runner\.lora_manager\._adapter_manager"):
        vllm.unused_layers(worker, 1)


def test_steps_that_an_engine_has_begun() -> None:
    core = SimpleNamespace(batch_queue=[1])
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
    assert vllm.steps_begun(engine) == [1]
    del core.batch_queue
    with pytest.raises(ImportError, match=r"has no engine_core\.engine_core\.batch_queue"):
        vllm.steps_begun(engine)


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["get_layerwise_info", "_place_kernel_tensors", "_get_original_loader"])
def test_another_reload_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    monkeypatch.delattr(layerwise, name)
    with pytest.raises(ImportError, match=f"has no {name} in .*install the version of requirements/"):
        vllm.load_in_place([])


@pytest.mark.vllm
def test_experts_without_a_kernel_are_refused() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method: Any = object.__new__(UnquantizedFusedMoEMethod)
    model = SimpleNamespace(modules=lambda: [SimpleNamespace(), SimpleNamespace(quant_method=method)])
    method.moe_kernel = 3
    vllm.repack_experts(model)
    assert method.moe_kernel is None
    del method.__dict__["moe_kernel"]
    with pytest.raises(ImportError, match="has no moe_kernel"):
        vllm.repack_experts(model)
