"""The rollout stage on a fake engine that answers at once; `engines/` has real ones."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from jobs.tiny import build_tokenizer, countdown_texts
from pipeline import rows
from pipeline.config import Config
from pipeline.generation import EngineOutput, EngineRequest, Generation
from pipeline.rollout import engines
from pipeline.rollout.stage import Rollout, decoded, sections
from pipeline.sampling import Sampling
from pipeline.store.versions import Ticket

GREEDY_TOKEN = 7
ENDS = (3, 7)
"""Tokens that end a response."""
SEEDS = [2382685956620813730, 1349609211904220927, 256104817106049214]
"""Of the two samples of the first prompt and the first one of the second."""
PROMPTS = [[11, 12], [13], [14, 15, 16]]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 20}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}


class FakeEngine:
    """A response tells what was asked for: its first token is the prompt's, its second one follows from the seed."""

    def __init__(self) -> None:
        self.asked: list[EngineRequest] = []
        self.version = -1
        self._running: list[tuple[str, list[int]]] = []

    def add(self, request_id: str, request: EngineRequest) -> None:
        self.asked.append(request)
        drawn = 20 + (request.seed or 0) % 1000 if request.sampling.temperature > 0 else GREEDY_TOKEN
        self._running.append((request_id, [request.prompt_ids[0], drawn]))

    def step(self) -> list[EngineOutput]:
        done, self._running = self._running[::-1], []
        return [
            EngineOutput(request_id, generated(tokens, [self.version] * len(tokens))) for request_id, tokens in done
        ]

    def load(self, shards: list[Any], timeout: float, version: int) -> None:
        self.version = version

    def close(self) -> None:
        pass


def generated(tokens: list[int], versions: list[int]) -> Generation:
    """The generation of tokens that these policy versions made."""
    runs = tuple((version, len(list(run))) for version, run in groupby(versions))
    return Generation(np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32), "stop", runs)


class Tickets:
    """A policy store that hands out tickets as they were given to it."""

    def __init__(self, *tickets: Ticket) -> None:
        self._tickets = list(tickets)
        self.beats = 0
        self.spent: list[tuple[float, float]] = []
        """What the engine said of its idle and busy seconds."""

    async def admit(self, split: str, chunk: int, version: int) -> Ticket:
        return self._tickets.pop(0)

    async def acknowledge(
        self, engine: str, version: int, crc: int, load_s: float, idle_s: float, busy_s: float
    ) -> None:
        self.spent.append((idle_s, busy_s))

    def beat(self, engine: str) -> None:
        self.beats += 1


Make = Callable[..., Rollout]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """A stage for an estimator and tickets, without an engine and without a model; its stand-in is at `.fake`."""
    tokenizer = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: [str(tokens) for tokens in ids])
    monkeypatch.setattr("pipeline.models.tokenizer.load_tokenizer", lambda model: tokenizer)
    monkeypatch.setattr("pipeline.models.ends.find_ends", lambda *model: SimpleNamespace(ids=ENDS))

    def made(estimator: str, *tickets: Ticket, n: int = 2) -> Rollout:
        config = Config()
        config.algorithm.adv_estimator = estimator
        config.data.max_response_length = 9
        config.rollout.n = n
        for name, value in SAMPLED.items():
            assert hasattr(config.rollout, name)
            setattr(config.rollout, name, value)
        config.rollout.val_kwargs.n, config.rollout.val_kwargs.temperature = 2, 0.3
        engine = FakeEngine()
        monkeypatch.setattr(engines, "build", lambda *args: engine)
        stage = Rollout(*sections(config), Tickets(*(tickets or [Ticket(0, [])])))
        stage.args = (*sections(config), stage._policy)  # type: ignore[attr-defined]
        stage.fake = engine  # type: ignore[attr-defined]
        return stage

    return made


def chunk(split: str = "train", pads: int = 0) -> pa.Table:
    count = len(PROMPTS) + pads
    values: dict[str, list[Any]] = dict.fromkeys(rows.PROMPT.names, [None] * count) | {
        "split": [split] * len(PROMPTS) + ["pad"] * pads,
        "chunk": [4] * count,
        "iteration": [1] * count,
        "uid": [f"u{i}" for i in range(count)],
        "prompt_ids": PROMPTS + [[1]] * pads,
    }
    return pa.table(values, schema=rows.PROMPT)


def generate(stage: Rollout, table: pa.Table) -> pa.Table:
    return asyncio.run(asyncio.wait_for(stage(table), 30.0))


def without_times(table: pa.Table) -> pa.Table:
    return table.drop_columns(["generate_s", "load_s"])


def test_an_engine_says_how_long_it_had_no_chunk(make: Make) -> None:
    stage = make("grpo", Ticket(0, []), Ticket(1, []))

    async def two_versions() -> None:
        await stage(chunk())
        await asyncio.sleep(0.2)  # admission would hold the next chunk back
        await stage(chunk())

    begun = time.monotonic()
    asyncio.run(asyncio.wait_for(two_versions(), 30.0))
    (_, loading), (idle, busy) = stage._policy.spent  # type: ignore[attr-defined]
    assert 0.2 <= idle < time.monotonic() - begun and 0 < busy < time.monotonic() - begun - 0.2
    assert loading >= 0


def test_an_engine_generates_while_the_store_looks_at_what_it_loaded_and_its_rows_wait(make: Make) -> None:
    stage = make("grpo", Ticket(0, []), Ticket(1, []))

    async def slow_store() -> None:
        asked, answer = asyncio.Event(), asyncio.Event()

        async def acknowledge(engine: str, version: int, *_: Any) -> None:
            asked.set()
            await answer.wait()

        stage._policy.acknowledge = acknowledge  # type: ignore[method-assign]
        chunks = [asyncio.ensure_future(stage(chunk())) for _ in range(2)]
        await asked.wait()
        while len(stage.fake.asked) < 2 * 2 * len(PROMPTS):  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        done, _ = await asyncio.wait(chunks, timeout=0.2)
        assert not done, "rows of a version that the store has not agreed to have left the engine"
        answer.set()
        assert [len(table) for table in await asyncio.gather(*chunks)] == [2 * len(PROMPTS)] * 2

    asyncio.run(asyncio.wait_for(slow_store(), 30.0))


@pytest.mark.parametrize("refused", [0, 1])
def test_no_rows_leave_an_engine_that_the_store_did_not_agree_with(make: Make, refused: int) -> None:
    stage = make("grpo", Ticket(0, []), Ticket(1, []), Ticket(1, []))

    async def three_chunks() -> list[Any]:
        async def acknowledge(engine: str, version: int, *_: Any) -> None:
            await asyncio.sleep(0.2)
            if version == refused:
                raise ValueError(f"version {version} has another checksum")

        stage._policy.acknowledge = acknowledge  # type: ignore[method-assign]
        return await asyncio.gather(*(stage(chunk()) for _ in range(3)), return_exceptions=True)

    first, second, third = asyncio.run(asyncio.wait_for(three_chunks(), 30.0))
    refusal = f"version {refused} has another checksum"
    assert str(second) == refusal and str(third) == refusal
    assert refused == 1 or str(first) == refusal, "versions behind a refused one count for nothing"


@pytest.mark.parametrize("n", [1, 2])
def test_a_greedy_row_follows_the_samples_of_its_prompt(make: Make, n: int) -> None:
    stage = make("remax", n=n)
    table = generate(stage, chunk())
    assert table.schema.names == [*rows.PROMPT.names, *rows.ROLLOUT.names]
    assert table["uid"].to_pylist() == [f"u{i}" for i in range(3) for _ in range(n + 1)]
    assert table["split"].to_pylist() == [*["train"] * n, "baseline"] * 3
    assert table["sample"].to_pylist() == [*range(n + 1)] * 3
    responses = table["response_ids"].to_pylist()
    assert [first for first, _ in responses] == [ids[0] for ids in PROMPTS for _ in range(n + 1)]
    assert [drawn == GREEDY_TOKEN for _, drawn in responses] == [*[False] * n, True] * 3
    assert set(table["iteration"].to_pylist()) == {1} and set(table["chunk"].to_pylist()) == {4}


def test_a_response_begins_with_what_the_prompt_has_of_it(make: Make) -> None:
    prompts = [[{"role": "user", "content": "x"}], None, [{"role": "assistant", "content": "So "}]]
    prompts[1] = [*prompts[0], {"role": "assistant", "content": "1 "}]
    table = chunk().drop_columns("prompt").append_column("prompt", pa.array(map(json.dumps, prompts)))
    made = generate(make("grpo"), table.select(rows.PROMPT.names))
    texts = [text.partition("[")[0] for text in made["response"].to_pylist()]
    assert texts == ["", "", "1 ", "1 ", "So ", "So "]
    assert all(text.endswith("]") for text in made["response"].to_pylist())


def test_greedy_requests_differ_from_sampled_ones_in_the_sampling_alone(make: Make) -> None:
    stage = make("remax")
    stage._rollout.ignore_eos = True
    generate(stage, chunk())
    for prompt, ids in enumerate(PROMPTS):
        first, second, greedy = stage.fake.asked[3 * prompt : 3 * prompt + 3]
        assert first.prompt_ids == second.prompt_ids == greedy.prompt_ids == ids
        assert asdict(first.sampling).items() >= SAMPLED.items() and first.seed is not None
        assert asdict(greedy.sampling) == asdict(first.sampling) | GREEDY and greedy.seed is None
        assert greedy.sampling.max_tokens == 9 and greedy.ignore_eos


def test_the_samples_are_those_of_a_run_without_baselines(make: Make) -> None:
    plain, remax = generate(make("grpo"), chunk()), generate(make("remax"), chunk())
    assert plain["split"].to_pylist() == ["train"] * 6
    samples = remax.filter(pc.equal(remax["split"], "train"))
    assert without_times(samples).equals(without_times(plain))


def test_validation_has_no_baselines(make: Make) -> None:
    stage = make("remax")
    table = generate(stage, chunk("val", pads=2))
    assert table["split"].to_pylist() == ["val"] * 6
    assert table["sample"].to_pylist() == [0, 1] * 3
    assert {request.sampling.temperature for request in stage.fake.asked} == {0.3}


# How responses are sampled.


def settings(stage: Rollout) -> list[Sampling]:
    """How the engine was asked to sample."""
    return [request.sampling for request in stage.fake.asked]


@pytest.mark.parametrize("split", ["train", "val"])
def test_stop_strings_and_the_shortest_response_hold_for_all_rows(make: Make, split: str) -> None:
    plain = make("grpo")
    generate(plain, chunk(split))
    stage = make("grpo")
    stage._rollout.stop, stage._rollout.min_tokens = ["</answer>"], 3
    generate(stage, chunk(split))
    assert settings(stage) == [replace(own, stop=("</answer>",), min_tokens=3) for own in settings(plain)]
    assert {(own.min_tokens, own.stop) for own in settings(plain)} == {(0, ())}


def test_a_row_has_the_parameters_that_it_asks_for(make: Make) -> None:
    plain = make("remax")
    generate(plain, chunk())
    asked = {"max_tokens": 5, "min_tokens": 2, "top_p": 0.5, "top_k": 7, "stop": ["x", "y"]}
    table = chunk()
    infos = [None, json.dumps({"sampling_params": asked}), json.dumps({"index": 3})]
    column = table.column_names.index("extra_info")
    stage = make("remax")
    generate(stage, table.set_column(column, rows.PROMPT.field(column), pa.array(infos, pa.string())))
    first, second, third = (settings(stage)[3 * prompt : 3 * prompt + 3] for prompt in range(3))
    was = [settings(plain)[3 * prompt : 3 * prompt + 3] for prompt in range(3)]
    assert (first, third) == (was[0], was[2])
    wanted: dict[str, Any] = asked | {"stop": ("x", "y")}
    assert second[:2] == [replace(own, **wanted) for own in was[1][:2]]
    assert second[2] == replace(was[1][2], **(wanted | GREEDY)), "the greedy one"
    seeds = [request.seed for request in stage.fake.asked]
    assert seeds == [request.seed for request in plain.fake.asked], "and the samples keep their seeds"


def test_seeds_are_those_of_every_run_before(make: Make) -> None:
    """A run that goes on with a newer version of this code must draw the same samples."""
    stage = make("grpo")
    generate(stage, chunk())
    assert [request.seed for request in stage.fake.asked][:3] == SEEDS
    stage = make("grpo")
    stage._rollout.seed_per_request = False
    generate(stage, chunk())
    assert {request.seed for request in stage.fake.asked} == {None}


def test_responses_stop_at_all_ends_unless_they_are_ignored(make: Make) -> None:
    for ignored in (False, True):
        stage = make("grpo")
        stage._rollout.ignore_eos = ignored
        generate(stage, chunk())
        assert [(request.ends, request.ignore_eos) for request in stage.fake.asked] == [(ENDS, ignored)] * 6


def test_an_end_that_is_no_special_token_is_not_in_the_text() -> None:
    tokenizer = build_tokenizer(countdown_texts(64, seed=0), vocab_size=320)
    [end] = tokenizer.convert_tokens_to_ids(["a"])
    text = tokenizer.decode([end])
    assert decoded(tokenizer, [[end, end], [end], []]) == [text * 2, text, ""]
    assert decoded(tokenizer, [[end, end], [end], []], [end]) == [text, "", ""]


def test_texts_are_those_of_the_tokenizer() -> None:
    tokenizer = build_tokenizer(countdown_texts(64, seed=0), vocab_size=320)
    random = np.random.default_rng(0)
    ids = [random.integers(0, len(tokenizer), size).tolist() for size in (0, 1, 7, 40)]
    wanted = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert decoded(tokenizer, ids) == wanted and any(wanted)
    other = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: ["own"] * len(ids))
    assert decoded(other, ids) == ["own"] * 4
    tokenizer.clean_up_tokenization_spaces = True
    with patch.object(type(tokenizer), "batch_decode", return_value=["cleaned"]):
        assert decoded(tokenizer, ids) == ["cleaned"]


def test_an_engine_reports_its_steps_while_it_has_chunks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.rollout.stage.BEAT_S", 0.01)
    stage = make("grpo")

    async def chunks() -> None:
        await stage(chunk())
        assert stage._beating is not None, "a chunk starts the reports"
        await stage._beating
        stage._policy.beats, stage._admitted = 0, 1  # type: ignore[attr-defined]
        beating = asyncio.create_task(stage._beat())
        await asyncio.sleep(0.1)
        assert not stage._policy.beats, "the engine makes no step"  # type: ignore[attr-defined]
        before = stage.engine.steps
        while not stage._policy.beats:  # type: ignore[attr-defined]
            stage.engine.steps += 1
            await asyncio.sleep(0)
        assert stage.engine.steps > before
        stage._admitted = 0
        await beating

    asyncio.run(asyncio.wait_for(chunks(), 30.0))
