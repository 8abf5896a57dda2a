"""Forms of an update, and the handshake, with Megatron's layers and with stages: as with FSDP in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from pipeline.config.learner import ParallelConfig
from pipeline.greeting import Greeting
from pipeline.models.fsdp import full_state_dict
from pipeline.models.handshake import Compared, shake_hands
from pipeline.stats import reduce
from pipeline.train import ranks
from pipeline.train.deal import Dealer
from pipeline.train.setup import build_actor
from tests.megatron import shim
from tests.megatron.test_layouts import FAMILIES, TOLERANCE, plain, save_family, settings
from tests.train.updates import (
    CPU,
    N,
    assert_same,
    assert_same_metrics,
    in_chunks,
    spawn,
    table,
    update,
    without_advantage,
)

FAMILY = "qwen3 tied"
FORMS: dict[str, dict[str, Any]] = {
    "in one pass": {"old_log_probs": "recompute"},
    "without advantage": {"old_log_probs": "recompute", "every": 2},
    "without any advantage": {"old_log_probs": "recompute", "every": 1},
    "parts": {"old_log_probs": "engine", "every": 2, "parts": 2},
    "epochs": {"old_log_probs": "recompute", "every": 2, "ppo_epochs": 2, "ppo_mini_batch_size": 4},
}
"""Settings of the actor; every such group is without an advantage; number of parts of the iteration."""
RANKS = {
    "one": (1, "fsdp", ParallelConfig()),
    "stages": (2, "fsdp", ParallelConfig(pipeline=2)),
    "megatron": (1, "megatron", ParallelConfig()),
    "megatron in stages": (2, "megatron", ParallelConfig(pipeline=2)),
    "megatron divided": (2, "megatron", ParallelConfig(tensor=2)),
}


def trained(folder: str, name: str, form: str) -> None:
    """Two updates in this form."""
    options = dict(FORMS[form])
    every, parts = options.pop("every", 0), options.pop("parts", 1)
    _, strategy, parallel = RANKS[name]
    config = settings(f"{folder}/{FAMILY}", strategy, parallel, "vanilla", False)
    for key, value in options.items():
        setattr(config.actor, key, value)
    actor = build_actor(config, CPU, 100)
    metrics = []
    for number in range(2):
        rows = without_advantage(table(number), every) if every else table(number)
        chunks = in_chunks(rows)[dist.get_rank() :: dist.get_world_size()]
        half = len(chunks) // parts
        given = [pa.concat_tables(chunks[part * half : (part + 1) * half]) for part in range(parts)]
        unit = N if actor.shares_prompts else 1
        segments = actor.shape.mini_batches // parts or 1
        dealer = Dealer(CPU, segments, unit, hidden_size=32, skips=True, idle=0.25, mesh=actor.mesh)
        stats = update(actor, *map(dealer, given))
        metrics.append(reduce([part for part in ranks.all_gather(stats if actor.leads else None) if part is not None]))
    state = full_state_dict(actor.module)
    if dist.get_rank() == 0:
        torch.save({"metrics": metrics, "state": plain(state, *FAMILIES[FAMILY])}, f"{folder}/{name} {form}.pt")


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    shim.install()
    for name, (count, _, _) in RANKS.items():
        if rank < count:
            store = dist.FileStore(f"{folder}/store {name}", count)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
            for form in FORMS:
                trained(folder, name, form)
            dist.destroy_process_group()


@pytest.mark.slow
def test_every_form_of_an_update_is_as_in_one_process(tmp_path: Path) -> None:
    save_family(tmp_path / FAMILY, FAMILY)
    spawn(work, str(tmp_path), ranks=2)
    for form in FORMS:
        one = torch.load(tmp_path / f"one {form}.pt")
        assert one["metrics"][0]["actor/skipped_steps"] == 0 or form == "without any advantage"
        for name in list(RANKS)[1:]:
            other = torch.load(tmp_path / f"{name} {form}.pt")
            for mine, theirs in zip(one["metrics"], other["metrics"], strict=True):
                assert_same_metrics(mine, theirs)
            assert_same(one["state"], other["state"], TOLERANCE)


def shaking(rank: int, folder: str) -> None:
    """Rounding in bfloat16 is measured, and an engine that disagrees gets a result, in every stage."""
    torch.set_num_threads(1)
    shim.install()
    for name, (count, strategy, parallel) in RANKS.items():
        if rank < count and name != "one":
            store = dist.FileStore(f"{folder}/store {name}", count)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
            config = settings(f"{folder}/{FAMILY}", strategy, parallel, "vanilla", False)
            if strategy == "megatron":
                config.actor.fsdp.param_dtype = "bfloat16"
            actor = build_actor(config, CPU, 100)
            made = np.random.default_rng(0)
            prompts = [made.integers(5, 300, 4).tolist()] * 2 + [made.integers(5, 300, 6).tolist()]
            responses = [made.integers(5, 300, 5).astype(np.int32) for _ in prompts]
            wrong = Greeting("e", prompts, responses, [np.full(len(ids), -1.0, np.float32) for ids in responses])
            compared = Compared(actor.module, wrong, CPU, 64, actor.mesh.positions, actor.backend)
            found = shake_hands(compared, actor.passes, strategy == "fsdp", torch.bfloat16)
            assert not found.agrees and found.way == found.first
            if strategy == "megatron":
                assert found.limit.mean > 1e-3, "bfloat16 rounds"
            dist.destroy_process_group()


@pytest.mark.slow
def test_the_handshake_measures_rounding_and_ends_with_a_result(tmp_path: Path) -> None:
    save_family(tmp_path / FAMILY, FAMILY)
    spawn(shaking, str(tmp_path), ranks=2)
