"""The stream on a real Ray whose chunks give what is complete first, with an engine that few long responses hold up."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import Config
from pipeline.prompts.stage import Schedule
from pipeline.rollout.stage import Policy, Rollout
from tests.streams import BATCH, CHUNKS, RANKS, SAMPLES, Run, changed, closing, expected_prompts
from tests.test_stream_oversample import Uneven, UnevenStandIn

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("stream_context")]

ITERATIONS, STALENESS = 10, 2


class Tailed(Uneven):
    """A few responses take many times the others: those of about one prompt in nine."""

    def steps(self, tokens: list[int]) -> int:
        return 100 if len(tokens) == 5 and tokens[0] % 5 == 0 else len(tokens)


class TailedStandIn(UnevenStandIn):
    answers = Tailed


class DyingStandIn(TailedStandIn):
    """The engine's process dies once, soon after it has handed on a chunk whose slow group is in another one."""

    DELAY_S = 0.5

    def __init__(self, config: Config, policy: Policy) -> None:
        super().__init__(config, policy)
        assert self._first_come is not None
        tell, died = self._first_come._tell, Path(config.trainer.default_local_dir) / "died"

        async def told(chunks: dict[int, pa.Table]) -> None:
            await tell(chunks)
            if len(chunks) > 1 and not died.exists():
                died.touch()
                asyncio.get_running_loop().call_later(self.DELAY_S, os._exit, 1)

        self._first_come._tell = told


def begun(
    config: Config, folder: Path, base: int = 0, start: Any = (0, 0), stage: type[Rollout] = TailedStandIn
) -> Run:
    return Run(config, Schedule.of(config, ITERATIONS), folder, base, start, stage=stage)


@pytest.fixture(scope="module", params=["resumed", "killed"])
def runs(
    request: pytest.FixtureRequest, stream_config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Run]]:
    """A run that stops and goes on from its checkpoint, and one whose engine dies."""
    folder = tmp_path_factory.mktemp(request.param)
    config = changed(stream_config, folder)
    config.algorithm.max_staleness, config.rollout.update = STALENESS, "in_flight"
    config.rollout.chunks_in_flight = 2 * CHUNKS
    if request.param == "killed":
        run = begun(config, folder, stage=DyingStandIn)
        with closing(run):
            run.train(1, ITERATIONS)
            run.finish(ITERATIONS)
            assert len(list(folder.glob("engine-*.jsonl"))) == 2
            yield [run]
            return
    first = begun(config, folder)
    with closing(first):
        stopped, position = until_something_is_overtaken(first)
    second = begun(config, folder, stopped, position)
    with closing(second):
        second.train(stopped + 1, ITERATIONS)
        second.finish(ITERATIONS)
        yield [first, second]


def until_something_is_overtaken(run: Run) -> tuple[int, Any]:
    """Train until a prompt of an iteration that is trained is in a later one, and where a checkpoint goes on."""
    for iteration in range(1, ITERATIONS):
        run.train(iteration, iteration)
        position = json.loads(json.dumps(run.ask("checkpoint_position", iteration)))
        if len(position) == 3:
            return iteration, tuple(position)
    raise AssertionError("no iteration left a prompt to a later one")


def test_every_prompt_is_trained_once_and_none_is_lost(runs: list[Run]) -> None:
    seen: list[str] = []
    for run in runs:
        for iteration, tables in run.iterations.items():
            assert [len(table) for table in tables] == [BATCH * SAMPLES // RANKS] * RANKS
            rows = run.rows(iteration)
            assert set(rows["iteration"].to_pylist()) == {iteration}
            uids = rows["uid"].to_pylist()
            assert {uids.count(uid) for uid in uids} == {SAMPLES} and len(set(uids)) == BATCH
            seen += set(uids)
    expected = expected_prompts(runs[0].config, ITERATIONS)
    assert sorted(seen) == sorted(uid for uids in expected for uid in uids)


def test_iterations_have_other_prompts_than_their_own_and_none_too_old(runs: list[Run]) -> None:
    overtaken, foreign = 0, 0
    expected = expected_prompts(runs[0].config, ITERATIONS)
    for run in runs:
        for iteration in run.iterations:
            table = run.rows(iteration)
            assert all(0 <= iteration - 1 - age <= STALENESS for age in table["policy_version"].to_pylist())
            foreign += len(set(table["uid"].to_pylist()) - set(expected[iteration - 1]))
        overtaken += sum(message["metrics"]["rollout/overtaken"] for message in run.messages("counted"))
    assert foreign > 0 and overtaken > 0


def test_chunks_reach_the_trainer_in_their_order(runs: list[Run]) -> None:
    for run in runs:
        base = min(run.iterations) - 1
        for iteration in run.iterations:
            first = (iteration - 1 - base) * CHUNKS
            for rank, table in enumerate(run.iterations[iteration]):
                chunks = list(dict.fromkeys(table["chunk"].to_pylist()))
                assert chunks == [first + rank + RANKS * i for i in range(CHUNKS // RANKS)]
