"""Tensor, expert and data parallelism: any mesh trains as one process does, and goes on where another has stopped."""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeline.advantage.kl_controller import FixedKL
from pipeline.config import Config
from pipeline.config.learner import ParallelConfig
from pipeline.models import policy
from pipeline.models.fsdp import full_state_dict
from pipeline.stats import reduce
from pipeline.storage.checkpoints import FOLDER, PROGRESS, complete_name, folder_name
from pipeline.store.cursor import PromptCursor
from pipeline.train import ranks
from pipeline.train.checkpoint import training_state
from pipeline.train.deal import Dealer
from pipeline.train.learner import Learner
from pipeline.train.own_state import strategy_of
from pipeline.train.restore import restore
from pipeline.train.setup import build_actor, build_critic
from pipeline.weights.load import parameters
from pipeline.weights.publish import WeightPublisher
from tests.losses import batches
from tests.train.updates import (
    CPU,
    N,
    assert_same,
    assert_same_metrics,
    in_chunks,
    make_config,
    spawn,
    table,
    update,
    with_routes,
    with_supports,
    with_values,
)

MESHES = {
    "one": (1, ParallelConfig()),
    "tensor 2": (2, ParallelConfig(tensor=2)),
    "data 2": (2, ParallelConfig()),
    "tensor 2 x data 2": (4, ParallelConfig(tensor=2)),
    "expert 2": (2, ParallelConfig(tensor=2, expert=2)),
    "expert 2 x data 2": (4, ParallelConfig(tensor=2, expert=2)),
    "copies 2 x shards 2": (4, ParallelConfig(replicate=2)),
    "copies 2 x tensor 2": (4, ParallelConfig(tensor=2, replicate=2)),
    "sequence 2": (2, ParallelConfig(sequence=2)),
    "sequence 2 x data 2": (4, ParallelConfig(sequence=2)),
    "sequence 4, more than key heads": (4, ParallelConfig(sequence=4)),
    "sequence 2 x tensor 2": (4, ParallelConfig(sequence=2, tensor=2)),
    "copies 2 x sequence 2": (4, ParallelConfig(sequence=2, replicate=2)),
    "stages 2": (2, ParallelConfig(pipeline=2)),
    "stages 2 x data 2": (4, ParallelConfig(pipeline=2)),
    "stages 2 x copies 2": (4, ParallelConfig(pipeline=2, replicate=2)),
    "stages 2 x tensor 2": (4, ParallelConfig(pipeline=2, tensor=2)),
    "stages 2 x sequence 2": (4, ParallelConfig(pipeline=2, sequence=2)),
    "stages 2 x expert 2": (4, ParallelConfig(pipeline=2, tensor=2, expert=2)),
    "stages 3": (3, ParallelConfig(pipeline=3)),
    "stages 4": (4, ParallelConfig(pipeline=4)),
}
"""Ranks, and `actor.parallel`."""
DENSE = (
    *("one", "tensor 2 x data 2", "copies 2 x shards 2", "copies 2 x tensor 2"),
    *("sequence 2 x data 2", "sequence 4, more than key heads", "sequence 2 x tensor 2"),
)
STAGED = ("one", "data 2", "stages 2 x data 2", "stages 4", "stages 2 x tensor 2", "stages 2 x sequence 2")
FEW = ("one", "tensor 2 x data 2", "copies 2 x shards 2", "sequence 2 x data 2")
FEW_STAGED = ("one", "stages 2 x data 2", "stages 2 x tensor 2")
PARTS = ("one", "tensor 2", "data 2", "sequence 2", "copies 2 x sequence 2")
"""Meshes of which every dimension is in one of `DENSE` too."""
BUILD = {"actor": build_actor, "critic": build_critic}
VOCABULARY = 320
EXPERTS = 8
LONGEST = 16
"""Tokens of a row, with its prompt."""
LOSSES, CHOOSING = ("clip_cov", "kl_cov"), {"one", "tensor 2 x data 2"}
"""Losses that choose among the tokens of all ranks, and the meshes that try them."""
CLIP = 0.3
"""Below every gradient's norm, so that clipping has an effect."""
DEADLINE = timedelta(seconds=120)


def save_model(folder: Path, tie: bool = False, experts: bool = False, key_heads: int = 2, layers: int = 2) -> None:
    torch.manual_seed(2)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": key_heads,
        "head_dim": 8,
        "tie_word_embeddings": tie,
    }
    if experts:
        more = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        lm: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **more))
    else:
        lm = Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        for parameter in lm.parameters():
            # Larger weights than at the start of a training, so that every part of the model has an effect.
            parameter.add_(torch.randn_like(parameter) * (0.08 if parameter.ndim > 1 else 0.1))
    lm.save_pretrained(folder)


def settings(folder: str, parallel: ParallelConfig) -> Config:
    # Small budgets give several micro-batches on every mesh.
    tokens = max(LONGEST, 40 * parallel.ranks_with_same_rows // dist.get_world_size())
    config = make_config(folder, ppo_max_token_len_per_gpu=tokens // parallel.sequence, entropy_coeff=0.01)
    config.actor.parallel = parallel
    config.actor.grad_clip = config.critic.grad_clip = CLIP
    # The reference is a second model on the same mesh.
    config.actor.use_kl_loss, config.actor.kl_loss_coef = True, 0.3
    config.scoring.reference.placement = "train_workers"
    config.model.share_prompts = "never"
    # So is the teacher, which differs from the policy after the first step.
    config.teacher.path, config.teacher.placement = folder, "train_workers"
    config.algorithm.teacher_coef, config.actor.distill_coef, config.actor.distill_top_k = 0.2, 0.5, 200
    return config


def step(learner: Learner, rows: pa.Table) -> list[Any]:
    """Train on the rows that come to this rank and its group; the metrics of all that lead."""
    own = pa.concat_tables(in_chunks(rows)[dist.get_rank() :: dist.get_world_size()])
    calls = []
    learner.module.register_forward_hook(lambda *_: calls.append(1))
    unit = N if learner.shares_prompts else 1
    dealer = Dealer(CPU, learner.shape.mini_batches, unit, hidden_size=32, skips=False, idle=0.0, mesh=learner.mesh)
    with patch.object(policy, "token_log_probs", wraps=policy.token_log_probs) as head:
        stats = update(learner, dealer(own))
    assert len(calls) >= 3, "one micro-batch alone would not show gradients that are summed twice"
    vocabulary = VOCABULARY // (learner.mesh.tensor.size() if learner.mesh.tensor else 1)
    assert all(len(call.args[1]) == vocabulary for call in head.call_args_list), "each rank has its part of the logits"
    assert bool(head.call_args_list) == (learner.name == "actor" and learner.mesh.stage.last)
    return [part for part in ranks.all_gather(stats if learner.leads else None) if part is not None]


def connected(rank: int, folder: str, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Numbers and names of the meshes that `rank` belongs to; neighbours of as many ranks share a process group."""
    torch.set_num_threads(1)
    counts = [MESHES[name][0] for name in names]
    for number, name in enumerate(names):
        if rank < (count := counts[number]):
            if not dist.is_initialized():
                store = dist.FileStore(f"{folder}/store {number}", count)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=DEADLINE)
            yield number, name
            if counts[number + 1 : number + 2] != [count]:
                # Before, torch's caches of DTensors serve meshes that are equal by the groups of the first one.
                dist.destroy_process_group()


def work(rank: int, folder: str, kinds: str, *names: str) -> None:
    """Two updates of an actor, of a critic or of both on every mesh, and the second one again where the mesh before had
    made the first; the first mesh goes on from the last."""
    for number, name in connected(rank, folder, (*names, names[0])):
        if number < len(names):
            losses = LOSSES if name in CHOOSING and has_losses(kinds, names) else ()
            begin(folder, kinds, name, losses)
        if number > 0:
            config = settings(f"{folder}/model", MESHES[name][1])
            learners = [BUILD[kind](config, CPU, 100) for kind in kinds.split()]
            restore(learners, FixedKL(0.0), f"{folder}/run {names[number - 1]}")
            for learner in learners:
                save(learner, 1, f"{folder}/{name} {learner.name} resumed.pt")


def has_losses(kinds: str, names: Sequence[str]) -> bool:
    return kinds == "actor" and set(names) >= CHOOSING


def begin(folder: str, kinds: str, name: str, losses: Iterable[str]) -> None:
    """Two updates with a checkpoint between them; one with each of the losses."""
    config = settings(f"{folder}/model", MESHES[name][1])
    learners = [BUILD[kind](config, CPU, 100) for kind in kinds.split()]
    mesh = learners[0].mesh
    for part in (mesh.data, mesh.tensor, mesh.sequence):
        groups = part.get_all_groups() if part else []
        waits = {group._get_backend(CPU).options._timeout for group in groups}
        assert waits <= {DEADLINE}, "the deadline of collectives is that of every group"
    for learner in learners:
        save(learner, 0, f"{folder}/{name} {learner.name}.pt")
    if "actor" in kinds:
        publishes(learners[0])
    write_checkpoint(learners, f"{folder}/run {name}/{FOLDER}/{folder_name(1)}")
    for learner in learners:
        save(learner, 1, f"{folder}/{name} {learner.name} undisturbed.pt")
    for loss in losses:
        config.actor.policy_loss = batches.actor(loss_mode=loss).policy_loss
        save(build_actor(config, CPU, 100), 3, f"{folder}/{name} {loss}.pt")


def save(learner: Learner, seed: int, path: str) -> None:
    """Train on the rows of this seed; metrics and weights are written to `path`."""
    rows = with_values(with_supports(table(seed), VOCABULARY))
    if learner.name == "actor" and learner.module.routers.width:
        rows = with_routes(rows, learner.module.routers.width, EXPERTS)
    shown = reduce(step(learner, rows))
    state = full_state_dict(learner.module)
    if dist.get_rank() == 0:
        assert shown[f"{learner.name}/grad_norm"] > CLIP
        torch.save({"metrics": shown, "state": state}, path)


def write_checkpoint(learners: list[Learner], folder: str) -> None:
    """As `Saver` does, without Ray Train's storage."""
    dcp.save(training_state(learners), checkpoint_id=folder)
    if dist.get_rank() == 0:
        steps = {learner.name: learner.scheduler.last_epoch for learner in learners}
        cursor = PromptCursor().to_json()
        progress = {"version": 1, "cursor": cursor, "validated": False, "kl_coef": 0.0, "scheduler_steps": steps}
        Path(folder, PROGRESS).write_text(json.dumps(progress | {"world_size": 1, "strategy": strategy_of(learners)}))
        Path(folder, complete_name(0)).touch()


def publishes(learner: Learner) -> None:
    """Engines join the whole weights from what each rank publishes, and nothing comes twice."""
    state = full_state_dict(learner.module)
    publisher = WeightPublisher(dist.get_rank(), torch.float32, 20_000, lambda data: data.copy(), mesh=learner.mesh)
    shards = ranks.all_gather(publisher.pack(learner.module, 1))
    if dist.get_rank() == 0:
        joined = {name: tensor.clone() for name, tensor in parameters(shards, lambda refs: refs)}
        assert joined.keys() == state.keys()
        assert all(torch.equal(joined[name], state[name]) for name in state)
        assert sum(len(bucket) for shard in shards for bucket in shard.buckets) == sum(t.nbytes for t in state.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "model", "names"),
    [
        pytest.param("actor", {"layers": 4, "tie": True}, FEW_STAGED, id="stages"),
        pytest.param("actor", {}, FEW, id="actor"),
        pytest.param("critic", {}, ("one", "tensor 2 x data 2", "sequence 2 x data 2"), id="critic"),
        pytest.param("actor critic", {"tie": True, "experts": True}, ("one", "expert 2 x data 2"), id="tied experts"),
        pytest.param("actor", {"layers": 4, "tie": True}, STAGED, id="stages everywhere", marks=pytest.mark.long),
        pytest.param("actor", {}, DENSE, id="actor everywhere", marks=pytest.mark.long),
        pytest.param("critic", {}, DENSE, id="critic everywhere", marks=pytest.mark.long),
        pytest.param("actor critic", {}, PARTS, id="parts", marks=pytest.mark.long),
        pytest.param("actor", {"tie": True}, ("one", "tensor 2 x data 2"), id="tied", marks=pytest.mark.long),
        pytest.param("actor critic", {"experts": True}, ("one", "expert 2"), id="experts", marks=pytest.mark.long),
    ],
)
def test_any_mesh_trains_as_one_process(
    tmp_path: Path, kinds: str, model: dict[str, bool], names: tuple[str, ...]
) -> None:
    save_model(tmp_path / "model", **model)
    spawn(work, str(tmp_path), kinds, *names, ranks=max(MESHES[name][0] for name in names))

    def made(kind: str) -> dict[str, Any]:
        return torch.load(tmp_path / f"{kind}.pt")

    for kind in kinds.split():
        first, second = made(f"one {kind}"), made(f"one {kind} undisturbed")
        # The first update is of the model that the reference is, too.
        assert kind != "actor" or second["metrics"]["actor/kl_loss"] > 1e-4
        for name in names:
            same(first, made(f"{name} {kind}"))
            same(second, made(f"{name} {kind} undisturbed"))
            same(second, made(f"{name} {kind} resumed"))
    for loss in LOSSES if has_losses(kinds, names) else ():
        one, several = (made(f"{name} {loss}") for name in sorted(CHOOSING))
        assert one["metrics"]["actor/cov_frac"] > 0.1
        same(one, several)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert_same_metrics(one["metrics"], other["metrics"])
    assert_same(one["state"], other["state"])
