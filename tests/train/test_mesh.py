"""Tensor, expert and data parallelism: any mesh trains as one process does, and goes on where another has stopped."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import set_state_dict
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeline.config import Config
from pipeline.models.checkpoint_reader import load_checkpoint
from pipeline.models.fsdp import full_state_dict
from pipeline.stats import reduce
from pipeline.train import ranks
from pipeline.train.checkpoint import _state
from pipeline.train.deal import Dealer
from pipeline.train.learner import Learner
from pipeline.train.setup import build_actor, build_critic
from pipeline.weights.load import parameters
from pipeline.weights.publish import named, pack
from tests.train.updates import (
    CPU,
    assert_same,
    assert_same_metrics,
    in_chunks,
    make_config,
    spawn,
    table,
    update,
    with_values,
)

MESHES = {"one": (1, 1, 1, 1), "tensor 2": (2, 2, 1, 1), "data 2": (2, 1, 1, 1), "tensor 2 x data 2": (4, 2, 1, 1)}
"""Ranks, and `actor.parallel.{tensor,expert,replicate}`."""
EXPERTS = {"one": (1, 1, 1, 1), "expert 2": (2, 2, 2, 1), "expert 2 x data 2": (4, 2, 2, 1)}
COPIES = {"copies 2 x shards 2": (4, 1, 1, 2), "copies 2 x tensor 2": (4, 2, 1, 2)}


def save_model(folder: Path, tie: bool = False, experts: bool = False) -> None:
    torch.manual_seed(2)
    sizes: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": tie,
    }
    if experts:
        more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        lm: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **more))
    else:
        lm = Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        for parameter in lm.parameters():
            # Larger weights than at the start of a training, so that every part of the model has an effect.
            parameter.add_(torch.randn_like(parameter) * (0.08 if parameter.ndim > 1 else 0.1))
    lm.save_pretrained(folder)


def settings(folder: str, mesh: tuple[int, int, int, int]) -> Config:
    # A small budget gives several micro-batches.
    config = make_config(folder, ppo_max_token_len_per_gpu=16, entropy_coeff=0.01)
    config.actor.parallel.tensor, config.actor.parallel.expert, config.actor.parallel.replicate = mesh[1:]
    config.critic.ppo_max_token_len_per_gpu = 16
    config.model.share_prompts = "never"
    return config


def step(learner: Learner, rows: pa.Table) -> list[Any]:
    """Train on the rows that come to this rank and its group; the metrics of all that lead."""
    own = pa.concat_tables(in_chunks(rows)[dist.get_rank() :: dist.get_world_size()])
    calls = []
    learner.module.register_forward_hook(lambda *_: calls.append(1))
    same_rows = learner.mesh.same_rows
    dealer = Dealer(CPU, learner.shape.mini_batches, 1, hidden_size=32, skips=False, idle=0.0, same_rows=same_rows)
    stats = update(learner, dealer(own))
    assert len(calls) >= 3, "one micro-batch alone would not show gradients that are summed twice"
    return [part for part in ranks.all_gather(stats if learner.leads else None) if part is not None]


def work(rank: int, folder: str, *names: str) -> None:
    """Two updates of an actor and of a critic on every mesh; a third of the actor after a checkpoint of another one."""
    torch.set_num_threads(1)
    for name in names:
        mesh = {**MESHES, **EXPERTS, **COPIES}[name]
        if rank >= mesh[0]:
            continue
        store = dist.FileStore(f"{folder}/store {name}", mesh[0])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh[0], timeout=timedelta(seconds=120))
        config = settings(f"{folder}/model", mesh)
        for build in (build_actor, build_critic):
            learner: Any = build(config, CPU, 100)
            shown = [reduce(step(learner, with_values(table(seed)))) for seed in (0, 1)][-1]
            state = full_state_dict(learner.module)
            if rank == 0:
                torch.save({"metrics": shown, "state": state}, f"{folder}/{name} {learner.name}.pt")
            if build is build_actor:
                publishes(learner, state)
                dcp.save(_state([learner]), checkpoint_id=f"{folder}/checkpoint {name}")
                go_on(learner, folder, name, names[0])
        dist.destroy_process_group()


def publishes(learner: Learner, state: dict[str, torch.Tensor]) -> None:
    """Engines join the whole weights from what each rank publishes, and nothing comes twice."""
    shards = ranks.all_gather(
        pack(named(learner.module), dist.get_rank(), torch.float32, 20_000, lambda data: data.copy())
    )
    if dist.get_rank() == 0:
        joined = {name: tensor.clone() for name, tensor in parameters(shards, lambda refs: refs)}
        assert joined.keys() == state.keys()
        assert all(torch.equal(joined[name], state[name]) for name in state)
        assert sum(len(bucket) for shard in shards for bucket in shard.buckets) == sum(t.nbytes for t in state.values())


def go_on(learner: Learner, folder: str, name: str, first: str) -> None:
    """A third step from the checkpoint of the first mesh."""
    state = _state([learner])
    load_checkpoint(state, f"{folder}/checkpoint {first}")
    part = state["actor"]
    set_state_dict(
        learner.module, learner.optimizer, model_state_dict=part["model"], optim_state_dict=part["optimizer"]
    )
    step(learner, with_values(table(2)))
    after = full_state_dict(learner.module)
    if dist.get_rank() == 0:
        torch.save(after, f"{folder}/{name} resumed.pt")


def run(folder: Path, names: list[str]) -> None:
    spawn(work, str(folder), *names, ranks=max({**MESHES, **EXPERTS, **COPIES}[name][0] for name in names))
    one = {kind: torch.load(folder / f"{names[0]} {kind}.pt") for kind in ("actor", "critic", "resumed")}
    for name in names[1:]:
        for kind in ("actor", "critic"):
            other = torch.load(folder / f"{name} {kind}.pt")
            assert_same_metrics(one[kind]["metrics"], other["metrics"])
            assert_same(one[kind]["state"], other["state"])
        assert_same(one["resumed"], torch.load(folder / f"{name} resumed.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
def test_tensor_parallel_trains_as_one_process(tmp_path: Path, tie: bool) -> None:
    save_model(tmp_path / "model", tie)
    run(tmp_path, ["one", "tensor 2 x data 2"] if tie else list(MESHES))


@pytest.mark.slow
def test_experts_on_different_ranks_train_as_one_process(tmp_path: Path) -> None:
    save_model(tmp_path / "model", experts=True)
    run(tmp_path, list(EXPERTS))


@pytest.mark.slow
def test_copies_of_shards_train_as_one_process(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    run(tmp_path, ["one", *COPIES])
