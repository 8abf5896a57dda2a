"""The real engine with recurrent layers: it starts on CPUs, and its log-probs are the trainer's after every update."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.family_forms import build
from tests.rollout.engines import place as places
from tests.rollout.engines.place import Engine, Place, updates

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class Recurrent(Place):
    """A policy with a recurrent layer, one of attention, and experts."""

    def model(self, tokenizer: Any, tie: bool) -> Any:
        return build("granite-4-hybrid", tokenizer)


def open_place(folder: str) -> int:
    from vllm import ModelRegistry
    from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM

    # A class that vLLM knows by its name alone is looked at in one more process, which takes ten seconds to begin.
    ModelRegistry.register_model(GraniteMoeHybridForCausalLM.__name__, GraniteMoeHybridForCausalLM)
    places.place = Recurrent(True, folder)
    return os.getpid()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    running = Engine(open_place, str(tmp_path_factory.mktemp("engine") / "model"))
    yield running
    running.close()


def test_log_probs_are_the_trainers_after_every_update(engine: Engine) -> None:
    found = engine(updates, 0.7)
    assert all(seen == {version} for version, seen in found["versions"])
    assert max(found["gaps"]) < 1e-4, found
    assert min(found["stale"]) > 0.1, found
