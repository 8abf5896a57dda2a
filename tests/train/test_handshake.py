"""When the handshake is due, what it changes and refuses, and what it leaves."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import Config
from pipeline.errors import FinalError
from pipeline.greeting import Change, Greeting, Way, prompts_of
from pipeline.models.handshake import Compared
from pipeline.models.tokenizer import load_tokenizer
from pipeline.store.shaking import Shaking
from pipeline.train.actor import Actor
from pipeline.train.handshake import FILE, Handshake
from pipeline.train.setup import build_actor, build_critic
from tests.train.test_critic import make_config
from tests.train.updates import CPU

PACKED = Way("packed", True, True)
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> Config:
    made = make_config(tiny_model)
    made.data.max_prompt_length, made.data.max_response_length = 40, 24
    made.rollout.dtype = "float32"
    return made


@pytest.fixture
def actor(config: Config) -> Actor:
    return build_actor(config, CPU, 1)


def due(config: Config, actor: Actor, folder: Path, start: str = "a", last: bool = False, *more: Any) -> Handshake:
    return Handshake(config, actor, [actor, *more], str(folder), start, last)


def greeting_of(config: Config, actor: Actor, hand: Handshake) -> Greeting:
    """What an engine with the actor's own numbers would send."""
    assert hand.plan is not None
    rng = np.random.default_rng(0)
    prompts = [ids for ids in prompts_of(hand.plan, load_tokenizer(config.model)) for _ in range(2)]
    made = [rng.integers(5, 300, hand.plan.response).astype(np.int32) for _ in prompts]
    blank = Greeting("host:1", prompts, made, [np.zeros(len(ids), np.float32) for ids in made])
    compared = Compared(actor.module, blank, CPU, 256)
    (_, passes) = next(compared.forms(PACKED))
    numbers = compared.log_probs(passes, PACKED).astype(np.float32)
    return replace(blank, log_probs=np.split(numbers, compared.rows.response_offsets[1:-1]))


def off_by(greeting: Greeting, apart: float) -> Greeting:
    changed = [numbers.copy() for numbers in greeting.log_probs]
    changed[2][1] += apart
    return replace(greeting, log_probs=changed)


def positions_wrong(actor: Actor) -> None:
    """Samples behind a shared prompt go on behind each other."""
    forward = actor.module.forward

    def shifted(*args: Any, positions: Any = None, **options: Any) -> Any:
        if positions is not None:
            positions = torch.arange(positions.shape[1], device=positions.device)[None]
        return forward(*args, positions=positions, **options)

    actor.module.forward = shifted  # type: ignore[method-assign]


def test_due_at_each_start_and_not_when_workers_restart(config: Config, actor: Actor, tmp_path: Path) -> None:
    first = due(config, actor, tmp_path)
    assert first.due and first.shaking == Shaking(first.plan, settled=False)
    text = first.settle(greeting_of(config, actor, first))
    assert not first.due and "engine and trainer agree on rows alone, packed with others, after a shared" in text
    record = json.loads((tmp_path / FILE).read_text())
    assert record["start"] == "a" and record["engine"] == "host:1" and record["agrees"] and record["found"] == text
    assert record["way"] == record["first"] == {"attention": "packed", "packed": True, "shared": True}
    assert {found["form"] for found in record["differences"]} > {"alone"} and record["seconds"] > 0
    restarted = due(config, actor, tmp_path)
    assert not restarted.due and restarted.shaking == Shaking()
    assert due(config, actor, tmp_path, start="b").due


def test_not_due_if_nothing_is_left_or_rows_are_recorded(config: Config, actor: Actor, tmp_path: Path) -> None:
    assert not due(config, actor, tmp_path, last=True).due
    replay = make_config(Path(config.model.path or ""))
    replay.data.recorded_run = "runs/x"
    assert not due(replay, actor, tmp_path).due


def test_another_way_is_taken_and_taken_again_after_a_restart(config: Config, actor: Actor, tmp_path: Path) -> None:
    critic = build_critic(config, CPU, 1, actor.mesh)
    hand = due(config, actor, tmp_path, "a", False, critic)
    greeting = greeting_of(config, actor, hand)
    positions_wrong(actor)
    text = hand.settle(greeting)
    way = Way("packed", True, False)
    assert "after a shared prompt" in text and f"With {way} they agree" in text
    assert (actor.passes.packed, actor.passes.shared) == (critic.passes.packed, critic.passes.shared) == (True, False)
    assert hand.change == Change("Qwen3Model", way)
    again, other = build_actor(config, CPU, 1), build_critic(config, CPU, 1, actor.mesh)
    restarted = due(config, again, tmp_path, "a", False, other)
    assert not again.passes.shared and not other.passes.shared and not restarted.due
    assert restarted.shaking == Shaking(change=hand.change)


def test_attention_is_changed_in_the_model(config: Config, actor: Actor, tmp_path: Path) -> None:
    way = Way("eager", False, False)
    record = {"start": "a", "way": vars(way), "first": vars(PACKED)}
    (tmp_path / FILE).write_text(json.dumps(record))
    due(config, actor, tmp_path)
    assert actor.module.decoder.config._attn_implementation == "eager" and not actor.passes.packed


@pytest.mark.parametrize("apart", [0.5, float("nan")])
def test_a_difference_that_no_way_mends_is_refused_or_said(
    config: Config, actor: Actor, tmp_path: Path, apart: float
) -> None:
    hand = due(config, actor, tmp_path)
    greeting = off_by(greeting_of(config, actor, hand), apart)
    size = "0.5" if apart == 0.5 else "inf"
    words = f"engine and trainer differ by {size} nats .* in a row of 29 tokens alone .* trainer.handshake=warn"
    with pytest.raises(FinalError, match=words):
        hand.settle(greeting)
    assert not (tmp_path / FILE).exists()
    bold = due(changed(config, lambda own: setattr(own.trainer, "handshake", "warn")), actor, tmp_path)
    assert f"differ by {size} nats" in bold.settle(greeting)
    record = json.loads((tmp_path / FILE).read_text())
    assert not record["agrees"] and record["way"] == record["first"]


def changed(config: Config, change: Callable[[Config], None]) -> Config:
    own = make_config(Path(config.model.path or ""))
    own.data, own.rollout = config.data, config.rollout
    change(own)
    return own


def test_sharing_that_must_be_is_not_given_up(config: Config, actor: Actor, tmp_path: Path) -> None:
    own = changed(config, lambda own: setattr(own.model, "share_prompts", "always"))
    hand = due(own, actor, tmp_path)
    greeting = greeting_of(own, actor, hand)
    positions_wrong(actor)
    with pytest.raises(FinalError, match="model.share_prompts=always does not allow that; set it to auto"):
        hand.settle(greeting)


def test_replicas_cannot_change_behind_sleeping_engines(config: Config, actor: Actor, tmp_path: Path) -> None:
    def sleep(own: Config) -> None:
        own.rollout = replace(own.rollout, sleep=True)
        own.algorithm.adv_estimator = "gae"

    own = changed(config, sleep)
    hand = due(own, actor, tmp_path)
    # Rows come first, so replicas must not wait.
    assert hand.due and hand.shaking.settled
    greeting = greeting_of(own, actor, hand)
    positions_wrong(actor)
    with pytest.raises(FinalError, match=r"replicas \(scoring.value\) .* set model.share_prompts=never"):
        hand.settle(greeting)
