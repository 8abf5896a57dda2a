"""Pipeline stages train as one process does, for each kind of loss; and what makes them differ is found."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.config.learner import ParallelConfig
from pipeline.models import schedule
from pipeline.models.fsdp import clip_grad_norm, full_state_dict
from pipeline.models.mesh import Mesh
from pipeline.models.schedule import StagedBackend
from pipeline.plan.pipelining import hidden_bytes
from pipeline.stats import reduce
from pipeline.train import ranks
from pipeline.train.deal import Dealer
from pipeline.train.learner import Learner
from pipeline.train.setup import build_actor
from tests.losses import batches
from tests.train.test_mesh import CLIP, LONGEST, MESHES, connected, same, save_model
from tests.train.updates import CPU, N, in_chunks, make_config, spawn, table, update

VARIANTS = {
    f"{loss}{' with KL and entropy' if further else ''}": (loss, further)
    for loss in ("vanilla", "gspo", "clip_cov")
    for further in (False, True)
}
STEPS = 3
DENSE = ("one", "stages 2", "stages 3", "stages 2 x data 2", "stages 2 x tensor 2", "stages 2 x sequence 2")
FEW = ("one", "stages 3", "stages 2 x data 2")
EXPERTS = ("one", "stages 2", "stages 2 x expert 2")
WIDTH = 32


def settings(folder: str, parallel: ParallelConfig, loss: str, further: bool) -> Config:
    tokens = max(LONGEST, 40 * parallel.ranks_with_same_rows // dist.get_world_size())
    config = make_config(folder, ppo_max_token_len_per_gpu=tokens // parallel.sequence)
    config.actor.parallel, config.actor.grad_clip = parallel, CLIP
    config.actor.policy_loss = batches.actor(loss_mode=loss).policy_loss
    if loss == "gspo":
        config.actor.loss_agg_mode = "seq-mean-token-mean"
    if further:
        config.actor.entropy_coeff, config.actor.use_kl_loss, config.actor.kl_loss_coef = 0.01, True, 0.3
        config.scoring.reference.placement = "train_workers"
    # Weights stay gathered in half of the variants.
    config.actor.fsdp.reshard_after_forward = not further
    return config


def rows(step: int, nothing: bool) -> pa.Table:
    """Rows of a step; without any advantage if `nothing`, so that no row passes and a micro-batch is empty."""
    made = table(step)
    if nothing:
        advantages = pa.array([[0.0] * len(row) for row in made["advantages"].to_pylist()], made["advantages"].type)
        made = made.set_column(made.schema.get_field_index("advantages"), "advantages", advantages)
    return made


def step(learner: Learner, made: pa.Table) -> dict[str, float]:
    """Train on the rows that come to this rank; the metrics of all ranks that lead."""
    own = pa.concat_tables(in_chunks(made)[dist.get_rank() :: dist.get_world_size()])
    unit = N if learner.shares_prompts else 1
    dealer = Dealer(CPU, learner.shape.mini_batches, unit, WIDTH, skips=False, idle=0.0, mesh=learner.mesh)
    stats = update(learner, dealer(own))
    return reduce([part for part in ranks.all_gather(stats if learner.leads else None) if part is not None])


def work(rank: int, folder: str, mutation: str, variants: str, *names: str) -> None:
    """Three updates on each mesh, with each of the variants."""
    torch.set_num_threads(1)
    for _, name in connected(rank, folder, names):
        for variant in variants.split(", "):
            loss, further = VARIANTS[variant]
            with mutated(mutation if MESHES[name][1].pipeline > 1 else ""):
                learner = build_actor(settings(f"{folder}/model", MESHES[name][1], loss, further), CPU, 100)
                metrics = []
                for number in range(STEPS):
                    with counted() as tokens:
                        nothing = number == 1 and loss == "vanilla"
                        metrics.append(step(learner, rows(number, nothing)))
                    sends_what_the_plan_says(learner, tokens, name)
                state = full_state_dict(learner.module)
            if dist.get_rank() == 0:
                torch.save({"metrics": metrics, "state": state}, f"{folder}/{name} {variant}.pt")


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the positions in the micro-batches that pass: with a backward pass, and without."""
    tokens = {"run": 0, "predict": 0}
    own = {name: getattr(StagedBackend, name) for name in tokens}

    def passing(name: str) -> Any:
        def call(self: StagedBackend, given: Any, *more: Any) -> Any:
            found = [*given]
            tokens[name] += sum(batch.input_ids.numel() for batch in found)
            return own[name](self, found, *more)

        return call

    with patch.multiple(StagedBackend, **{name: passing(name) for name in tokens}):
        yield tokens


def sends_what_the_plan_says(learner: Any, tokens: dict[str, int], name: str) -> None:
    """A rank of each stage sends as many bytes of hidden states as the plan computes for these tokens."""
    backend, stage = learner.backend, learner.mesh.stage
    if stage.count == 1:
        return
    config = Config()
    config.actor.parallel = MESHES[name][1]
    sent = backend.sent + (learner.reference.backend.sent if learner.reference else 0)
    expected = hidden_bytes(config, tokens["run"], WIDTH, 4, stage.number, 1, 1)
    expected += hidden_bytes(config, tokens["predict"], WIDTH, 4, stage.number, 1, 0)
    assert sent == expected, (name, stage.number, sent, expected)
    assert sent > 0
    backend.sent = 0
    if learner.reference:
        learner.reference.backend.sent = 0


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Leave a part of the implementation out."""
    if name == "tied gradients":
        own = StagedBackend._tied_weight

        def separate(self: StagedBackend) -> Any:
            own(self)

        change: Any = patch.object(StagedBackend, "_tied_weight", separate)
    elif name == "norms":

        def alone(parameters: Any, most: float, *_: Any) -> float:
            return clip_grad_norm(parameters, most)

        change = patch.object(schedule, "clip_grad_norm", alone)
    elif name == "metrics":
        change = patch.object(Mesh, "leads", lambda self, rank: rank == 0)
    else:
        yield
        return
    with change:
        yield


def made(folder: Path, name: str, variant: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{name} {variant}.pt")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),
    [
        pytest.param({"layers": 3, "tie": True}, FEW, id="tied"),
        pytest.param({"layers": 3, "experts": True}, EXPERTS, id="experts"),
        pytest.param({"layers": 3, "tie": True}, DENSE, id="everywhere", marks=pytest.mark.long),
        pytest.param({"layers": 4}, ("one", "stages 4", "stages 2 x copies 2"), id="four", marks=pytest.mark.long),
    ],
)
def test_stages_train_as_one_process(tmp_path: Path, model: dict[str, Any], names: tuple[str, ...]) -> None:
    save_model(tmp_path / "model", **model)
    spawn(work, str(tmp_path), "", ", ".join(VARIANTS), *names, ranks=max(MESHES[name][0] for name in names))
    for variant in VARIANTS:
        one = made(tmp_path, "one", variant)
        assert max(metrics["actor/grad_norm"] for metrics in one["metrics"] if "actor/grad_norm" in metrics) > CLIP
        for name in names[1:]:
            other = made(tmp_path, name, variant)
            for mine, theirs in zip(one["metrics"], other["metrics"], strict=True):
                same({"metrics": mine, "state": one["state"]}, {"metrics": theirs, "state": other["state"]})


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["tied gradients", "norms", "metrics"])
def test_a_part_that_is_left_out_is_found(tmp_path: Path, mutation: str) -> None:
    save_model(tmp_path / "model", layers=3, tie=True)
    variant = "vanilla with KL and entropy"
    spawn(work, str(tmp_path), mutation, variant, "one", "stages 2", ranks=2)
    one, other = (made(tmp_path, name, variant) for name in ("one", "stages 2"))
    with pytest.raises(AssertionError):
        same(
            {"metrics": one["metrics"][-1], "state": one["state"]},
            {"metrics": other["metrics"][-1], "state": other["state"]},
        )
