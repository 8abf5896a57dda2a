"""Random episodes of every template family on the real engine: their rows are what the engine was asked and sampled.

`SLIPSTREAM_FUZZ_EPISODES` is the number of episodes, and `SLIPSTREAM_FUZZ_SEED` the seed of all that is random.
"""

import os
from pathlib import Path

import pytest

from tests.agent.families import FAMILIES
from tests.agent.fuzzed import PARSED, ROUND, open_place, play
from tests.rollout.engines.place import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(3600)]

EPISODES = int(os.environ.get("SLIPSTREAM_FUZZ_EPISODES", "3584"))
SEED = int(os.environ.get("SLIPSTREAM_FUZZ_SEED", "0"))


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_exactly_what_the_engine_was_asked_and_sampled(name: str, tmp_path: Path) -> None:
    prefix_cache = list(FAMILIES).index(name) % 2 == 0
    engine = Engine(open_place, str(tmp_path / "model"), name, SEED, prefix_cache)
    try:
        problems = []
        for number in range(max(3, -(-EPISODES // len(FAMILIES) // ROUND))):
            wrong, seen, gap = engine(play, number)
            problems += wrong
    finally:
        engine.close()
    print(f"{name}: {len(problems)} wrong, gap {gap:.1e}, {dict(sorted(seen.items()))}")
    assert not problems, f"{len(problems)} of {ROUND * (number + 1)} rows:\n" + "\n".join(problems[:10])
    wanted = ["rows", "observations", "with control text", "empty", "shortened", "closed", "stop", "length"]
    wanted += [
        "rows of two versions",
        "control tokens sampled within",
        "ended done",
        "ended turns",
        "ended length",
        "ended error",
    ]
    wanted += ["cached"] if prefix_cache else []
    wanted += ["tool"] if FAMILIES[name].tool else []
    wanted += ["with calls", "masked", "hostile values"] if name in PARSED else []
    assert not [what for what in wanted if not seen[what]], seen
