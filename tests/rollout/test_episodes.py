"""Episodes as rows, and how many are played at once."""

import asyncio
from collections import Counter
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.agent.episode import Episode
from pipeline.agent.tokens.context import Context
from pipeline.config.agent import AgentConfig
from pipeline.config.data import DataConfig
from pipeline.generation import EngineRequest, Generation
from pipeline.models.batch import TokenBatch
from pipeline.rollout.agents import Agent
from pipeline.rollout.engine import Lease
from pipeline.rollout.episodes import Episodes, generations, with_episodes
from pipeline.rollout.seeds import seed_of
from pipeline.rows import INTS, ROUTES, flat
from pipeline.sampling import Sampling


def context(prompt: list[int], *answers: list[int]) -> Context:
    made = Context(prompt, [])
    for number, answer in enumerate(answers):
        if number:
            made.add_observation([90, 91])
        log_probs = np.full(len(answer), -0.5, dtype=np.float32)
        made.add_answer(Generation(np.array(answer, dtype=np.int32), log_probs, "stop", ((3, len(answer)),)))
    return made


def test_contexts_of_an_episode_are_written_as_the_model_must_see_them() -> None:
    contexts = [
        [context([1, 2], [10, 11], [12]), context([3], [13]), context([4, 5], [14, 15])],
        [context([6], [16])],
        [],
    ]
    episodes = [Episode(each, []) for each in contexts]
    made, mask = generations(episodes, version=3)
    table = pa.table(
        {
            "uid": ["a", "b", "c"],
            "prompt_ids": pa.array([[0], [0], [0]], INTS),
            "response_ids": pa.array([generation.token_ids for generation in made], INTS),
        }
    )
    table = with_episodes(table, episodes)
    assert table["contexts"].to_pylist() == [
        [{"prompt": None, "tokens": 5}, {"prompt": [3], "tokens": 1}, {"prompt": [4, 5], "tokens": 2}],
        None,
        None,
    ]
    batch = TokenBatch.from_table(table)
    assert np.diff(batch.context_offsets).tolist() == [3, 1, 1]
    prompts = np.split(batch.prompt_ids, batch.prompt_offsets[1:-1])
    responses = np.split(batch.response_ids, batch.response_offsets[1:-1])
    assert [prompt.tolist() for prompt in prompts] == [[1, 2], [3], [4, 5], [6], []]
    assert [response.tolist() for response in responses] == [[10, 11, 90, 91, 12], [13], [14, 15], [16], []]
    assert mask.tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 1] and len(mask) == len(flat(table, "response_ids")[0])


def test_experts_of_an_episode_that_ended_between_a_prompt_and_its_first_turn() -> None:
    """The context without a turn is not in the row, and its tokens have no experts there."""

    def routed(prompt: list[int], answer: list[int]) -> Context:
        made, tokens = Context(prompt, []), len(prompt) + len(answer)
        routes = np.arange(2 * tokens, dtype=np.int16).reshape(tokens, 2)
        ids = np.array(answer, dtype=np.int32)
        made.add_answer(Generation(ids, np.zeros(len(ids), np.float32), "stop", ((0, len(ids)),), None, routes))
        return made

    episodes = [
        Episode([routed([1, 2], [3, 4]), Context([5] * 9, [])], []),
        Episode([routed([1], [2]), Context([5] * 9, []), routed([6, 7], [8])], []),
        Episode([], []),
    ]
    made, _ = generations(episodes, version=0)
    table = pa.table(
        {
            "uid": ["a", "b", "c"],
            "prompt_ids": pa.array([[0]] * 3, INTS),
            "response_ids": pa.array([generation.token_ids for generation in made], INTS),
            "routes": pa.array([g.routes if g.routes is None else g.routes.reshape(-1) for g in made], ROUTES),
        }
    )
    batch = TokenBatch.from_table(with_episodes(table, episodes), routes=True)
    assert batch.routes is not None
    rows = np.split(batch.routes.reshape(-1), 2 * batch.token_offsets[1:-1])
    assert [part.tolist() for part in rows] == [[*range(8)], [*range(4)], [*range(6)], []]


def test_no_more_episodes_than_asked_for_are_played_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two agents, each of which has places of its own."""
    playing: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def play(row: dict[str, Any], *given: Any, pictures: None) -> Episode:
        name = row["data_source"]
        given[0].close()
        playing[name] += 1
        most[name] = max(most[name], playing[name])
        await asyncio.sleep(0)
        playing[name] -= 1
        return Episode([], [])

    async def start(agent: Agent) -> None:
        return None

    async def go() -> list[Episode]:
        sampling = Sampling(1.0, 1.0, -1, 0, 1, ())
        agents = {None: AgentConfig(max_episodes=2), "other": AgentConfig(max_episodes=3)}
        episodes = Episodes(agents, DataConfig(), None, engine, 0, seed_requests=True)
        return await episodes.run(table, [[sampling] * 5] * 2, Lease(True))

    monkeypatch.setattr("pipeline.rollout.episodes.episode.run", play)
    monkeypatch.setattr(Agent, "start", start)
    engine: Any = None
    columns = {name: [None] * 2 for name in ("ground_truth", "extra_info")}
    names = {"uid": ["a", "b"], "agent_name": [None, "other"], "prompt": ["[]"] * 2, "data_source": ["two", "three"]}
    table = pa.table(names | columns)
    assert len(asyncio.run(go())) == 10
    assert most == {"two": 2, "three": 3}


def test_answers_of_episodes_stop_at_all_ends() -> None:
    """A turn may end with a token that no file of the model names; it belongs to the answer, as the engine gave it."""
    asked: list[EngineRequest] = []
    made = Generation(np.array([5, 7], np.int32), np.zeros(2, np.float32), "stop", ((0, 2),))

    class Engine:
        def submit(self, requests: list[EngineRequest], lease: Lease) -> Future:
            asked.extend(requests)
            done: Future = Future()
            done.set_result([made])
            return done

    async def go() -> None:
        engine: Any = Engine()
        episodes = Episodes({None: AgentConfig()}, DataConfig(), None, engine, 0, seed_requests=True, ends=(3, 7))
        sampled = Sampling(1.0, 1.0, -1, 0, 9, ())
        for number, sampling in enumerate((sampled, sampled.greedy())):
            context.add_answer(await episodes._policy(sampling, "name", Lease(True), True)([1, 2], 4, number))

    context = Context([1, 2], [])
    asyncio.run(go())
    assert {request.ends for request in asked} == {(3, 7)} and {request.sampling.max_tokens for request in asked} == {4}
    assert [request.seed for request in asked] == [seed_of("name/0"), None], "greedy turns need none"
    assert context.ids == [5, 7] * 2 and context.mask == [1] * 4
