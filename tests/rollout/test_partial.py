"""Responses that are interrupted and go on later, on an engine whose responses are as long as their prompts say."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.rollout import vllm
from pipeline.rollout.partial import joined
from pipeline.rollout.stage import Rollout
from pipeline.rollout.vllm import Generation
from pipeline.store import Ticket
from pipeline.train.staleness import staleness
from tests.rollout.test_in_flight import Slow
from tests.rollout.test_oversample import LONG, WAIT, chunk, generate, runs, uids
from tests.rollout.test_stage import Make, make  # noqa: F401 (a fixture)

Stage = Callable[..., Rollout]


class Going(Slow):
    """A prompt's first number says how long its response is; it may have some tokens of it already. Tokens say of which
    version they are."""

    def __init__(self) -> None:
        super().__init__(threading.Semaphore(10**6))
        self.step_s = 0.0

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        self.asked.append((prompt, params))
        length, *so_far = prompt["prompt_token_ids"]
        left = length - len(so_far)
        wanted = params.max_tokens
        assert left > 0 and wanted >= params.min_tokens
        self._ends = getattr(self, "_ends", {})
        self._ends[request_id] = "stop" if left <= wanted else "length"
        self._tokens[request_id] = min(left, wanted), []

    def step(self) -> list[Any]:
        time.sleep(self.step_s)
        return super().step()

    def _output(self, request_id: str, tokens: list[int]) -> Any:
        output = super()._output(request_id, tokens)
        output.outputs[0].finish_reason = self._ends.pop(request_id)
        return output

    def abort_request(self, request_ids: list[str]) -> None:
        for name in request_ids:
            del self._tokens[name]


@pytest.fixture
def stage(make: Make, monkeypatch: pytest.MonkeyPatch) -> Stage:  # noqa: F811
    """A stage whose chunks begin with 3 groups of `n` and give 2, and whose goes have 4 tokens."""

    def made(*tickets: Ticket, n: int = 1, bound: int = 1, on_stale: str = "drop", **rollout: Any) -> Rollout:
        first = make("grpo", *tickets, n=n)
        config, engine = first._config, Going()
        config.data.max_response_length = 1000
        chosen = {"chunk_prompts": 2, "oversample": 0.5, "oversample_policy": "carry", "partial_tokens": 4}
        for name, value in (chosen | rollout).items():
            setattr(config.rollout, name, value)
        config.algorithm.max_staleness, config.algorithm.on_stale = bound, on_stale
        monkeypatch.setattr(vllm, "build", lambda *args: engine)
        told: list[dict[str, int]] = []

        async def counted(iteration: int, metrics: dict[str, int]) -> None:
            told.append({name.removeprefix("oversample/"): count for name, count in metrics.items()})

        first._policy.counted = counted  # type: ignore[method-assign]
        rebuilt = Rollout(config, first._policy)
        rebuilt.fake, rebuilt.told = engine, told  # type: ignore[attr-defined]
        return rebuilt

    return made


def tokens(table: pa.Table) -> list[int]:
    return [len(ids) for ids in table["response_ids"].to_pylist()]


def test_a_response_that_is_interrupted_goes_on_with_the_next_iteration(stage: Stage) -> None:
    made = stage(Ticket(3, []), Ticket(4, []), seed_per_request=True)
    first, second = generate(made, chunk(4, 9, 2, 3), chunk(5, 1, 9, 9))
    assert uids(first) == ["4-1", "4-2"] and tokens(first) == [2, 3]
    # 9 tokens: 4 by version 3, 4 by version 4, and then as many as it needs, since the chunk needs it.
    assert uids(second) == ["4-0", "5-0"] and tokens(second) == [9, 1]
    assert runs(second) == [[(3, 4), (4, 5)], [(4, 1)]]
    assert second["policy_version"].to_pylist() == [3, 4] and staleness(second).tolist() == [1, 0]
    told = made.told  # type: ignore[attr-defined]
    assert [(own["taken_up"], own["interrupted"]) for own in told] == [(0, 0), (1, 1)]
    # What the engine was asked: the tokens so far belong to the prompt, and each go has its own random numbers.
    goes = [(prompt, params) for prompt, params in made.fake.asked if prompt["prompt_token_ids"][0] == 9][:2]  # type: ignore[attr-defined]
    (prompt, params), (again, more) = goes
    assert again["prompt_token_ids"] == [9, 3, 3, 3, 3] and again["cache_salt"] != prompt["cache_salt"]
    assert (params.max_tokens, more.max_tokens) == (4, 4) and params.seed != more.seed


def test_a_group_is_interrupted_with_its_longest_response_and_keeps_the_others(stage: Stage) -> None:
    made = stage(Ticket(0, []), Ticket(1, []), n=2)
    fake = made.fake  # type: ignore[attr-defined]
    add, number = fake.add_request, iter(range(1000))

    def uneven(request_id: str, prompt: dict[str, Any], params: Any) -> None:
        # Of the first group, the second sample is short.
        length = prompt["prompt_token_ids"]
        add(request_id, prompt | {"prompt_token_ids": [2] if next(number) == 1 else length}, params)

    fake.add_request = uneven
    first, second = generate(made, chunk(1, 6, 2, 3), chunk(2, 1, 9, 9))
    assert uids(first) == ["1-1"] * 2 + ["1-2"] * 2
    assert uids(second) == ["1-0", "1-0", "2-0", "2-0"] and tokens(second) == [6, 2, 1, 1]
    assert runs(second)[:2] == [[(0, 4), (1, 2)], [(0, 2)]]
    assert second["sample"].to_pylist() == [0, 1, 0, 1]


def test_what_the_chunk_needs_goes_on_at_once(stage: Stage) -> None:
    made = stage(Ticket(0, []))
    (table,) = generate(made, chunk(1, 30, 9, 3))
    assert len(table) == 2 and "1-2" in uids(table)
    other = 30 if "1-0" in uids(table) else 9
    assert tokens(table)[uids(table).index("1-2") - 1] == other or other in tokens(table)
    assert runs(table)[uids(table).index("1-2")] == [(0, 3)]
    assert [own["cut_off"] for own in made.told] == [1]  # type: ignore[attr-defined]


def test_it_waits_for_an_iteration_to_come(stage: Stage) -> None:
    made = stage(*(Ticket(version, []) for version in (0, 0, 1)))
    tables = generate(
        made, chunk(1, 9, 2, 4, iteration=1), chunk(2, 2, 2, 2, iteration=1), chunk(3, 9, 9, 2, iteration=2)
    )
    assert [own["taken_up"] for own in made.told] == [0, 0, 1]  # type: ignore[attr-defined]
    assert "1-0" not in uids(tables[1])


def test_weights_change_between_two_goes_without_waiting_for_the_longest(stage: Stage) -> None:
    """With `update=between_chunks` an engine is idle as soon as all responses have had their tokens."""
    made = stage(Ticket(0, []), Ticket(1, []), n=1)
    made.fake.step_s = 0.002  # type: ignore[attr-defined]
    first, second = generate(made, chunk(1, LONG, 2, 3), chunk(2, 2, 2, 2))
    assert uids(first) == ["1-1", "1-2"] and len(second) == 2
    assert made.engine.steps < LONG


def test_what_would_be_too_old_is_given_up(stage: Stage) -> None:
    made = stage(Ticket(0, []), Ticket(2, []))
    (_, table) = generate(made, chunk(1, 9, 2, 3), chunk(3, 2, 9, 3))
    assert uids(table) == ["3-0", "3-2"]
    assert [own["lost"] for own in made.told] == [0, 1]  # type: ignore[attr-defined]


def test_a_response_with_stop_strings_is_made_in_one_go(stage: Stage) -> None:
    made = stage(Ticket(0, []), stop=["</s>"])
    (table,) = generate(made, chunk(1, 9, 9, 3))
    assert all(params.max_tokens == 1000 for _, params in made.fake.asked)  # type: ignore[attr-defined]
    assert len(table) == 2


def test_the_shortest_and_the_longest_response_count_all_goes(stage: Stage) -> None:
    made = stage(Ticket(0, []), Ticket(1, []), min_tokens=6)
    made._config.data.max_response_length = 7
    generate(made, chunk(1, 7, 2, 3), chunk(2, 1, 7, 7))
    going_on = [params for prompt, params in made.fake.asked if len(prompt["prompt_token_ids"]) == 5]  # type: ignore[attr-defined]
    assert [(params.max_tokens, params.min_tokens) for params in going_on][0] == (3, 2)
    # vLLM refuses fewer tokens than the least where requests go to other processes.
    first = made.fake.asked[0][1]  # type: ignore[attr-defined]
    assert (first.max_tokens, first.min_tokens) == (4, 4)


def test_joined_goes_are_one_response() -> None:
    def part(tokens: list[int], reason: str, *runs: tuple[int, int]) -> Generation:
        return Generation(np.array(tokens, np.int32), -np.array(tokens, np.float32), reason, runs)

    whole = joined([part([1, 2], "length", (3, 2)), part([4], "length", (3, 1)), part([5, 6], "stop", (4, 1), (5, 1))])
    assert whole.token_ids.tolist() == [1, 2, 4, 5, 6] and whole.log_probs.tolist() == [-1, -2, -4, -5, -6]
    assert whole.finish_reason == "stop" and whole.version_runs == ((3, 3), (4, 1), (5, 1))
    assert whole.token_ids.dtype == np.int32 and whole.log_probs.dtype == np.float32


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(*[st.integers(1, 14)] * 3), min_size=1, max_size=8),
    together=st.integers(1, 3),
    update=st.sampled_from(["between_chunks", "in_flight"]),
)
def test_every_chunk_gives_as_many_groups_and_whole_responses(
    stage: Stage, lengths: list[tuple[int, ...]], together: int, update: str
) -> None:
    versions = [number // together for number in range(len(lengths))]
    made = stage(*(Ticket(version, []) for version in versions), n=2, bound=2, update=update)

    async def all_of_them() -> list[pa.Table]:
        found = []
        for first in range(0, len(lengths), together):
            numbers = range(first, min(first + together, len(lengths)))
            tables = [chunk(number, *lengths[number], iteration=versions[number] + 1) for number in numbers]
            found += await asyncio.wait_for(asyncio.gather(*map(made, tables)), WAIT)
        return found

    found = asyncio.run(all_of_them())
    made.engine.close()
    assert [len(table) for table in found] == [4] * len(lengths)
    for table in found:
        assert tokens(table) == [ids[0] for ids in table["prompt_ids"].to_pylist()], "none is short, none too long"
        # Each token says which version gave it, and so do the runs.
        for ids, own in zip(table["response_ids"].to_pylist(), runs(table), strict=True):
            assert ids == [version for version, count in own for _ in range(count)]
        assert all(0 <= age <= 2 for age in staleness(table))
    given_out = [uid for table in found for uid in set(uids(table))]
    assert len(given_out) == len(set(given_out))
    told = made.told  # type: ignore[attr-defined]
    assert sum(own["lost"] for own in told) + len(made._oversampling._held) == sum(
        own["cut_off"] - own["taken_up"] for own in told
    )
