"""Megatron's layers train as the model of `transformers` does in one process, in every layout."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline.advantage.kl_controller import FixedKL
from pipeline.config import Config
from pipeline.config.learner import ParallelConfig
from pipeline.errors import FinalError
from pipeline.export.export import _saved_weights, read_weights
from pipeline.models.fsdp import full_state_dict
from pipeline.rows import flat
from pipeline.storage.checkpoints import FOLDER, folder_name
from pipeline.train import ranks
from pipeline.train.restore import restore
from pipeline.train.setup import build_actor
from pipeline.weights.load import parameters
from pipeline.weights.publish import WeightPublisher
from tests.losses import batches
from tests.megatron import shim
from tests.train.test_mesh import CLIP, LONGEST, write_checkpoint
from tests.train.test_stages import VARIANTS, rows, step
from tests.train.updates import CPU, assert_same, assert_same_metrics, make_config, spawn, with_column

LAYOUTS = {
    "one": (1, ParallelConfig()),
    "data 2": (2, ParallelConfig()),
    "tensor 2": (2, ParallelConfig(tensor=2)),
    "pipeline 2": (2, ParallelConfig(pipeline=2)),
    "context 2": (2, ParallelConfig(sequence=2)),
    "expert 2": (2, ParallelConfig(expert=2)),
    "tensor 2 x expert 2": (2, ParallelConfig(tensor=2, expert=2)),
    "pipeline 2 x data 2": (4, ParallelConfig(pipeline=2)),
    "pipeline 2 x tensor 2": (4, ParallelConfig(pipeline=2, tensor=2)),
    "tensor 2 x context 2": (4, ParallelConfig(tensor=2, sequence=2)),
    "pipeline 2 x expert 2": (4, ParallelConfig(pipeline=2, expert=2)),
    "tensor 2 x data 2 x expert 4": (4, ParallelConfig(tensor=2, expert=4)),
}
"""Ranks, and `actor.parallel`."""
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen2 tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8)),
    "qwen3 tied": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, head_dim=8, **EXPERTS)),
}
STEPS = 2
TOLERANCE = 2e-5


def save_family(folder: Path, family: str) -> None:
    torch.manual_seed(2)
    kind, config = FAMILIES[family]
    lm = kind(config)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.08 if parameter.ndim > 1 else 0.1))
    lm.save_pretrained(folder)


def settings(folder: str, strategy: str, parallel: ParallelConfig, loss: str, further: bool) -> Config:
    tokens = max(LONGEST, 40 * parallel.ranks_with_same_rows // dist.get_world_size())
    config = make_config(folder, ppo_max_token_len_per_gpu=tokens // parallel.sequence)
    config.actor.strategy, config.actor.parallel, config.actor.grad_clip = strategy, parallel, CLIP
    config.actor.policy_loss = batches.actor(loss_mode=loss).policy_loss
    config.actor.optim.weight_decay = 0.1
    if loss == "gspo":
        config.actor.loss_agg_mode = "seq-mean-token-mean"
    if further:
        config.actor.entropy_coeff, config.actor.use_kl_loss, config.actor.kl_loss_coef = 0.01, True, 0.3
    config.model.enable_gradient_checkpointing = further
    return config


def with_reference(made: Any, wanted: bool) -> Any:
    """Rows with log-probs of a reference, if wanted."""
    if not wanted:
        return made
    return with_column(made, "ref_log_probs", flat(made, "rollout_log_probs")[0] + 0.1)


def plain(state: dict[str, torch.Tensor], kind: Any, config: Any) -> dict[str, torch.Tensor]:
    """The names of the checkpoint for the weights of either strategy."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        lm = kind(config)
    named = {name.removeprefix("lm."): tensor for name, tensor in state.items()}
    return dict(revert_weight_conversion(lm, named))


def train(folder: str, family: str, strategy: str, layout: str, variant: str) -> None:
    """Updates with a checkpoint after the first; weights and metrics are written to a file."""
    loss, further = VARIANTS[variant]
    config = settings(f"{folder}/{family}", strategy, LAYOUTS[layout][1], loss, further)
    actor = build_actor(config, CPU, 100)
    metrics = []
    for number in range(STEPS):
        metrics.append(step(actor, with_reference(rows(number, False), further)))
        if number == 0 and strategy == "megatron":
            write_checkpoint([actor], f"{folder}/{family} {variant} {layout}/{FOLDER}/{folder_name(1)}")
    state = full_state_dict(actor.module)
    if strategy == "megatron":
        publishes(actor, state)
    if dist.get_rank() == 0:
        named = plain(state, *FAMILIES[family])
        torch.save({"metrics": metrics, "state": named}, f"{folder}/{family} {variant} {strategy} {layout}.pt")


def resume(folder: str, family: str, variant: str, begun: str, layout: str) -> None:
    """The second update, after the checkpoint of another layout."""
    loss, further = VARIANTS[variant]
    actor = build_actor(settings(f"{folder}/{family}", "megatron", LAYOUTS[layout][1], loss, further), CPU, 100)
    restore([actor], FixedKL(0.0), f"{folder}/{family} {variant} {begun}")
    metrics = [{}, step(actor, with_reference(rows(1, False), further))]
    state = full_state_dict(actor.module)
    if dist.get_rank() == 0:
        named = plain(state, *FAMILIES[family])
        torch.save({"metrics": metrics, "state": named}, f"{folder}/{family} {variant} resumed {layout}.pt")


def publishes(actor: Any, state: dict[str, torch.Tensor]) -> None:
    """Parts of all ranks put together are the model, bit by bit, and nothing comes twice."""
    publisher = WeightPublisher(dist.get_rank(), torch.float32, 20_000, lambda data: data.copy(), mesh=actor.mesh)
    shards = ranks.all_gather(publisher.pack(actor.module, 1))
    if dist.get_rank() == 0:
        joined = {name: tensor.clone() for name, tensor in parameters(shards, lambda refs: refs)}
        assert joined.keys() == state.keys()
        assert all(torch.equal(joined[name], state[name]) for name in state)
        assert sum(len(bucket) for shard in shards for bucket in shard.buckets) == sum(t.nbytes for t in state.values())


def work(rank: int, folder: str, cases: str) -> None:
    """Each case: family, variant, strategy and layout; or family, variant, "resume", old and new layout."""
    torch.set_num_threads(1)
    shim.install()
    for number, case in enumerate(cases.split("; ")):
        family, variant, what, *layouts = case.split(", ")
        count = LAYOUTS[layouts[-1]][0]
        if rank < count:
            store = dist.FileStore(f"{folder}/store {number}", count)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
            if what == "resume":
                resume(folder, family, variant, *layouts)
            else:
                train(folder, family, what, layouts[0], variant)
            dist.destroy_process_group()


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for mine, theirs in zip(one["metrics"], other["metrics"], strict=True):
        if mine and theirs:
            assert_same_metrics(mine, theirs)
    assert_same(one["state"], other["state"], TOLERANCE)


def exports(checkpoint: Path, family: str, state: dict[str, torch.Tensor]) -> None:
    """A checkpoint holds the weights under the names of a model's files."""
    kind, config = FAMILIES[family]
    with torch.device("meta"):
        lm = kind(config)
    weights = _saved_weights(lm, read_weights(checkpoint, "actor"), checkpoint, as_files=True)
    assert {name: tensor.shape for name, tensor in weights.items()} == {name: t.shape for name, t in state.items()}


DENSE = (
    *("one", "data 2", "tensor 2", "pipeline 2", "context 2"),
    *("pipeline 2 x data 2", "pipeline 2 x tensor 2", "tensor 2 x context 2"),
)
MIXTURE = (
    *("one", "tensor 2", "pipeline 2", "expert 2", "tensor 2 x expert 2"),
    *("pipeline 2 x expert 2", "tensor 2 x data 2 x expert 4"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layouts", "variants"),
    [
        pytest.param("qwen3 tied", ("pipeline 2 x tensor 2", "context 2"), ["vanilla"], id="dense"),
        pytest.param("qwen3_moe", ("pipeline 2 x expert 2", "tensor 2"), ["vanilla"], id="experts"),
        pytest.param("qwen3 tied", DENSE, ["vanilla"], id="dense everywhere", marks=pytest.mark.long),
        pytest.param("qwen3_moe", MIXTURE, ["vanilla"], id="experts everywhere", marks=pytest.mark.long),
        pytest.param("llama", ("one", "tensor 2"), ["gspo with KL and entropy"], id="llama"),
        pytest.param("qwen2 tied", ("tensor 2", "pipeline 2"), ["clip_cov"], id="qwen2", marks=pytest.mark.long),
    ],
)
def test_every_layout_trains_as_transformers_in_one_process(
    tmp_path: Path, family: str, layouts: tuple[str, ...], variants: list[str]
) -> None:
    save_family(tmp_path / family, family)
    cases = []
    for variant in variants:
        cases += [f"{family}, {variant}, fsdp, one"]
        cases += [f"{family}, {variant}, megatron, {layout}" for layout in layouts]
        # Each goes on from the one before it, the first from the last.
        cases += [
            f"{family}, {variant}, resume, {begun}, {layout}"
            for begun, layout in zip((layouts[-1], *layouts), layouts, strict=False)
        ]
    spawn(work, str(tmp_path), "; ".join(cases), ranks=max(LAYOUTS[name][0] for name in layouts))
    for variant in variants:
        expected = torch.load(tmp_path / f"{family} {variant} fsdp one.pt")
        for layout in layouts:
            same(expected, torch.load(tmp_path / f"{family} {variant} megatron {layout}.pt"))
            same(expected, torch.load(tmp_path / f"{family} {variant} resumed {layout}.pt"))
            exports(tmp_path / f"{family} {variant} {layout}" / FOLDER / folder_name(1), family, expected["state"])


MUTATIONS = {
    "tied gradients": ("megatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads", "pipeline 2"),
    "norms of a stage": ("megatron.core.optimizer.optimizer.get_grad_norm_fp32", "pipeline 2"),
    "gradients of norms": (
        "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads",
        "tensor 2",
    ),
    "metrics": ("pipeline.models.mesh.Mesh.leads", "pipeline 2"),
}
"""What is left out, and the layout that shows it."""


def mutated_work(rank: int, folder: str, mutation: str) -> None:
    place, layout = MUTATIONS[mutation]
    family, variant = "qwen3 tied", "vanilla"
    if rank == 0:
        work(rank, folder, f"{family}, {variant}, fsdp, one")
    torch.set_num_threads(1)
    shim.install()
    if mutation == "norms of a stage":
        import megatron.core.optimizer.optimizer as optimizer

        change: Any = patch.object(
            optimizer, "get_grad_norm_fp32", lambda grads, **_: float(torch.stack([g.norm() for g in grads]).norm())
        )
    elif mutation == "metrics":
        change = patch(place, lambda self, rank: rank == 0)
    else:
        change = patch(place, lambda *_, **__: None)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with change:
        train(folder, family, "megatron", layout, variant)
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_part_that_is_left_out_is_found(tmp_path: Path, mutation: str) -> None:
    save_family(tmp_path / "qwen3 tied", "qwen3 tied")
    spawn(mutated_work, str(tmp_path), mutation, ranks=2)
    name = "qwen3 tied vanilla"
    expected = torch.load(tmp_path / f"{name} fsdp one.pt")
    found = torch.load(tmp_path / f"{name} megatron {MUTATIONS[mutation][1]}.pt")
    with pytest.raises(AssertionError):
        same(expected, found)


def rounded_work(rank: int, folder: str) -> None:
    """Steps in bfloat16, with the masters before the first one; and what resumes a checkpoint of FSDP."""
    torch.set_num_threads(1)
    shim.install()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    config = settings(f"{folder}/qwen3", "megatron", ParallelConfig(tensor=2), "vanilla", False)
    config.actor.fsdp.param_dtype = "bfloat16"
    actor = build_actor(config, CPU, 100)
    assert {parameter.dtype for parameter in actor.module.parameters()} == {torch.bfloat16}
    stored = load_file(f"{folder}/qwen3/model.safetensors")
    for name, value in actor.backend.training_state()["optimizer"].items():
        if name.endswith(".master"):
            assert torch.equal(value.local, stored[name.removesuffix(".master")][value.block.slices])
    metrics = step(actor, rows(0, False))
    with pytest.raises(FinalError, match="actor.strategy=fsdp, and a run with actor.strategy=megatron cannot read it"):
        restore([actor], FixedKL(0.0), f"{folder}/run")
    if rank == 0:
        torch.save(metrics, f"{folder}/rounded.pt")
    dist.destroy_process_group()


def exact_work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/one", 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=1)
    actor = build_actor(settings(f"{folder}/qwen3", "fsdp", ParallelConfig(), "vanilla", False), CPU, 100)
    metrics = step(actor, rows(0, False))
    write_checkpoint([actor], f"{folder}/run/{FOLDER}/{folder_name(1)}")
    torch.save(metrics, f"{folder}/exact.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_masters_have_what_bfloat16_weights_are_rounded_from(tmp_path: Path) -> None:
    save_family(tmp_path / "qwen3", "qwen3")
    spawn(exact_work, str(tmp_path), ranks=1)
    spawn(rounded_work, str(tmp_path), ranks=2)
    rounded, exact = torch.load(tmp_path / "rounded.pt"), torch.load(tmp_path / "exact.pt")
    assert rounded["actor/grad_norm"] == pytest.approx(exact["actor/grad_norm"], rel=0.03)
    assert rounded["actor/grad_norm"] != exact["actor/grad_norm"]
