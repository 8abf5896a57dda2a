"""The reward stage inside Ray Data as the one actor that a rate limit needs."""

import ast
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.config.reward import RateLimitConfig
from pipeline.reward.stage import SingleReward
from tests.reward.rewards import custom, scores, table


@pytest.mark.ray
def test_one_actor_keeps_the_limit_over_chunks(ray_session: None, tmp_path: Path) -> None:
    import ray.data

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
    tables = [table([str(block * 4 + i) for i in range(4)]) for block in range(4)]
    stream = ray.data.from_arrow(tables).map_batches(
        SingleReward,
        fn_constructor_args=(config, 8, "function", 4),
        compute=ray.data.ActorPoolStrategy(size=1, max_tasks_in_flight_per_actor=4, max_concurrent_calls_per_actor=4),
        num_cpus=0.1,
        batch_size=None,
        batch_format="pyarrow",
        zero_copy_batch=True,
    )
    rows = pa.Table.from_pylist(stream.take_all())
    assert sorted(scores(rows)) == [float(i) for i in range(16)]
    times = [ast.literal_eval(line) for line in log.read_text().splitlines()]
    most = max(sum(begun <= moment < ended for begun, ended in times) for moment, _ in times)
    # More than a chunk has rows: several chunks are scored at a time, and all of them count.
    assert 4 < most <= 6
