"""How vLLM takes new weights: its own reload, layer by layer, but embeddings and heads in place.

vLLM's reload gives a layer fresh memory, loads it, lets it pack its weights for the kernels, and copies the result to
where the old weights are. Embeddings and unquantised heads have nothing to change before that copy, and are a large
part of a small model: they are loaded in place. On CPUs a head also has a copy of its weights that is packed for the
GEMM; here each head gets it once, and embeddings that are no heads get none.
"""

from typing import Any


def begin(model: Any, device: str) -> None:
    """Prepare a vLLM model for `load_weights` of all its weights. No request may be computed before `finish`."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    initialize_layerwise_reload(model)
    for module in _embeddings(model):
        info = get_layerwise_info(module)
        _place_kernel_tensors(module, info)
        info.reset()
    if device == "cpu":
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                # vLLM packs experts for the CPU's kernel when it makes that kernel, and no later ones.
                method.moe_kernel = None


def finish(model: Any, model_config: Any, device: str) -> None:
    """Make a model compute with the weights that `load_weights` has got."""
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    if device != "cpu":
        return
    embeddings = _embeddings(model)
    # A tied head is a module of its own with the embedding's tensor, or the embedding itself.
    heads = [module for module in embeddings if isinstance(module, ParallelLMHead)] or embeddings
    for module in embeddings:
        if module in heads:
            # Without this it goes on computing logits with the packed weights of the previous version.
            module.quant_method.process_weights_after_loading(module)
        else:
            module.cpu_linear = torch.nn.functional.linear


def _embeddings(model: Any) -> list[Any]:
    """Embeddings and heads whose kernel reads the weights as they are."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    return [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and type(module.quant_method) is UnquantizedEmbeddingMethod
    ]
