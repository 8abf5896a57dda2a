"""In which order admitted chunks begin."""

import asyncio
from typing import Any

import pytest

from pipeline.rollout.order import InOrder

LIMIT_S = 10


def begun(asked: list[int], answered: list[Any]) -> list[int]:
    """Chunks in the order in which they begin, asked and answered in these orders; `-chunk` is answered by an error."""

    async def run() -> list[int]:
        order, seen = InOrder(), []
        answers = {chunk: asyncio.get_running_loop().create_future() for chunk in asked}

        async def one(chunk: int) -> None:
            assert await order.admitted(chunk, answers[chunk]) == f"ticket {chunk}"
            seen.append(chunk)

        tasks = {chunk: asyncio.create_task(one(chunk)) for chunk in asked}
        await asyncio.sleep(0)
        for chunk in answered:
            if chunk < 0:
                answers[-chunk].set_exception(ConnectionError("gone"))
            else:
                answers[chunk].set_result(f"ticket {chunk}")
            for _ in range(5):
                await asyncio.sleep(0)
        for chunk, task in tasks.items():
            if -chunk in answered:
                with pytest.raises(ConnectionError):
                    await asyncio.wait_for(task, LIMIT_S)
            elif chunk in answered:
                await asyncio.wait_for(task, LIMIT_S)
            else:
                task.cancel()
        return seen

    return asyncio.run(run())


@pytest.mark.parametrize("answered", [[1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]])
def test_they_begin_in_their_order(answered: list[int]) -> None:
    assert begun([1, 2, 3, 4], answered) == [1, 2, 3, 4]


def test_later_ones_wait_for_nobody() -> None:
    assert begun([1, 2, 5], [1, 2]) == [1, 2]


def test_a_chunk_that_comes_again_waits_only_for_those_before_it() -> None:
    assert begun([7, 3], [3, 7]) == [3, 7]
    assert begun([7, 3], [3]) == [3]


def test_one_that_fails_holds_nobody() -> None:
    assert begun([1, 2, 3], [3, 2, -1]) == [2, 3]
