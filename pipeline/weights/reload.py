"""Updates of a vLLM model: vLLM's own reload, layer by layer, but embeddings and heads in place.

vLLM's reload gives a layer fresh memory, loads it, lets it pack its weights for the kernels, and copies the result to
the memory of the old weights. Embeddings and unquantised heads have nothing to change before that copy, and are a large
part of a small model: they are loaded in place. On CPUs a head also has a copy of its weights that is packed for the
GEMM, which takes as long as the rest of a small model: here each head gets it once, in another thread while the layers
load, and embeddings that are not heads get none.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pipeline.upstream.vllm import load_in_place, repack_experts


class Reload:
    """Updates of a vLLM model, one after the other.

    Args:
        model: all its weights are replaced in each update.
        device: "cpu", or the name of a GPU.
    """

    def __init__(self, model: Any, device: str) -> None:
        self._model, self._on_cpu = model, device == "cpu"
        self._pool = ThreadPoolExecutor(1, "head")
        self._packed: dict[Any, Future[None]] = {}
        if self._on_cpu:
            for head in self._heads():
                self._pack_when_loaded(head)

    def begin(self) -> None:
        """Prepare the model for `load_weights` of all its weights. No request may be computed before `finish`."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._packed.clear()
        initialize_layerwise_reload(self._model)
        load_in_place(self._embeddings())
        if self._on_cpu:
            repack_experts(self._model)

    def finish(self, model_config: Any) -> None:
        """Make the model compute with the weights that `load_weights` has got."""
        import torch
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, model_config)
        if not self._on_cpu:
            return
        heads = self._heads()
        for module in self._embeddings():
            if module in heads:
                # Without this it goes on computing logits with the packed weights of the previous version.
                (self._packed.get(module) or self._pool.submit(_pack, module)).result()
            else:
                module.cpu_linear = torch.nn.functional.linear

    def _pack_when_loaded(self, head: Any) -> None:
        load = head.weight.weight_loader

        def load_and_pack(*args: Any, **options: Any) -> None:
            load(*args, **options)
            self._packed[head] = self._pool.submit(_pack, head)

        head.weight.weight_loader = load_and_pack

    def _heads(self) -> list[Any]:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        embeddings = self._embeddings()
        # A tied head is a module of its own with the embedding's tensor, or the embedding itself.
        return [module for module in embeddings if isinstance(module, ParallelLMHead)] or embeddings

    def _embeddings(self) -> list[Any]:
        """Return embeddings and heads whose kernel reads the weights as they are."""
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            UnquantizedEmbeddingMethod,
            VocabParallelEmbedding,
        )

        return [
            module
            for module in self._model.modules()
            if isinstance(module, VocabParallelEmbedding) and type(module.quant_method) is UnquantizedEmbeddingMethod
        ]


def _pack(head: Any) -> None:
    head.quant_method.process_weights_after_loading(head)
