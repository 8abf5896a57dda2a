"""The policy store's part of the handshake: who is asked, what is kept, who waits."""

import asyncio

import numpy as np
import pytest

from pipeline.greeting import Change, Greeting, GreetingPlan, Way
from pipeline.store.admission import Admission
from pipeline.store.cursor import PromptCursor
from pipeline.store.errors import StaleAttempt, StoreTimeout
from pipeline.store.policy_store import PolicyStore
from pipeline.store.shaking import Shaking
from pipeline.store.status import TrainerState
from pipeline.store.versions import POLICY
from tests.store.test_policy_store import asynchronous, publish, settle

PLAN = GreetingPlan((5,), 4, 2, 100, 1, {})
CHANGE = Change("Qwen3Model", Way("eager", False, False))
STATE = TrainerState(0, PromptCursor(), False)


def greeting(engine: str) -> Greeting:
    return Greeting(engine, [[1, 2]], [np.array([3], np.int32)], [np.zeros(1, np.float32)])


async def begun(shaking: Shaking | None) -> PolicyStore:
    store = PolicyStore(Admission(2, 4, 0))
    await store.new_attempt()
    await store.register_trainer(1, STATE, 1, shaking)
    await publish(store, 0)
    return store


@asynchronous
async def test_engines_are_asked_until_one_has_answered() -> None:
    store = await begun(Shaking(PLAN, settled=False))
    assert (await store.admit(1, 0, 1.0)).greeting == PLAN  # type: ignore[union-attr]
    assert (await store.admit(1, 1, 1.0)).greeting == PLAN  # type: ignore[union-attr]
    assert (await store.admit_validation(1, 0, 1.0)).greeting == PLAN
    # Replicas take weights, too, and generate nothing.
    assert (await store.weights(1, POLICY, 0, 1.0)).greeting is None
    assert await store.greeting(1) is None
    for engine in ("first", "second"):
        await store.greet(1, greeting(engine))
    found = await store.greeting(1)
    assert found is not None and found.engine == "first"
    assert (await store.admit(1, 1, 1.0)).greeting is None  # type: ignore[union-attr]


@asynchronous
async def test_replicas_wait_until_the_trainer_has_compared() -> None:
    store = await begun(Shaking(PLAN, settled=False))
    waits = [asyncio.ensure_future(store.wait_settled(1, 30.0)) for _ in range(2)]
    await settle()
    assert not any(wait.done() for wait in waits)
    await store.settle(1, CHANGE)
    assert [await wait for wait in waits] == [CHANGE, CHANGE]
    assert await store.wait_settled(1, 30.0) == CHANGE
    late = await begun(Shaking(PLAN, settled=False))
    with pytest.raises(StoreTimeout, match="handshake: waited .* for the trainer's comparison"):
        await late.wait_settled(1, 0.01)


@asynchronous
async def test_without_a_handshake_nobody_waits_and_an_earlier_change_is_known() -> None:
    assert await (await begun(None)).wait_settled(1, 0.01) is None
    assert await (await begun(Shaking(change=CHANGE))).wait_settled(1, 0.01) == CHANGE


@asynchronous
async def test_a_new_attempt_begins_anew() -> None:
    store = await begun(Shaking(PLAN, settled=False))
    await store.greet(1, greeting("first"))
    waiting = asyncio.ensure_future(store.wait_settled(1, 30.0))
    await settle()
    await store.new_attempt()
    for call in (waiting, store.greet(1, greeting("late")), store.greeting(1), store.settle(1, CHANGE)):
        with pytest.raises(StaleAttempt):
            await call
    assert await store.greeting(2) is None
    await store.register_trainer(2, STATE, 1, Shaking(PLAN, settled=False))
    await publish(store, 0, attempt=2)
    assert (await store.admit(2, 0, 1.0)).greeting == PLAN  # type: ignore[union-attr]
