"""The actor on prompts with images: ranks change nothing, also if one of them has no image."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from pipeline.config import Config
from pipeline.config.model import ModelConfig
from pipeline.models.fsdp import full_state_dict
from pipeline.models.processor import load_vision
from pipeline.models.vision import tower
from pipeline.rows import SCHEMA
from pipeline.stats import reduce
from pipeline.train import ranks
from pipeline.train.setup import build_actor
from tests.pictures import picture, save_tiny
from tests.train.updates import COLUMNS, CPU, PROMPTS, N, assert_same, make_config, spawn, update, worlds

CASES = [("qwen2_5_vl", "frozen"), ("qwen3_vl", "trained"), ("smolvlm", "trained")]
STEPS = 3
IMAGES = pa.schema([*COLUMNS, SCHEMA.field("images")])


def table(folder: Path, seed: int) -> pa.Table:
    """An iteration whose first half has prompts with one or two images, and whose second half has none."""
    vision = load_vision(ModelConfig(path=str(folder), vision="frozen"))
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(PROMPTS):
        images = [picture(10 * number + i, 60, 90) for i in range(1 + number % 2 if number < PROMPTS // 2 else 0)]
        ids = vision.expand([7, *[vision.placeholder, 7] * len(images), *rng.integers(5, 300, 3)], images)
        for sample in range(N):
            length = int(rng.integers(2, 9))
            response = rng.integers(5, 300, length)
            response[1] = vision.placeholder  # sampled
            rows.append(
                {
                    "uid": str(number),
                    "sample": sample,
                    "prompt_ids": ids,
                    "response_ids": response,
                    "response_mask": [1] * length,
                    "rollout_log_probs": rng.normal(-5.7, 0.4, length),
                    "advantages": np.full(length, rng.normal()),
                    "returns": np.zeros(length),
                    "images": images,
                }
            )
    return pa.Table.from_pylist(rows, schema=IMAGES)


def config_of(folder: Path, vision: str) -> Config:
    config = make_config(folder)
    config.model.vision = vision
    config.actor.ppo_max_token_len_per_gpu = 400
    return config


def train(rank: int, root: str) -> None:
    """Three updates on one rank and on two; the second of two ranks has the rows without images."""
    for world in worlds(rank, root):
        for family, vision in CASES:
            folder = Path(root, family)
            actor = build_actor(config_of(folder, vision), CPU, 100)
            assert actor.passes.shared
            before = full_state_dict(actor.module)
            metrics = {}
            for step in range(STEPS):
                rows = table(folder, step)
                share = len(rows) // world
                metrics = reduce(ranks.all_gather(update(actor, rows.slice(rank * share, share))))
            state = full_state_dict(actor.module)
            if dist.get_rank() == 0:
                torch.save({"metrics": metrics, "before": before, "state": state}, folder / f"{world}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("vision")
    for family, _ in CASES:
        save_tiny(root / family, family, tie=family != "smolvlm")
    spawn(train, str(root))
    return root


@pytest.mark.slow
@pytest.mark.parametrize(("family", "vision"), CASES)
def test_one_and_two_ranks_get_the_same_weights(root: Path, family: str, vision: str) -> None:
    one, two = (torch.load(root / family / f"{world}.pt", weights_only=True) for world in (1, 2))
    assert_same(one["state"], two["state"])
    assert one["metrics"]["actor/grad_norm"] == pytest.approx(two["metrics"]["actor/grad_norm"], rel=1e-4)
    lm = transformers_model(root / family)
    of_tower = {id(parameter) for parameter in tower(lm)}
    still = {f"lm.{name}" for name, parameter in lm.named_parameters() if id(parameter) in of_tower}
    assert still
    for name, weights in one["state"].items():
        moves = not (vision == "frozen" and name in still)
        assert torch.equal(weights, one["before"][name]) != moves, name


def transformers_model(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder)


@pytest.mark.parametrize(("family", "vision"), CASES)
def test_a_tower_computes_in_the_trainers_dtype(tmp_path: Path, one_rank: None, family: str, vision: str) -> None:
    save_tiny(tmp_path / "model", family)
    config = config_of(tmp_path / "model", vision)
    config.actor.fsdp.param_dtype = "bfloat16"
    config.model.enable_gradient_checkpointing = True
    actor = build_actor(config, CPU, 100)
    before = full_state_dict(actor.module)
    metrics = reduce([update(actor, table(tmp_path / "model", 0))])
    assert metrics["actor/skipped_steps"] == 0 and 0 < metrics["actor/grad_norm"] < 1e3
    after = full_state_dict(actor.module)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert (len(moved) == len(after)) == (vision == "trained")
