"""Episodes whose processes are on hosts: they are as they are beside the engine, whatever dies."""

import asyncio
import json
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import ray

from pipeline.agent import EpisodeOver, Message, Observation, ray_client
from pipeline.agent.conversation import Ask
from pipeline.agent.episode import Episode
from pipeline.agent.errors import EpisodeFailed, EpisodeLost, PolicyMistake
from pipeline.agent.processes import Processes
from pipeline.agent.ray_client import RemoteProcesses
from pipeline.agent.ray_hosts import BESIDE_ENGINES, Hosts
from pipeline.agent.tokens.context import Answer
from pipeline.config.agent import AgentConfig
from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.rollout import RolloutConfig
from pipeline.config.trainer import TrainerConfig
from pipeline.generation import Generation
from pipeline.models.tokenizer import load_tokenizer
from pipeline.rollout.engine import Lease
from pipeline.rollout.episodes import Episodes
from pipeline.sampling import Sampling
from tests.agent.engines import Engine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

FOLDER = Path(__file__).parent
ROW = {"prompt": [{"role": "user", "content": "go"}], "data_source": "x", "ground_truth": "please", "extra_info": None}
MARK = str(uuid.uuid4())
"""Value of a variable of the episodes' processes."""
ENVIRONMENT = """
import os, time
from pipeline.agent import Environment, Observation

class Moody(Environment):
    def reset(self, row, seed):
        self.seed, self.turn = seed, 0
        if row["extra_info"] == "hang":
            time.sleep(1000)
        return f"seed {seed}, process {os.getpid()}"

    def step(self, message):
        self.turn += 1
        if message.text == "raise":
            raise ValueError("boom")
        if message.text == "exit":
            os._exit(3)
        if message.text == "hang":
            time.sleep(1000)
        return Observation(f"{self.turn} {message.text}", reward=self.seed + self.turn)

    def close(self):
        open(os.environ["CLOSED"], "a").write(f"{self.seed}\\n")

class Still(Moody):
    close = Environment.close

class Sums(Environment):
    def reset(self, row, seed):
        self.sum = seed % 100
        return f"begin with {self.sum}"

    def step(self, message):
        time.sleep(0.02)
        self.sum += len(message.text)
        return Observation(str(self.sum), reward=self.sum)
"""
Use = Callable[[Any], Awaitable[Any]]


@pytest.fixture(scope="module")
def moody(tmp_path_factory: pytest.TempPathFactory) -> AgentConfig:
    folder = tmp_path_factory.mktemp("moody")
    (folder / "moody.py").write_text(ENVIRONMENT)
    variables = {"MARK": MARK, "CLOSED": str(folder / "closed")}
    return AgentConfig(environment=f"{folder}/moody.py:Moody", env_vars=variables, hosts=2, host_cpus=0.25)


@pytest.fixture(scope="module")
def hosts(ray_session: None, moody: AgentConfig) -> Iterator[Hosts]:
    made = Hosts.start(moody, TrainerConfig())
    yield made
    made.end()
    for _ in range(100):
        if not marked():
            return
        time.sleep(0.1)
    raise AssertionError(f"processes are left: {marked()}")


def marked() -> list[int]:
    """Processes of `moody`, that which imported the files and its keeper included."""
    return [each.pid for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get("MARK") == MARK]


def played(config: AgentConfig, hosts: Hosts, use: Use) -> Any:
    """What `use` returns, which is given the processes of an agent, on hosts or here."""

    async def main() -> Any:
        processes = RemoteProcesses(str(config), config, hosts) if hosts.actors else Processes(config)
        try:
            return await use(processes)
        finally:
            await processes.close()

    return asyncio.run(asyncio.wait_for(main(), 200))


async def soon(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.05)


def process_of(session: Any) -> int:
    return int(session.opened.split()[-1])


def test_an_environment_is_as_it_is_beside_the_engine(hosts: Hosts, moody: AgentConfig) -> None:
    async def play(processes: Any) -> Any:
        loaded = await processes.start()
        first, second = [await processes.open(ROW, seed, 30) for seed in (3, 4)]
        seen = [await session.step(Message(text), 10) for session, text in ((first, "a"), (second, "b"), (first, "c"))]
        await first.close()
        await second.close()
        return loaded, seen

    there, here = played(moody, hosts, play), played(moody, BESIDE_ENGINES, play)
    assert there == here
    assert there[1][2] == Observation("2 c", reward=5.0)
    assert sorted(Path(moody.env_vars["CLOSED"]).read_text().split()) == ["3", "3", "4", "4"]


def test_tools_are_as_they_are_beside_the_engine(hosts: Hosts) -> None:
    async def play(processes: Any) -> None:
        assert (await processes.start()).timeouts == {"calc": 2, "count": None}
        first, second = [await processes.open(ROW, 7, 30) for _ in range(2)]
        assert await first.call("calc", {"expression": "1+2"}, 10) == "3"
        with pytest.raises(PolicyMistake, match="^too long$"):
            await first.call("calc", {"expression": "1+2+3+4+5+6"}, 10)
        assert [await first.call("count", {}, 10) for _ in range(2)] == ["1", "2"]
        assert await second.call("count", {"step": 5}, 10) == "5"

    played(AgentConfig(tools=[f"{FOLDER}/worlds.py"]), hosts, play)


@pytest.mark.parametrize("name", ["count", "hundred", "let_pass", "mistaken", "cancel", "boom", "exit", "no_number"])
def test_programs_are_as_they_are_beside_the_engine(hosts: Hosts, name: str) -> None:
    async def chat(messages: list[dict[str, Any]], tools: Any = None) -> Answer:
        text = messages[-1]["content"]
        if text == "wait":
            await asyncio.sleep(1000)
        if text == "over":
            raise EpisodeOver("no turns")
        return Answer(
            Message("1" if text == "go" else text.replace("!", "0")), None, full=False, tokens=1, prompt_tokens=1
        )

    async def play(processes: Any) -> Any:
        session = await processes.open(ROW | {"ground_truth": name}, 7, 10)
        try:
            return await session.run(ROW | {"ground_truth": name}, chat)
        except (EpisodeFailed, EpisodeOver) as error:
            return type(error), str(error)
        finally:
            await session.close()

    config = AgentConfig(program=f"{FOLDER}/programs.py:run")

    async def start_and_play(processes: Any) -> Any:
        await processes.start()
        return await play(processes)

    assert played(config, hosts, start_and_play) == played(config, BESIDE_ENGINES, start_and_play)


def test_what_a_chat_raises_is_raised_and_a_late_program_tells_where_it_is(hosts: Hosts) -> None:
    async def chat(*_: Any) -> Answer:
        raise KeyError("the engine's")

    async def answered(*_: Any) -> Answer:
        return Answer(Message("1"), None, full=False, tokens=1, prompt_tokens=1)

    async def play(processes: Any) -> None:
        await processes.start()
        session = await processes.open(ROW, 7, 30)
        with pytest.raises(KeyError, match="the engine's"):
            await session.run(ROW | {"ground_truth": "count"}, chat)
        await session.close()
        session = await processes.open(ROW, 7, 30)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.run(ROW | {"ground_truth": "hang"}, answered), 0.5)
        assert "programs.py, line" in await session.place()
        await session.close()

    played(AgentConfig(program=f"{FOLDER}/programs.py:run"), hosts, play)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise", r"^ValueError: boom \(moody.py, line 15\)$"),
        ("exit", r"^ProcessError: its process ended with exit code 3, in step$"),
        ("hang", r"^TimeoutError: no answer from step after 0.3 s \(moody.py, line 19\)$"),
    ],
)
def test_a_failure_is_that_of_its_own_episode(hosts: Hosts, moody: AgentConfig, text: str, words: str) -> None:
    async def play(processes: Any) -> None:
        await processes.start()
        sessions = [await processes.open(ROW, 7, 30) for _ in range(3)]
        for _ in range(2):
            with pytest.raises(EpisodeFailed, match=words) as failed:
                await sessions[0].step(Message(text), 0.3)
            assert not isinstance(failed.value, EpisodeLost)
        assert [(await session.step(Message("x"), 10)).content for session in sessions[1:]] == ["1 x", "1 x"]
        for session in sessions:
            await session.close()
        await soon(lambda: not any(map(psutil.pid_exists, map(process_of, sessions))))

    played(moody, hosts, play)


def test_what_is_given_up_ends(hosts: Hosts, moody: AgentConfig) -> None:
    async def play(processes: Any) -> None:
        await processes.start()
        session, before = await processes.open(ROW, 7, 30), len(marked())
        opening = processes.open(ROW | {"extra_info": "hang"}, 7, 100)
        for given_up in (session.step(Message("hang"), 100), opening):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(given_up, 0.3)
        await session.close()
        await soon(lambda: len(marked()) == before - 1)

    played(replace(moody, environment=str(moody.environment).replace("Moody", "Still")), hosts, play)


def test_files_that_do_not_load_are_refused(hosts: Hosts) -> None:
    async def play(processes: Any) -> None:
        with pytest.raises(ValueError, match=r"agent.environment.*\(on the environment host .*:\d+\)$"):
            await processes.start()

    played(AgentConfig(environment="no_such_module:Game"), hosts, play)


def test_hosts_that_find_no_place_are_named(ray_session: None, moody: AgentConfig) -> None:
    trainer = TrainerConfig(placement={"agent": {"role": "none"}})
    trainer.deadlines.engine_start = 0.5
    waiting = Hosts.start(replace(moody, hosts=1), trainer)

    async def play(processes: Any) -> None:
        with pytest.raises(TimeoutError, match=r"0 of agent.hosts=1 have started within 0.5 s .* agent.host_cpus=0.25"):
            await processes.start()

    try:
        played(moody, waiting, play)
    finally:
        waiting.end()


def test_an_episode_whose_host_dies_is_lost_and_begins_again_elsewhere(hosts: Hosts, moody: AgentConfig) -> None:
    async def play(processes: Any) -> None:
        await processes.start()
        await soon(lambda: all(link.loaded for link in processes._links))
        sessions = [await processes.open(ROW, seed, 30) for seed in range(4)]
        assert sorted(link.open for link in processes._links) == [2, 2]
        dead = sessions[0]._link
        stepping = asyncio.ensure_future(sessions[0].step(Message("hang"), 100))
        await asyncio.sleep(0.2)
        os.kill(int(dead.name.rpartition(":")[2]), signal.SIGKILL)
        with pytest.raises(EpisodeLost, match=f"the environment host {dead.name} is gone"):
            await stepping
        again = await processes.open(ROW, 0, 30)
        assert again._link is not dead and (await again.step(Message("x"), 10)).content == "1 x"
        for session in sessions[1:]:
            if session._link is dead:
                with pytest.raises(EpisodeLost):
                    await session.step(Message("x"), 10)
            else:
                assert (await session.step(Message("x"), 10)).content == "1 x"
        # What it held has died with it; Ray starts it again, where further episodes go.
        await soon(lambda: not psutil.pid_exists(process_of(sessions[0])))
        await soon(lambda: dead.loaded is not None)
        for session in (*sessions, again):
            await session.close()
        assert {(await processes.open(ROW, 0, 30))._link for _ in range(2)} == set(processes._links)

    played(moody, hosts, play)


def test_a_host_that_does_not_answer_is_named(
    hosts: Hosts, moody: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(processes: Any) -> None:
        await processes.start()
        await soon(lambda: all(link.loaded for link in processes._links))
        session = await processes.open(ROW, 7, 30)
        silent = session._link
        pid = int(silent.name.rpartition(":")[2])
        monkeypatch.setattr(ray_client, "MARGIN_S", 0.3)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(EpisodeLost, match=f"host {silent.name} gave no answer to `step` in 0.5 s"):
                await session.step(Message("x"), 0.2)
            monkeypatch.undo()
            assert (await processes.open(ROW, 7, 30))._link is not silent
        finally:
            os.kill(pid, signal.SIGCONT)
        await soon(lambda: silent.loaded is not None)

    played(moody, hosts, play)


class Played(Episodes):
    """Episodes with a policy that answers with the number of the turn, and calls `after` first."""

    def __init__(self, *args: Any, after: Callable[[int], None]) -> None:
        super().__init__(*args)
        self._after, self.asked = after, 0

    def _policy(self, sampling: Sampling, name: str, lease: Lease, for_training: bool) -> Ask:
        async def ask(ids: list[int], most: int, turn: int) -> Generation:
            self.asked += 1
            self._after(self.asked)
            chat_format = self._agents[None]._chat_format
            assert chat_format is not None
            answer = np.array(chat_format.bridge.answer("1" * (turn + 1), []), np.int32)
            return Generation(answer, np.zeros(len(answer), np.float32), "stop", ((0, len(answer)),))

        return ask


def test_rows_are_the_same_when_a_host_dies(hosts: Hosts, moody: AgentConfig, tiny_model: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    config = replace(moody, environment=str(moody.environment).replace("Moody", "Sums"), max_turns=4)
    data = DataConfig(max_prompt_length=200, max_response_length=200)
    count, killed = 12, []
    table = pa.table({"uid": [str(i) for i in range(count)], "agent_name": pa.nulls(count, pa.string())})
    prompt = json.dumps(ROW["prompt"])
    for name, value in {"prompt": prompt, "data_source": "x", "ground_truth": None, "extra_info": None}.items():
        table = table.append_column(name, pa.array([value] * count, pa.string()))
    settings = [[Sampling.of(RolloutConfig(), 200, "train")]] * count

    async def play(hosts: Hosts) -> tuple[int, list[Episode]]:
        def kill(asked: int) -> None:
            # In the midst of the episodes: some are in a step, others between two.
            if asked == 20 and hosts.actors:
                links = episodes._agents[None]._processes._links  # type: ignore[union-attr]
                killed.append(max(links, key=lambda link: link.open).name)
                os.kill(int(killed[0].rpartition(":")[2]), signal.SIGKILL)

        engine: Any = None
        episodes = Played({None: config}, data, tokenizer, engine, 1, False, hosts, after=kill)
        await episodes.start(table)
        found = await episodes.run(table, settings, Lease(one_version=True))
        await episodes.close()
        return episodes.asked, found

    (often, there), (once, here) = [asyncio.run(asyncio.wait_for(play(at), 200)) for at in (hosts, BESIDE_ENGINES)]
    assert killed and often > once == 4 * count, "some episodes began again"
    for one, other in zip(there, here, strict=True):
        assert (one.error, one.ended, one.turns) == (None, "turns", 4)
        assert (one.messages, one.score, one.prompt_ids) == (other.messages, other.score, other.prompt_ids)
        assert one.contexts[0].ids == other.contexts[0].ids


def test_an_engine_that_dies_leaves_nothing_on_a_host(hosts: Hosts, moody: AgentConfig) -> None:
    async def play(processes: Any) -> None:
        await processes.start()
        own = await processes.open(ROW, 7, 30)
        engine = ray.remote(num_cpus=0)(Engine).remote()
        pid, opened = await engine.open.remote(moody, hosts, ROW)
        process = int(opened.split()[-1])
        assert psutil.pid_exists(process)
        os.kill(pid, signal.SIGKILL)
        await soon(lambda: not psutil.pid_exists(process))
        assert (await own.step(Message("x"), 10)).content == "1 x"
        await own.close()

    played(moody, hosts, play)
