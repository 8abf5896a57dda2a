"""The policy of Megatron's layers: it has the interface of `models.policy.Policy`, and is trained by `backend.py`."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from safetensors import safe_open
from torch import Tensor, nn

from pipeline.config.learner import ParallelConfig
from pipeline.config.model import ModelConfig
from pipeline.config.paths import model_folder
from pipeline.megatron.decoder import Decoder
from pipeline.megatron.device import on_device
from pipeline.megatron.names import Held, held, stacked
from pipeline.megatron.settings import experts_of, transformer_config, unknown
from pipeline.models.attention import Layout, at
from pipeline.models.head import VocabularyPart
from pipeline.models.mesh import Mesh
from pipeline.models.packing import ImageInputs
from pipeline.models.policy import Policy
from pipeline.models.routes import Routers
from pipeline.models.save import receive, send
from pipeline.models.state import tensors
from pipeline.models.weight_files import find_weights, model_files
from pipeline.upstream.torch import group_deadline
from pipeline.weights.publish import NOTHING, WeightPart


class MegatronPolicy(Policy):
    """This rank's stage of a policy, of Megatron's layers.

    Args:
        decoder: the stage.
        skeleton: model of `transformers` without weights, which knows the names and settings of a checkpoint.
        mesh: the ranks; its groups have the same ranks as Megatron's.
    """

    def __init__(self, decoder: Decoder, skeleton: Any, mesh: Mesh) -> None:
        nn.Module.__init__(self)
        self.inner = decoder
        # No submodule, whose weights would count as the policy's.
        object.__setattr__(self, "lm", skeleton)
        self.stage, self.mesh = mesh.stage, mesh
        self.borrowed = frozenset()
        self.image_reader = None
        self.softcap, self.scale = None, 1.0
        self.routers = Routers(nn.Module())

    @property
    def hf(self) -> Any:
        """Configuration of the model of `transformers`."""
        return self.lm.config

    @property
    def decoder(self) -> Any:
        """The skeleton's decoder, for its class and settings."""
        return self.lm.get_decoder()

    @property
    def packed_only(self) -> bool:
        """True: the attention of these layers is over packed rows."""
        return True

    def held(self) -> list[Held]:
        """Return the parameters of this rank, with their blocks of the checkpoint's tensors."""
        return list(held(self.inner, self.hf))

    def parts(self, rank: int, dtype: torch.dtype) -> Iterator[WeightPart]:
        """Yield this rank's parts of all tensors of its stage, in one order on all ranks of the stage; see
        `weights.publish.parts`."""
        found = [one for one in self.held() if not one.copied]
        made: dict[str, Callable[[], WeightPart]] = {}
        for one in found:
            for number, block in enumerate(() if one.expert is not None else one.blocks):
                made[block.name] = partial(_part, one, number, dtype)
        for name, experts in stacked(found).items():
            made[name] = partial(_experts_part, name, experts, self.hf.num_experts, dtype)
        for name in sorted(made):
            yield made[name]()

    def blocks(self, dtype: torch.dtype | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield whole tensors of the model on rank 0, layer by layer; see `save.gathered_blocks`."""
        kind, rank, size = dtype or self.inner.config.params_dtype, dist.get_rank(), self.mesh.stage_ranks
        layers = groupby(self.parts(rank, kind), lambda part: _layer(part.name))
        for stage in range(self.stage.count):
            first = stage * size
            if stage == self.stage.number:
                for _, parts in layers:
                    own = [
                        (replace(part, block=NOTHING), part.block.to("cpu", kind))
                        for part in parts
                        if part.block.numel()
                    ]
                    if rank > 0:
                        send(own)
                    else:
                        yield _whole(chain(own, *(receive(other) or () for other in range(1, size))))
                if first > 0:
                    send(None)
            elif rank == 0:
                while (found := [receive(other) for other in range(first, first + size)])[0] is not None:
                    yield _whole(chain(*(parts or () for parts in found)))

    def _run(self, input_ids: Tensor, positions: Tensor | None, packing: Layout | None) -> Tensor:
        assert positions is not None and packing is not None
        if packing.share is not None:
            input_ids, positions = packing.share.cut(input_ids), packing.share.cut(positions)
        states: Tensor = self.inner(input_ids, positions, packing)
        return states

    def _pass_on(
        self, input_ids: Tensor, positions: Tensor | None, packing: Layout | None, hidden: Tensor | None
    ) -> Tensor:
        """See `Policy._pass_on`. Megatron's schedule has given the hidden states to the decoder."""
        return self._run(input_ids, positions, packing)

    def _states(
        self,
        input_ids: Tensor,
        logit_index: Tensor,
        positions: Tensor | None,
        packing: Layout | None,
        images: ImageInputs | None,
        hidden: Tensor | None,
    ) -> Tensor:
        """See `Policy._states`."""
        return at(self._run(input_ids, positions, packing).transpose(0, 1), logit_index, packing)

    def _head(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, VocabularyPart | None]:
        """See `Policy._head`."""
        weight, group = self.inner.head.to(dtype), parallel_state.get_tensor_model_parallel_group()
        return weight, None, VocabularyPart(group.rank() * len(weight), group) if group.size() > 1 else None


def _part(one: Held, number: int, dtype: torch.dtype) -> WeightPart:
    """Return this rank's part of block `number` of a parameter."""
    block = one.blocks[number]
    if not one.owned:
        return WeightPart(block.name, block.shape, dtype)
    return WeightPart(block.name, block.shape, dtype, one.divided(one.parameter.detach())[number], block.start)


def _experts_part(name: str, experts: list[Held], count: int, dtype: torch.dtype) -> WeightPart:
    """Return this rank's part of the tensor of all experts of a layer, as `transformers` has it in memory.

    Args:
        name: name of the tensor.
        experts: parameters of this rank's experts, neighbours in order.
        count: number of experts.
        dtype: type in which the tensor is sent.
    """
    shape = (count, *experts[0].parameter.shape)
    if not experts[0].owned:
        return WeightPart(name, shape, dtype)
    assert experts[0].expert is not None
    block = torch.stack([one.parameter.detach() for one in experts])
    return WeightPart(name, shape, dtype, block, (experts[0].expert, *(0 for _ in shape[1:])))


def _whole(parts: Iterable[tuple[WeightPart, Tensor]]) -> dict[str, Tensor]:
    """Return whole tensors from the parts of all ranks, each with its block."""
    whole: dict[str, Tensor] = {}
    for part, block in parts:
        made = whole.setdefault(part.name, torch.empty(part.shape, dtype=part.dtype))
        made[tuple(slice(a, a + n) for a, n in zip(part.start, block.shape, strict=True))] = block
    return whole


def _layer(name: str) -> str:
    """Return the layer of a tensor of the checkpoint; "" outside of layers."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return f"{int(found[1]):06}" if found else ""


def load_megatron(
    config: ModelConfig, parallel: ParallelConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype
) -> MegatronPolicy:
    """Build this rank's stage of the model of `config`; a collective. `MegatronBackend` reads the weights.

    Args:
        config: settings of the model.
        parallel: `actor.parallel`.
        mesh: the ranks.
        device: this rank's device.
        dtype: type of weights and computation.

    Raises ValueError for a model that Megatron's decoder cannot compute, or for another Adam than torch's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoConfig.from_pretrained(config.path or "", trust_remote_code=config.trust_remote_code)
    if reasons := list(unknown(hf.to_diff_dict() | {"model_type": hf.model_type})):
        raise ValueError(f"actor.strategy=megatron cannot compute model.path={config.path}: {'; '.join(reasons)}")
    groups = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.sequence,
        "expert_model_parallel_size": parallel.expert,
    }
    if experts_of(hf):
        groups["expert_tensor_parallel_size"] = 1
    if not USING_PYTORCH_OPTIMIZER:
        raise ValueError(
            "actor.strategy=megatron steps with AdamW of torch, but TransformerEngine or Apex is installed, whose Adam "
            "Megatron would take; it was not tried, so remove that package, or set actor.strategy=fsdp"
        )
    # Experts need it, and it saves activations.
    sequence = parallel.tensor > 1
    with on_device():
        parallel_state.destroy_model_parallel()
        minutes = math.ceil(group_deadline(device).total_seconds() / 60)
        parallel_state.initialize_model_parallel(**groups, distributed_timeout_minutes=minutes)
        model_parallel_cuda_manual_seed(1)
        settings = transformer_config(
            hf, dtype, config.enable_gradient_checkpointing, {**groups, "sequence_parallel": sequence}
        )
        inner = Decoder(settings, hf, mesh.stage.first, mesh.stage.last).to(device)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(hf)
        folder = model_folder(config.path or "", "model.path")
        skeleton.name_or_path = skeleton.config._name_or_path = str(folder or config.path)
    return MegatronPolicy(inner, skeleton, mesh).train()


def read(policy: MegatronPolicy, path: str) -> Iterator[tuple[Held, Tensor]]:
    """Yield each parameter of this rank with its value in the checkpoint `path`, in the checkpoint's dtype.

    Raises ValueError if weights are missing, have another shape, or are not known.
    """
    from transformers.core_model_loading import revert_weight_conversion

    places: dict[str, Any] = {}
    for file in find_weights(Path(model_folder(path, "model.path") or model_files(path) or "")).files:
        if file.suffix != ".safetensors":
            raise ValueError(f"model.path={path} has weights in {file.name}; save them as safetensors")
        opened = safe_open(file, framework="pt")
        places |= dict.fromkeys(opened.keys(), opened)
    known = revert_weight_conversion(policy.lm, dict(tensors(policy.lm)))
    head = "lm_head.weight"
    if others := sorted(name for name in places.keys() - known.keys() - {head} if not name.endswith("inv_freq")):
        raise ValueError(f"model.path={path} holds {others[0]}, which actor.strategy=megatron has no place for")
    for one in policy.held():
        parts = []
        for block in one.blocks:
            if block.name not in places:
                raise ValueError(f"model.path={path} lacks {block.name}; give a complete checkpoint.")
            stored = places[block.name].get_slice(block.name)
            if tuple(stored.get_shape()) != block.shape:
                raise ValueError(
                    f"model.path={path} holds {block.name} of shape {stored.get_shape()}, but config.json says "
                    f"{list(block.shape)}"
                )
            parts.append(stored[block.slices])
        if one.copied and head in places and not torch.equal(places[head].get_slice(head)[block.slices], parts[0]):
            raise ValueError(
                f"the head of model.path={path} is tied to its embedding by config.json, but its files hold another "
                "head; set tie_word_embeddings to false there"
            )
        yield one, one.joined(parts)
