"""Weight updates of a vLLM model: vLLM's layer-by-layer reload, except for embeddings and heads.

vLLM's reload allocates new memory for a layer, loads the layer, packs its weights for the kernels, and copies the
result to the memory of the old weights. Embeddings and unquantised heads are not packed, and are a large part of a
small model, so here they are loaded directly into their memory. On CPUs a head also has a second copy of its weights,
packed for the matrix product; packing takes as long as the rest of a small model. Here each head is packed once per
update, in another thread while layers load, and embeddings that are not heads are not packed.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pipeline.upstream.vllm import load_in_place, repack_experts


class Reload:
    """Weight updates of a vLLM model: `begin`, the model's `load_weights`, `finish`, for each update.

    Args:
        model: vLLM's model; each update replaces all of its weights.
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
        """Prepare the model for an update by `load_weights`. The model must not be run before `finish`."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._packed.clear()
        initialize_layerwise_reload(self._model)
        load_in_place(self._embeddings())
        if self._on_cpu:
            repack_experts(self._model)

    def finish(self, model_config: Any) -> None:
        """Finish an update: from now on the model computes with the weights that `load_weights` has loaded."""
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
        """Return the embeddings and heads that are not quantised."""
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
