"""The reward stage inside Ray Data: as tasks, and as the one actor that a rate limit needs."""

import ast
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config.reward import RateLimitConfig
from pipeline.reward.stage import Reward, SingleReward
from tests.reward.rewards import custom, parts, scores, table

pytestmark = pytest.mark.ray

WHOLE: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True}


def blocks(count: int, rows: int) -> Any:
    import ray.data

    return ray.data.from_arrow([table([str(block * rows + i) for i in range(rows)]) for block in range(count)])


def test_tasks_score_and_hold_nothing_of_rays(ray_session: None, tmp_path: Path) -> None:
    source = """
import os
def compute_score(solution_str, **row):
    links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    sockets = [link for link in links if os.path.lexists(link) and os.readlink(link).startswith("socket:")]
    return {"score": float(solution_str), "sockets": len(sockets)}
"""
    made = blocks(3, 8).map_batches(Reward(custom(tmp_path, source)), num_cpus=1, **WHOLE).take_all()
    rows = pa.Table.from_pylist(made)
    assert sorted(scores(rows)) == [float(i) for i in range(24)]
    assert {part["sockets"] for part in parts(rows)} <= {0, 1}


def test_one_actor_keeps_the_limit_over_chunks(ray_session: None, tmp_path: Path) -> None:
    from ray.data import ActorPoolStrategy

    log = tmp_path / "log"
    source = f"""
import asyncio, time
async def compute_score(solution_str, **row):
    begun = time.time()
    await asyncio.sleep(0.1)
    with open({str(log)!r}, "a") as file:
        file.write(f"{{begun}},{{time.time()}}\\n")
    return float(solution_str)
"""
    config = custom(tmp_path, source)
    config.rate_limit = RateLimitConfig(max_concurrent=6)
    stream = blocks(4, 4).map_batches(
        SingleReward,
        fn_constructor_args=(config, 8, 4),
        compute=ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=4, max_concurrent_calls_per_actor=4),
        num_cpus=0.1,
        **WHOLE,
    )
    rows = pa.Table.from_pylist(stream.take_all())
    assert sorted(scores(rows)) == [float(i) for i in range(16)]
    times = [ast.literal_eval(line) for line in log.read_text().splitlines()]
    most = max(sum(begun <= moment < ended for begun, ended in times) for moment, _ in times)
    # More than a chunk has rows: several chunks are scored at a time, and all of them count.
    assert 4 < most <= 6
