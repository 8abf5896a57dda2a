"""The policy of Megatron's layers: it has the interface of `models.policy.Policy`, and is trained by `backend.py`."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from safetensors import safe_open
from torch import Tensor, nn

from pipeline.config.learner import ParallelConfig
from pipeline.config.model import ModelConfig
from pipeline.config.paths import model_folder
from pipeline.megatron.decoder import Decoder
from pipeline.megatron.device import on_device
from pipeline.megatron.names import Held, held, stacked
from pipeline.megatron.settings import transformer_config, unknown
from pipeline.models.attention import Layout
from pipeline.models.head import VocabularyPart
from pipeline.models.mesh import Mesh
from pipeline.models.packing import ImageInputs
from pipeline.models.policy import Policy
from pipeline.models.routes import Routers
from pipeline.models.weight_files import model_files
from pipeline.weights.publish import WeightPart


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
        """Yield whole tensors of the checkpoint on rank 0, layer by layer; see `save.gathered_blocks`."""
        kind = dtype or self.inner.config.params_dtype
        for stage in range(self.stage.count):
            own = list(self.parts(dist.get_rank(), kind)) if stage == self.stage.number else []
            places: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(places, sorted({_layer(part.name) for part in own}))
            for layer in sorted({name for names in places for name in names or ()}):
                mine = [
                    (part.name, part.shape, part.start, part.block.to(kind).cpu())
                    for part in own
                    if part.block.numel() and _layer(part.name) == layer
                ]
                sent: list[Any] | None = [None] * len(places) if dist.get_rank() == 0 else None
                dist.gather_object(mine, sent)
                block: dict[str, Tensor] = {}
                for name, shape, start, part in (one for sender in sent or () for one in sender):
                    whole = block.setdefault(name, torch.empty(shape, dtype=kind))
                    whole[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part
                yield block

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
        states = self._run(input_ids, positions, packing)[:, 0]
        if packing is not None and (share := packing.share) is not None:
            logit_index = logit_index.index_select(0, share.own) - share.group.rank() * len(states)
        return states.index_select(0, logit_index)

    def _head(self) -> tuple[Tensor, Tensor | None, VocabularyPart | None]:
        """See `Policy._head`."""
        weight, group = self.inner.head, parallel_state.get_tensor_model_parallel_group()
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


def _layer(name: str) -> str:
    """Return the layer of a tensor of the checkpoint; "" outside of layers."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return f"{int(found[1]):06}" if found else ""


def load_megatron(
    config: ModelConfig, parallel: ParallelConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype
) -> MegatronPolicy:
    """Build this rank's stage of the model of `config`, with its slices of the weights; a collective.

    Args:
        config: settings of the model.
        parallel: `actor.parallel`.
        mesh: the ranks.
        device: this rank's device.
        dtype: type of weights and computation.

    Raises ValueError for a model that Megatron's decoder cannot compute, or whose checkpoint lacks weights.
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
    if parallel.expert > 1:
        groups["expert_tensor_parallel_size"] = 1
    # Experts need it, and it saves activations.
    sequence = parallel.tensor > 1
    with on_device():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**groups)
        model_parallel_cuda_manual_seed(1)
        settings = transformer_config(
            hf, dtype, config.enable_gradient_checkpointing, {**groups, "sequence_parallel": sequence}
        )
        inner = Decoder(settings, hf, mesh.stage.first, mesh.stage.last).to(device)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(hf)
        folder = model_folder(config.path or "", "model.path")
        skeleton.name_or_path = skeleton.config._name_or_path = str(folder or config.path)
        policy = MegatronPolicy(inner, skeleton, mesh)
        with torch.no_grad():
            for one, value in read(policy, config.path or ""):
                one.parameter.copy_(value)
    return policy.train()


def read(policy: MegatronPolicy, path: str) -> Iterator[tuple[Held, Tensor]]:
    """Yield each parameter of this rank with its value in the checkpoint `path`, in the checkpoint's dtype.

    Raises ValueError if weights are missing or have another shape.
    """
    folder = Path(model_folder(path, "model.path") or model_files(path) or "")
    places: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        opened = safe_open(file, framework="pt")
        places |= dict.fromkeys(opened.keys(), opened)
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
        yield one, one.joined(parts)
