"""Episodes on the real engine, with environments in processes of their own."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline import rows
from pipeline.config import Config
from pipeline.rollout.agents import Agent
from tests.rollout.engines.place import BLOCK, CALL_S, MAX_TOKENS, Engine, Place

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TURNS, TURN_TOKENS = 4, 6
ENVIRONMENT = '''
import os, time
from pipeline.agent import Environment, Observation

class Talk(Environment):
    """Says odd things until the turns run out; each answer is worth its number."""

    def reset(self, row, seed):
        self.turn, self.seed, self.index = 0, seed, row["extra_info"]["index"]
        self.pause_s, self.gate = row["extra_info"]["pause_s"], row["extra_info"]["gate"]

    def step(self, message):
        self.turn += 1
        time.sleep(self.pause_s)
        if self.gate and self.turn == 1:
            open(f"{self.gate}.{os.getpid()}", "w").close()
            while not os.path.exists(self.gate):
                time.sleep(0.005)
        if self.index == 1 and self.turn == 2:
            raise ValueError("this one fails")
        if self.index == 2 and self.turn == 3:
            os._exit(7)
        if self.index == 3:
            return Observation(done=True, reward=0.5, parts={"seed": self.seed})
        if self.index == 5 and self.turn == 1:
            return Observation("long " * 500)
        return Observation(f"<|im_start|>assistant\\n{self.turn} \\u00e9", reward=float(self.turn))
'''


class AgentPlace(Place):
    """An engine whose rows are episodes."""

    def __init__(self, folder: str, prefix_cache: bool) -> None:
        (Path(folder).parent / "talk.py").write_text(ENVIRONMENT)

        def change(config: Config) -> None:
            config.agent.environment = f"{Path(folder).parent}/talk.py:Talk"
            config.agent.max_turns, config.agent.max_turn_tokens = TURNS, TURN_TOKENS
            config.data.max_response_length = 4 * MAX_TOKENS
            config.rollout.enable_prefix_caching = prefix_cache

        super().__init__(True, folder, change)

    @property
    def agent(self) -> Agent:
        """The agent of the engine's episodes."""
        assert self.rollout._episodes is not None
        return self.rollout._episodes._agents[None]

    def talks(
        self,
        version: int,
        split: str = "train",
        chunk: int = 0,
        indices: tuple[int, ...] = (0, 4),
        pause_s: float = 0.0,
        gate: str = "",
    ) -> pa.Table:
        """A chunk of one prompt for each index, which the environment reads.

        It sleeps so long before each reply, and gives the first one when the file `gate` is there. Prompts have whole
        blocks of the prefix cache.
        """
        table = self.chunk(version, split, len(indices), chunk)
        prompts = [json.dumps([{"role": "user", "content": f"go {index} {'7' * 2 * BLOCK}"}]) for index in indices]
        extra = [json.dumps({"index": index, "pause_s": pause_s, "gate": gate}) for index in indices]
        for name, values in (("prompt", prompts), ("extra_info", extra)):
            table = table.set_column(table.column_names.index(name), table.schema.field(name), pa.array(values))
        return table

    def token_gap(self, table: pa.Table, version: int) -> np.ndarray:
        """|engine - trainer| of each token's log-prob under the weights of a version; NaN for observations."""
        mask, _ = rows.flat(table, "response_mask")
        own = np.concatenate([chosen for chosen, _ in self._rescored(table, version, None)])
        gap = np.abs(own - rows.flat(table, "rollout_log_probs")[0])
        return np.where(mask > 0, gap, np.nan)


place: AgentPlace


def open_place(folder: str, prefix_cache: bool = True) -> int:
    global place
    place = AgentPlace(folder, prefix_cache)
    return os.getpid()


def talk(split: str = "train") -> dict[str, Any]:
    version = place.step()
    (table,) = place.generate(place.talks(version, split))
    chat_format = place.agent._chat_format
    assert chat_format is not None
    bridge = chat_format.bridge
    behind = [
        [bridge.after(answer, [message], ()) for answer, message in exchanges(row)]
        for row in table.select(["response_ids", "spans", "messages"]).to_pylist()
    ]
    prompts = [bridge.prompt(json.loads(text)[:1]) for text in table["messages"].to_pylist()]
    (again,) = place.generate(place.talks(version, split))
    gap = place.token_gap(table, version)
    return {"table": table, "again": again, "gap": float(np.nanmax(gap)), "behind": behind, "prompts": prompts}


def exchanges(row: dict[str, Any]) -> list[tuple[list[int], dict[str, Any]]]:
    """Tokens of each answer with the message behind it, without the last answer."""
    spoken = [message for message in json.loads(row["messages"])[1:] if message["role"] != "assistant"]
    answers, start = [], 0
    for span in row["spans"]:
        if span["kind"] == rows.ANSWER:
            answers.append(row["response_ids"][start : start + span["tokens"]])
        start += span["tokens"]
    return list(zip(answers[:-1], spoken, strict=False))


def failing() -> pa.Table:
    version = place.step()
    return place.generate(place.talks(version, indices=(0, 1, 2, 3)))[0]


def cut() -> pa.Table:
    """An observation that is too long."""
    place.agent.config.max_observation_tokens = 40
    version = place.step()
    (table,) = place.generate(place.talks(version, indices=(5,)))
    place.agent.config.max_observation_tokens = 1024
    return table


def slow(update: str) -> dict[str, Any]:
    """Episodes with slow environments, and a chunk of the next version that arrives in their middle."""
    rollout = place.config.rollout
    rollout.weight_update = update
    first = place.step()
    place.generate(place.talks(first))
    second = place.step()

    async def later() -> pa.Table:
        await asyncio.sleep(0.3)
        return await place.rollout(place.talks(second, chunk=1, pause_s=0.2))

    async def both() -> list[pa.Table]:
        return list(await asyncio.gather(place.rollout(place.talks(first, pause_s=0.2)), later()))

    old, new = place.loop.run_until_complete(asyncio.wait_for(both(), CALL_S))
    rollout.weight_update = "between_chunks"
    return {"gaps": gaps(old, new, first, second), "first": first, "second": second, "old": old, "new": new}


def gaps(old: pa.Table, new: pa.Table, first: int, second: int) -> dict[str, float]:
    """Largest gap of the tokens of each version in each table."""
    found = {}
    for name, table in (("old", old), ("new", new)):
        versions = rows.token_versions(table)
        for version in (first, second):
            chosen = place.token_gap(table, version)[versions == version]
            found[f"{name} {version - first}"] = float(np.nanmax(chosen)) if len(chosen) else 0.0
    return found


def between_turns(gate: str) -> dict[str, Any]:
    """Weights that change while all episodes wait for their first reply, and a KV cache that keeps what it holds."""
    rollout = place.config.rollout
    rollout.weight_update, rollout.update_kv = "in_flight", "keep"
    first, second = place.step(), place.step()
    episodes = 2 * rollout.n
    cached: list[int] = []

    def watch(output: Any, version: int) -> Any:
        cached.append(output.num_cached_tokens or 0)
        return read(output, version)

    from pipeline.rollout.engines.vllm import engine as vllm

    async def both() -> list[pa.Table]:
        running = asyncio.create_task(place.rollout(place.talks(first, gate=gate)))
        while len(list(Path(gate).parent.iterdir())) < episodes:
            await asyncio.sleep(0.005)
        assert len(cached) == episodes, "one answer of each"
        new = await place.rollout(place.talks(second, chunk=1))
        Path(gate).touch()
        return [await running, new]

    read, vllm.read = vllm.read, watch
    try:
        old, new = place.loop.run_until_complete(asyncio.wait_for(both(), CALL_S))
    finally:
        vllm.read = read
    rollout.weight_update, rollout.update_kv = "between_chunks", "recompute"
    found = gaps(old, new, first, second)
    return {"gaps": found, "first": first, "second": second, "old": old, "cached": cached[-episodes:]}


DRIVERS = """
import json, os
from pipeline.agent import Environment, Observation

REPLIES = ["up", "<|im_start|>down \\u00e9"]

class Game(Environment):
    def reset(self, row, seed):
        self.replies = list(REPLIES)

    def step(self, message):
        return Observation(self.replies.pop(0)) if self.replies else Observation(done=True, reward=3.0)

async def run(row, chat):
    messages = row["prompt"]
    for reply in [*REPLIES, None]:
        messages = [*messages, await chat(messages), {"role": "user", "content": reply}]
    return 3.0

if __name__ == "__main__":
    import openai
    with open(os.environ["SLIPSTREAM_ROW"]) as file:
        messages = json.load(file)["prompt"]
    client = openai.OpenAI()
    for reply in [*REPLIES, None]:
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [said, {"role": "user", "content": reply}]
    print(json.dumps({"reward": 3.0}))
"""


def driven(folder: str) -> list[list[dict[str, Any]]]:
    """The same greedy episodes by an environment, a program and a command."""
    from pipeline.config.agent import AgentConfig
    from pipeline.rollout.episodes import Episodes
    from pipeline.sampling import Sampling

    file = Path(folder) / "drivers.py"
    file.write_text(DRIVERS)
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ways: list[dict[str, Any]] = [
        {"environment": f"{file}:Game"},
        {"program": f"{file}:run"},
        {"command": ["python", str(file)], "env_vars": path},
    ]
    config, engine, table = place.config, place.rollout.engine, place.talks(place.step(), indices=(0, 4))
    greedy = Sampling.of(config.rollout, config.data.max_response_length, "train").greedy()

    async def play(way: dict[str, Any]) -> list[dict[str, Any]]:
        agent = AgentConfig(max_turn_tokens=TURN_TOKENS, **way)
        episodes = Episodes(agent.agents(), config.data, place.rollout._tokenizer, engine, 0, seed_requests=True)
        lease = engine.lease(one_version=True)
        try:
            await episodes.start(table)
            played = await episodes.run(table, [[greedy], [greedy]], lease)
        finally:
            engine.give_back(lease)
            await episodes.close()
        return [
            {
                "error": each.error,
                "prompt": each.prompt_ids,
                "contexts": [(context.ids, context.mask, context.spans) for context in each.contexts],
                "log_probs": [context.log_probs for context in each.contexts],
                "messages": each.messages,
                "ended": each.ended,
            }
            for each in played
        ]

    return [place.loop.run_until_complete(asyncio.wait_for(play(way), CALL_S)) for way in ways]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    running = Engine(open_place, str(tmp_path_factory.mktemp("episodes") / "model"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def talked(engine: Engine) -> dict[str, Any]:
    return engine(talk)


def test_log_probs_of_sampled_tokens_are_the_trainers(talked: dict[str, Any]) -> None:
    assert talked["gap"] < 1e-4


@pytest.mark.long
def test_log_probs_are_the_trainers_without_a_prefix_cache(tmp_path: Path) -> None:
    running = Engine(open_place, str(tmp_path / "model"), False)
    try:
        assert running(talk)["gap"] < 1e-4
        for update in ("between_chunks", "in_flight"):
            found = running(slow, update)
            assert max(found["gaps"].values()) < 1e-4, (update, found["gaps"])
    finally:
        running.close()


def test_rows_are_what_was_sampled_and_the_bridges_between(talked: dict[str, Any]) -> None:
    table = talked["table"]
    assert len(table) == 2 * 4, "one row for each episode"
    mask, offsets = rows.flat(table, "response_mask")
    for i, row in enumerate(table.to_pylist()):
        assert row["prompt_ids"] == talked["prompts"][i]
        assert (row["turns"], row["ended"], row["env_error"], row["env_score"]) == (TURNS, "turns", None, 10.0)
        spans = [(span["kind"], span["tokens"], span["reward"]) for span in row["spans"]]
        assert [kind for kind, _, _ in spans] == [rows.ANSWER, rows.OBSERVATION] * (TURNS - 1) + [rows.ANSWER]
        assert [reward for kind, _, reward in spans if kind == rows.ANSWER] == [1.0, 2.0, 3.0, 4.0]
        own = mask[offsets[i] : offsets[i + 1]]
        assert own.tolist() == [kind for kind, tokens, _ in spans for _ in range(tokens)]
        start, observed = 0, []
        for kind, tokens, _ in spans:
            if kind == rows.OBSERVATION:
                observed.append(row["response_ids"][start : start + tokens])
            start += tokens
        assert observed == talked["behind"][i]
        log_probs = np.array(row["rollout_log_probs"])
        assert (log_probs[own == 0] == 0).all() and (log_probs[own == 1] < 0).all()


def test_episodes_of_one_seed_are_the_same_again(talked: dict[str, Any]) -> None:
    assert talked["again"]["response_ids"].equals(talked["table"]["response_ids"])
    samples = talked["table"]["response_ids"].to_pylist()
    assert len({tuple(ids) for ids in samples}) == len(samples), "each sample has seeds of its own"


def test_failing_environments_are_rows_with_an_error(engine: Engine) -> None:
    table = engine(failing)
    errors = table["env_error"].to_pylist()
    assert errors[:4] == [None] * 4
    assert all("ValueError: this one fails (talk.py, line" in error for error in errors[4:8])
    assert all("exit" in error and "7" in error for error in errors[8:12])
    assert table["ended"].to_pylist() == ["turns"] * 4 + ["error"] * 8 + ["done"] * 4
    assert table["env_score"].to_pylist() == [10.0] * 4 + [0.0] * 8 + [0.5] * 4
    assert table["turns"].to_pylist() == [4] * 4 + [2] * 4 + [3] * 4 + [1] * 4
    seeds = {json.loads(parts)["seed"] for parts in table["env_parts"].to_pylist()[12:]}
    assert len(seeds) == 1, "a group plays the same task"


def test_a_long_observation_is_cut_and_the_episode_goes_on(engine: Engine) -> None:
    table = engine(cut)
    assert set(table["ended"].to_pylist()) == {"turns"}
    for messages, episode in zip(table["messages"].to_pylist(), table["episode"].to_pylist(), strict=True):
        assert "..." in messages and json.loads(episode)["cut_observations"] == 1


def test_an_environment_a_program_and_a_command_give_the_same_tokens(engine: Engine, tmp_path: Path) -> None:
    environment, *others = engine(driven, str(tmp_path))
    for played in environment:
        ((ids, mask, spans),) = played["contexts"]
        assert (played["error"], played["ended"], len(spans)) == (None, "done", 5)
        assert spans[-1][2] == 3.0 and len(ids) == len(mask) and 0 < sum(mask) < len(mask)
    own = [played.pop("log_probs") for played in environment]
    for other in others:
        for one, same in zip(own, [played.pop("log_probs") for played in other], strict=True):
            np.testing.assert_allclose(one, same, atol=1e-4)
        assert other == environment


def test_whole_episodes_of_one_version_although_tools_are_slow(engine: Engine) -> None:
    found = engine(slow, "between_chunks")
    for name, version in (("old", found["first"]), ("new", found["second"])):
        runs = found[name]["version_runs"].to_pylist()
        assert {run["version"] for row in runs for run in row} == {version}, name
    assert found["gaps"]["old 0"] < 1e-4 and found["gaps"]["new 1"] < 1e-4


def test_weights_in_flight_change_between_turns_and_each_token_has_its_version(engine: Engine) -> None:
    found = engine(slow, "in_flight")
    mixed = [len(runs) for runs in found["old"]["version_runs"].to_pylist()]
    assert max(mixed) > 1, "the weights changed in the middle of episodes"
    assert max(found["gaps"].values()) < 1e-4, found["gaps"]


def test_a_later_turn_does_not_read_what_older_weights_cached(engine: Engine, tmp_path: Path) -> None:
    found = engine(between_turns, str(tmp_path / "gate"))
    runs = found["old"]["version_runs"].to_pylist()
    assert [[run["version"] for run in row] for row in runs] == [[found["first"], found["second"]]] * 8
    for row, spans in zip(runs, found["old"]["spans"].to_pylist(), strict=True):
        assert row[0]["tokens"] == sum(span["tokens"] for span in spans[:2]), "one answer and the first reply"
    assert min(found["cached"]) >= 2 * BLOCK, "else this would say nothing"
    assert max(found["gaps"].values()) < 1e-4, found["gaps"]
